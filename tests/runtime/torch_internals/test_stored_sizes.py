"""Sizes that a file holds: written as plain data, read without running any text, refused where they are none."""

from __future__ import annotations

import json

import pytest

from fusion_advisor.runtime.torch_internals.stored_sizes import expression_from, open_sizes, plain
from fusion_advisor.runtime.torch_internals.symbolic_sizes import assumptions_of, expression_of, is_size, range_of


def test_expressions_are_written_and_read_without_text():
    sizes = open_sizes([6, 5], [(0, -1), (2, 64)], [["sympy.Unequality", ["", 0], 1]])
    rows, width = sizes.symbols
    assert range_of(sizes.environment, width) == (2, 64) and len(assumptions_of(sizes.environment)) >= 2
    for expression in (rows + 1, rows * width * 4, rows**2, 3 * rows + width * (rows - 1)):
        data = json.loads(json.dumps(plain(expression, sizes.symbols)))
        assert expression_from(data, sizes.symbols) == expression
        assert sizes.size(data).node.expr == expression and sizes.number(data) == int(expression.subs({rows: 6, width: 5}))
    half = expression_of(sizes.size(["", 0]) // 2)
    assert sizes.number(plain(half, sizes.symbols)) == 3
    truth = sizes.truth(["sympy.Unequality", ["", 1], 3])
    assert is_size(truth) and sizes.truth(True) is True


@pytest.mark.parametrize(
    "data",
    [
        ["os.system", 1],
        ["power", 2, 99],
        ["", 7],
        ["", -1],
        [],
        "1",
        None,
        1.5,
        ["sympy.Unequality", ["", 0], 1],
        [["sympy.Add"], 1],
    ],
)
def test_what_is_no_size_is_refused(data):
    sizes = open_sizes([6], [(0, -1)], [])
    with pytest.raises((LookupError, TypeError, ValueError)):
        sizes.size(data)


def test_a_guard_that_is_not_true_is_refused():
    with pytest.raises(ValueError, match="not true"):
        open_sizes([6], [(0, -1)], [["sympy.Equality", ["", 0], 7]])
