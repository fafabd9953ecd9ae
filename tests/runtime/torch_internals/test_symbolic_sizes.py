"""Symbolic sizes: one test for each private API of torch that is used, which names it when a release moves it."""

from __future__ import annotations

import pytest
import sympy
import torch

from fusion_advisor.runtime.torch_internals import dynamo, symbolic_sizes
from tests.runtime.torch_internals.dynamo_graphs import dynamo_graph


def traced(function, x):
    """The fake tensors that a graph with open sizes returns at its first op, by order, and its environment."""
    symbolic_sizes.leave_open(x, range(x.dim()))

    def values(graph):
        return [node.meta["example_value"] for node in graph.graph.nodes if "example_value" in node.meta]

    found = dynamo_graph(function, x, dynamic=None, then=values)[1]
    return found, symbolic_sizes.environment_of(found)


def test_sizes_are_symbols_and_what_is_computed_from_them():
    values, environment = traced(lambda x: torch.cat([x, x]) * 2, torch.randn(5, 7))
    rows, columns = values[-1].shape
    first = next(value for value in values if isinstance(value, torch.Tensor)).shape[0]
    assert symbolic_sizes.is_size(rows) and not symbolic_sizes.is_size(5)
    assert symbolic_sizes.symbol_of(columns) is not None
    assert symbolic_sizes.symbol_of(rows) is None  # 2 * s
    assert symbolic_sizes.symbol_of(5) is None
    symbol = symbolic_sizes.symbol_of(first)
    expression = symbolic_sizes.expression_of(rows)
    assert symbolic_sizes.symbols_in(expression) == {symbol}
    assert symbolic_sizes.at_sizes(expression, {symbol: 9}) == 18
    compute = symbolic_sizes.computing(expression, [symbol])
    assert [compute(size) for size in (3, 4, 3)] == [6, 8, 6]
    assert symbolic_sizes.range_of(environment, symbol)[0] == 2
    is_not_one = symbolic_sizes.is_not_one(columns)
    of_columns = symbolic_sizes.symbol_of(columns)
    assert [symbolic_sizes.at_sizes(is_not_one, {of_columns: size}) for size in (1, 2)] == [False, True]
    assert symbolic_sizes.is_inequation(is_not_one) and symbolic_sizes.is_not_one(5) is True


def test_an_expression_without_a_size_for_its_symbol_is_refused():
    values, _ = traced(lambda x: x * 2, torch.randn(5, 7))
    expression = symbolic_sizes.expression_of(values[-1].shape[0])
    with pytest.raises(ValueError, match="without a size"):
        symbolic_sizes.at_sizes(expression, {})
    with pytest.raises(ValueError, match="without a size"):
        symbolic_sizes.at_sizes(expression > 4, {})
    assert symbolic_sizes.at_sizes(7, {}) == 7
    assert symbolic_sizes.symbols_in(7) == set()


def test_usual_operations_are_computed_as_sympy_does():
    from torch.utils._sympy.functions import CeilDiv, FloorDiv, PythonMod

    a, b = sympy.symbols("a b", integer=True, positive=True)
    smaller = sympy.Min(a, 8)
    found = [
        smaller, sympy.Max(a, b), 3 * smaller + FloorDiv(a + b, 4), CeilDiv(a, 3), FloorDiv(a, b), PythonMod(a, b),
        sympy.Or(sympy.Eq(smaller, b), a > 9), sympy.And(a > 3, b > 3), sympy.Not(sympy.Or(sympy.Eq(smaller, b), b > 9)),
    ]  # fmt: skip
    for expression in found:
        for sizes in ((1, 1), (5, 2), (9, 4), (64, 10)):
            symbols = dict(zip((a, b), sizes, strict=True))
            by_sympy = expression.xreplace({symbol: sympy.Integer(size) for symbol, size in symbols.items()})
            assert symbolic_sizes.at_sizes(expression, symbols) == (bool(by_sympy) if by_sympy.is_Boolean else int(by_sympy))
    with pytest.raises(ValueError, match="without a size"):
        symbolic_sizes.at_sizes(smaller, {b: 3})


def test_what_is_symbolic_is_known_from_what_is_not():
    values, environment = traced(lambda x: x * 2, torch.randn(5, 7))
    assert symbolic_sizes.is_symbolic(values[-1]) and symbolic_sizes.is_symbolic(values[-1].shape[0])
    assert not symbolic_sizes.is_symbolic(torch.zeros(3)) and not symbolic_sizes.is_symbolic(3)
    assert environment is not None
    assert symbolic_sizes.environment_of([torch.zeros(3), 4]) is None


def test_a_branch_on_a_size_is_a_guard():
    values, environment = traced(lambda x: x * 2 if x.shape[0] > 4 else x * 3, torch.randn(9, 7))
    symbol = symbolic_sizes.symbol_of(values[-1].shape[0])
    (guard,) = [one for one in symbolic_sizes.guards_of(environment) if symbol in symbolic_sizes.symbols_in(one)]
    assert [symbolic_sizes.at_sizes(guard, {symbol: size}) for size in (4, 5, 100)] == [False, True, True]
    assert not symbolic_sizes.is_inequation(guard)
    assert symbolic_sizes.is_inequation(_ne(symbol))
    assert symbolic_sizes.assumptions_of(environment)


def _ne(symbol):
    import sympy

    return sympy.Ne(symbol, 3)


def test_a_size_that_the_model_fixes_is_named():
    x = torch.randn(9, 7)
    with pytest.raises(RuntimeError) as caught, dynamo.without_logged_guard_errors():
        traced(lambda x: x + torch.ones(9, 1), x)
    why = symbolic_sizes.why_fixed(caught.value)
    assert why is not None and "9" in why
    assert symbolic_sizes.why_fixed(ValueError("no")) is None


def test_sizes_are_compared_parted_and_known_to_rise():
    values, _ = traced(lambda x: x.unfold(0, 3, 2) * 2 + x[0, 0] * x.shape[0], torch.randn(9, 7))
    windows = next(value for value in reversed(values) if isinstance(value, torch.Tensor)).shape[0]
    rows, columns = next(value for value in values if isinstance(value, torch.Tensor)).shape
    row, column, window = (symbolic_sizes.expression_of(size) for size in (rows, columns, windows))
    assert symbolic_sizes.written_out(2 * (row + 1) - 2, {}) == 2 * row
    assert symbolic_sizes.written_out(row * column, {column: 7}) == 7 * row
    assert symbolic_sizes.written_out(row - row, {}) == 0
    squared = symbolic_sizes.expression_of(rows * rows // rows)
    assert symbolic_sizes.written_out(squared + 1, {}) == row + 1
    assert symbolic_sizes.written_out(window, {}) == window
    assert symbolic_sizes.quotient(6 * row * column, 2 * row) == 3 * column
    assert symbolic_sizes.quotient(row, row) == 1 and symbolic_sizes.quotient(12, 4) == 3
    assert symbolic_sizes.quotient(row, 2) is None and symbolic_sizes.quotient(12, 5) is None
    assert symbolic_sizes.quotient(2, row) is None
    assert symbolic_sizes.is_at_least(row, 0) and symbolic_sizes.is_at_least(3, 3)
    assert not symbolic_sizes.is_at_least(row - 5, 0) and not symbolic_sizes.is_at_least(2, 3)
    for rising in (row, row + 3, row * column, window, 7, 64 - column):
        assert symbolic_sizes.rises(rising, {row}), rising
    for other in (64 - row, row * (row - 5), row % 8):
        assert not symbolic_sizes.rises(other, {row}), other
    assert symbolic_sizes.symbols_under(rows) == {row} and symbolic_sizes.symbols_under(5) == set()


def test_what_a_guard_says_that_a_computed_size_is():
    size = sympy.Symbol("s", integer=True, positive=True)
    least = sympy.Min(64, size)
    assert symbolic_sizes.equalities_of([sympy.Eq(least, size), sympy.Eq(size, least), size > 3]) == {least: size}


def test_what_is_true_of_all_sizes_of_ranges_is_known():
    rows, columns = sympy.symbols("rows columns", integer=True, positive=True)
    ranges = {rows: (2, 16), columns: (8, 40)}
    for held in (
        sympy.Ne(rows, 1),
        rows >= 2,
        rows <= 16,
        sympy.Ne(rows * columns, 1),
        rows * (columns - 7) > 1,
        rows < columns + 9,
    ):
        assert symbolic_sizes.is_true_within(held, ranges), held
    other = sympy.Symbol("other", integer=True, positive=True)
    for one in (sympy.Ne(rows, 2), rows > 2, rows < 16, sympy.Eq(rows, 5), rows < columns, sympy.Ne(rows * other, 0), rows, True):
        assert not symbolic_sizes.is_true_within(one, ranges), one
    assert not symbolic_sizes.is_true_within(sympy.Ne(rows, 1), {rows: (1, 16)})


EXPRESSIONS = {
    "a sum of products": lambda rows, columns: 3 * rows * columns + 2 * rows - 7,
    "a power": lambda rows, columns: rows**2 * columns,
    "a fraction": lambda rows, columns: rows * columns / 2,
    "a negative power": lambda rows, columns: columns * rows**-1,
    "a largest": lambda rows, columns: sympy.Max(rows, columns) + 1,
    "not equal": lambda rows, columns: sympy.Ne(rows, columns + 1),
    "equal": lambda rows, columns: sympy.Eq(2 * rows, columns),
    "more": lambda rows, columns: rows + 1 > columns,
    "at most": lambda rows, columns: rows * columns <= 40,
    "both": lambda rows, columns: sympy.And(rows > 2, columns > 5),
}


@pytest.mark.parametrize("expression", EXPRESSIONS.values(), ids=EXPRESSIONS.keys())
def test_every_expression_has_sympys_own_value(expression):
    rows, columns = sympy.symbols("rows columns", integer=True, positive=True)
    for sizes in ((1, 1), (2, 4), (5, 8), (8, 5)):
        value = symbolic_sizes.at_sizes(expression(rows, columns), {rows: sizes[0], columns: sizes[1]})
        expected = expression(*map(sympy.Integer, sizes))
        assert value == (bool(expected) if expected.is_Boolean else float(expected))
        assert isinstance(value, bool) == expected.is_Boolean
