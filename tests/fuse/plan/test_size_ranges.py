"""Ranges of sizes are read, and what contradicts itself is refused with the name of the dim."""

from __future__ import annotations

import pytest

from fusion_advisor.errors import UsageError
from fusion_advisor.fuse.plan.size_ranges import ShapeRequest, asked_shapes, read_points, read_shapes
from fusion_advisor.records import SizeRange

BATCH, SEQ = SizeRange(name="batch", least=1, most=16), SizeRange(name="seq", least=1, most=4096)


def test_ranges_and_single_sizes_are_read():
    assert read_shapes("batch=1..16,seq=1..4096").ranges == (BATCH, SEQ)
    assert read_shapes(" batch = 4 , seq= 2 .. 8 ").ranges == (
        SizeRange(name="batch", least=4, most=4),
        SizeRange(name="seq", least=2, most=8),
    )
    assert (BATCH.text, SizeRange(name="batch", least=4, most=4).text) == ("batch=1..16", "batch=4")


def test_dims_may_be_named_tensor_by_tensor():
    request = read_shapes({"ids": ("batch=1..16", "seq=1..4096"), "mask": ("batch", "seq"), "table": (None, "seq")})
    assert request.ranges == (BATCH, SEQ)
    assert dict(request.dims) == {"ids": ("batch", "seq"), "mask": ("batch", "seq"), "table": ("", "seq")}
    assert asked_shapes(request) is request
    assert asked_shapes(None) is None
    assert isinstance(asked_shapes("batch=2..3"), ShapeRequest)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no range"),
        ("batch", "batch has no range"),
        ("batch=0..4", "begins at 0"),
        ("batch=-2..4", "begins at -2"),
        ("batch=8..4", "holds no size"),
        ("batch=1..4,batch=1..8", "contradict"),
        ("batch=1...4", "no range of sizes"),
        ("batch=a", "no range of sizes"),
        ("a=1..2,b=1..2,c=1..2,d=1..2", "4 dims may vary"),
    ],
)
def test_what_is_no_range_is_refused(text, words):
    with pytest.raises(UsageError, match=words):
        read_shapes(text)


def test_points_lie_in_the_ranges():
    assert read_points("batch=1 seq=512; batch=16, seq=1", (BATCH, SEQ)) == ((1, 512), (16, 1))
    assert read_points("", (BATCH, SEQ)) == ()
    for text, words in (
        ("batch=1", "seq has no size"),
        ("batch=32 seq=1", "batch is 32"),
        ("batch=1 seq=1 width=3", "no width"),
        ("batch=one seq=1", "is no size of a dim"),
    ):
        with pytest.raises(UsageError, match=words):
            read_points(text, (BATCH, SEQ))
