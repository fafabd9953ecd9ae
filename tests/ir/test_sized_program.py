"""A chain lowered once gives its kernel's arguments at any size; what another size would change is found out."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from fusion_advisor.ir.program import Operand, Program, Store, Value
from fusion_advisor.ir.sized_int import SizedInt
from fusion_advisor.ir.sized_program import NoOneProgram, points_for, require_same, sized_program


def program(batch, length, *, width=8, scale=2.0, offset=0):
    """``x * scale`` of a (batch, width, length) tensor into a contiguous (batch, length, width)."""
    load = Value(op="load", operand=0, strides=(width * length, 1, length), offset=offset)
    return Program(
        dims=(batch, length, width),
        operands=(Operand(name="x", dtype="float32"), Operand(name="out", dtype="float32", is_output=True)),
        values=(load, Value(op="const", constant=scale), Value(op="mul", args=(0, 1))),
        stores=(Store(operand=1, value=2, strides=(width * length, width, 1)),),
    )


def tracked(batch, length):
    return SizedInt(batch, ("size", 0)), SizedInt(length, ("size", 1))


def test_a_program_is_had_at_any_size():
    sized = sized_program(program(*tracked(5, 17)))
    for batch, length in ((2, 3), (16, 4096), (3, 8)):
        assert sized.at((batch, length)) == program(batch, length)
        require_same(sized, program(batch, length), (batch, length), "there")
    assert all(type(number) is int for number in (*sized.example.dims, *sized.example.values[0].strides))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (program(2, 3, scale=3.0), "its loops at"),
        (program(2, 3, offset=4), "its loops at"),
        (replace(program(2, 3), dims=(2, 3, 9)), "is 9, and 8 was computed"),
        (replace(program(2, 3), stores=(Store(operand=1, value=2, strides=(24, 8, 2)),)), "its loops at"),
    ],
)
def test_a_chain_that_is_another_one_at_some_sizes_is_refused(other, words):
    with pytest.raises(NoOneProgram, match=words):
        require_same(sized_program(program(*tracked(5, 17))), other, (2, 3), "batch=2, seq=3")


def test_strides_of_another_kind_are_refused_when_bound():
    batch, length = tracked(5, 17)
    sized = sized_program(program(batch, length))
    with pytest.raises(NoOneProgram, match="another kind"):
        sized.at((4, 1))  # a stride of the length is 1 there: another kernel


def test_points_are_different_primes_inside_the_ranges():
    points = points_for({"batch": (2, 16), "seq": (2, 4096)})
    assert len(points) == len({tuple(point.items()) for point in points}) >= 4
    assert all(2 <= point["batch"] <= 16 and point["batch"] != point["seq"] for point in points)
    assert points_for({"batch": (2, 2)}) == [{"batch": 2}]
    assert {point["seq"] for point in points_for({"seq": (2, 4)})} == {2, 3}
    assert points_for({}) == [{}]
    for least, most in ((9, 15), (9, 17)):  # with two and three primes in it
        several = points_for({"batch": (2, 4), "seq": (least, most), "cached": (least + 30, most + 30)})
        assert all(len({point[name] for point in several}) > 1 for name in ("batch", "seq", "cached"))
    for ends in itertools.combinations(range(1, 20), 2):
        for other in ((1, 4), (2, 2), (2, 3), (5, 6), (8, 12), (128, 131), (500, 512)):
            ranges = {"batch": ends, "cached": other}
            several = points_for(ranges)
            for name, (least, most) in ranges.items():
                assert all(least <= point[name] <= most for point in several)
                assert len({point[name] for point in several}) > 1 or most <= max(least, 2)
    for ranges in ({"batch": (2, 2), "seq": (1, 2)}, {"batch": (1, 2), "seq": (1, 2)}):
        assert points_for(ranges) == [{"batch": 2, "seq": 2}]  # a dim of one element has no loop
    assert points_for({"batch": (1, 1)}) == [{"batch": 1}]
