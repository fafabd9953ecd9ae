"""Numbers that remember how they follow from sizes give, at other sizes, what plain arithmetic gives there."""

from __future__ import annotations

import copy
import math
import pickle
import random

import pytest

from fusion_advisor.ir.sized_int import SizedInt, compiled, form_of


def sizes_at(values):
    return [SizedInt(value, ("size", place)) for place, value in enumerate(values)]


def expression(seed):
    """A random function of three sizes: what lowering does with them."""
    generator = random.Random(seed)
    steps = [(generator.choice("+-*/%n"), generator.randrange(8), generator.randrange(8)) for _ in range(6)]
    constants = [generator.choice([0, 1, 2, 3, 7, 64]) for _ in range(2)]

    def run(sizes):
        values = [*sizes, *constants]
        for operator, left, right in steps:
            one, other = values[left % len(values)], values[right % len(values)]
            if operator == "+":
                values.append(one + other)
            elif operator == "-":
                values.append(one - other)
            elif operator == "*":
                values.append(one * other)
            elif operator == "n":
                values.append(-one)
            else:
                values.append(divmod(one, constants[right % 2] + 1)[operator == "%"])
        return values

    return run


@pytest.mark.parametrize("seed", range(60))
def test_forms_give_what_the_arithmetic_gives_at_other_sizes(seed):
    run = expression(seed)
    tracked = run(sizes_at([11, 17, 5]))
    assert [int(value) for value in tracked] == [int(value) for value in run([11, 17, 5])]
    compute = compiled([form_of(value) for value in tracked])
    for other in ([2, 3, 4], [1, 1, 1], [16, 4096, 7]):
        assert list(compute(other)) == run(other)


def test_products_of_a_shape_remember_their_sizes():
    batch, length = sizes_at([3, 10])
    numbers = [math.prod((batch, length, 64)), sum((batch, length)), length // 2, length % 4, -batch, 2 - length, 100 // length]
    assert numbers == [1920, 13, 5, 2, -3, -8, 10]
    assert compiled([form_of(one) for one in numbers])([5, 7]) == (2240, 12, 3, 3, -5, -5, 14)


def test_what_does_not_depend_on_a_size_is_a_plain_number():
    (size,) = sizes_at([6])
    for number in (size * 0, size - size, size // size, 0 * size):
        assert type(number) is int
    assert (size + 0) is not None
    assert form_of(size * 1) == form_of(size + 0) == form_of(size // 1) == ("size", 0)
    assert compiled([3, form_of(size)])([9]) == (3, 9)
    assert compiled([])([9]) == ()


def test_it_compares_and_hashes_as_its_value():
    (size,) = sizes_at([6])
    assert size == 6
    assert {size: "a"}[6] == "a"
    assert (1, size) == (1, 6)
    assert size * 1.5 == 9.0
    assert list(range(size))[-1] == 5


def test_copies_keep_the_form():
    (size,) = sizes_at([6])
    for twin in (copy.deepcopy(size * 2), pickle.loads(pickle.dumps(size * 2))):
        assert (int(twin), form_of(twin)) == (12, ("*", ("size", 0), 2))


def test_no_form_but_our_own_is_computed():
    with pytest.raises(AssertionError):
        compiled([("__import__('os')", 1, 2)])
    with pytest.raises(ValueError):
        compiled([("size", "0].__class__[")])
