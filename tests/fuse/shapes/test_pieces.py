"""Ranges are split where a model makes another graph, and nowhere else; the pieces make up the ranges."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from fusion_advisor.capture.sizes.open_capture import OneSizeOnly, capture_open
from fusion_advisor.fuse.shapes import pieces
from fusion_advisor.fuse.shapes.pieces import OtherPieces, beside_holes, contains, find_again, find_pieces, sample_of
from fusion_advisor.records import SizeRange
from tests.capture.sizes.test_open_capture import DIMS, Rows

BATCH, SEQ = SizeRange(name="batch", least=1, most=16), SizeRange(name="seq", least=1, most=100)


def found(look, ranges=(BATCH, SEQ), **limits):
    return find_pieces(ranges, capturing(look), **limits)


def capturing(look, sizes_seen=None):
    model = Rows(look).eval()

    def capture(sizes):
        if sizes_seen is not None:
            sizes_seen.append(dict(sizes))
        x = torch.randn(sizes.get("batch", 2), sizes.get("seq", 3), 8)
        dims = {"x": tuple(name if name in sizes else "" for name in DIMS["x"])}
        return capture_open(model, (), {"x": x}, dims)

    return capture


def texts(found_pieces):
    return [", ".join(one.text for one in piece.box) for piece in found_pieces]


def test_a_size_of_one_is_in_the_piece_of_larger_ones():
    assert texts(found(lambda x: x)) == ["batch=1..16, seq=1..100"]


def test_a_size_of_one_has_a_piece_of_its_own_where_it_decides():
    assert texts(found(lambda x: x.relu() if x.shape[0] == 1 else x)) == ["batch=2..16, seq=1..100", "batch=1, seq=1..100"]
    assert texts(found(lambda x: x.relu() if x.shape[1] > 1 else x)) == ["batch=1..16, seq=2..100", "batch=1..16, seq=1"]


def test_a_graph_of_size_one_serves_no_other():
    ranges = (SizeRange(name="batch", least=2, most=2), SizeRange(name="seq", least=1, most=2))

    def capture(sizes):
        return capture_open(Rows().eval(), (), {"x": torch.randn(sizes["batch"], 1, 8)}, {"x": ("batch", "seq", "")})

    assert pieces._largest_box(ranges, {"batch": 2, "seq": 1}, capture({"batch": 2})) == (
        ranges[0], SizeRange(name="seq", least=1, most=1),
    )  # fmt: skip


def test_combinations_of_small_sizes_are_served_by_the_graphs_that_they_make():
    ranges = (SizeRange(name="batch", least=1, most=3), SizeRange(name="seq", least=1, most=5))
    for piece in found(lambda x: x.relu() if x.shape[0] < x.shape[1] else x, ranges):
        for batch, seq in itertools.product(*(range(one.least, one.most + 1) for one in piece.box)):
            graph = piece.opened.region.graph.graph
            assert (batch < seq) == any(node.target is torch.ops.aten.relu.default for node in graph.nodes)


def test_a_branch_splits_the_range_where_it_is():
    ranges = (SizeRange(name="seq", least=2, most=100),)
    split = found(lambda x: x.relu() if x.shape[1] > 32 else x, ranges)
    assert sorted(texts(split)) == ["seq=2..32", "seq=33..100"]
    for piece in split:
        assert all(piece.opened.holds({"seq": size}) for size in range(piece.box[0].least, piece.box[0].most + 1))


def test_a_single_size_in_between_is_a_piece():
    ranges = (SizeRange(name="seq", least=2, most=40),)
    split = found(lambda x: x if x.shape[1] != 20 else x.relu(), ranges)
    assert sorted(texts(split)) == ["seq=2..19", "seq=20", "seq=21..40"]


def test_pieces_make_up_the_ranges_and_do_not_overlap():
    ranges = (SizeRange(name="batch", least=1, most=6), SizeRange(name="seq", least=1, most=20))
    split = found(lambda x: x.relu() if x.shape[1] > 7 else (x if x.shape[0] < 4 else x.sin()), ranges)
    for batch, seq in itertools.product(range(1, 7), range(1, 21)):
        sizes = {"batch": batch, "seq": seq}
        (piece,) = [one for one in split if contains(one.box, sizes)]
        assert piece.opened is None or piece.opened.holds_but_for_holes(sizes)


def test_a_size_that_the_model_fixes_is_refused_in_words():
    (piece,) = found(lambda x: x + torch.ones(11, 1), (SizeRange(name="seq", least=11, most=12),))
    assert piece.opened is None
    assert piece.refusal


def test_a_model_of_very_many_graphs_is_given_up():
    def look(x):
        for _ in range(x.shape[1] // 4):
            x = x + 1
        return x

    split = found(look, (SizeRange(name="seq", least=2, most=100),), most=3)
    refused = [piece for piece in split if piece.refusal]
    assert len(split) - len(refused) <= 3
    assert all("more than 3 graphs" in piece.refusal for piece in refused)


def test_a_capture_that_serves_one_size_says_why():
    def capture(_):
        raise OneSizeOnly("it looks at a number in a tensor")

    (piece,) = find_pieces((SizeRange(name="seq", least=2, most=3),), capture)
    assert piece.refusal == "it looks at a number in a tensor"


def test_no_sample_is_one_where_a_box_has_more():
    box = (SizeRange(name="batch", least=1, most=6), SizeRange(name="seq", least=1, most=2))
    assert sample_of(box) == {"batch": 3, "seq": 2}
    assert sample_of((box[1], replace(box[1], name="other"))) == {"seq": 2, "other": 2}


def test_samples_are_different_primes_of_moderate_size():
    box = (SizeRange(name="batch", least=2, most=16), SizeRange(name="seq", least=2, most=4096))
    assert sample_of(box) == {"batch": 5, "seq": 11}
    assert sample_of((SizeRange(name="seq", least=1000, most=1003),)) == {"seq": 1000}
    assert sample_of((SizeRange(name="batch", least=1, most=1), SizeRange(name="seq", least=1, most=1))) == {"batch": 1, "seq": 1}


def branches(x):
    return x.relu() if x.shape[1] > 32 else x.sin() if x.shape[0] > 8 else x


def test_the_sizes_beside_a_hole_are_the_nearest_in_the_piece():
    box = (SizeRange(name="height", least=1, most=16), SizeRange(name="width", least=1, most=16))

    def beside(height, width, holds=lambda sizes: sizes["height"] != sizes["width"]):
        return beside_holes({"height": height, "width": width}, box, holds)

    assert beside(1, 1) in ({"height": 1, "width": 2}, {"height": 2, "width": 1})
    assert beside(16, 16) in ({"height": 16, "width": 15}, {"height": 15, "width": 16})
    assert beside(4, 5) == {"height": 4, "width": 5}
    assert beside(4, 5, lambda sizes: False) is None


def test_pieces_are_captured_again_where_they_were_and_only_those_that_serve():
    first, again = [], []
    pieces_then = find_pieces((BATCH, SEQ), capturing(branches, first))
    served = [place % 2 == 0 for place in range(len(pieces_then))]
    known = [(piece.box, is_served) for piece, is_served in zip(pieces_then, served, strict=True)]
    pieces_now = find_again((BATCH, SEQ), known, capturing(branches, again))
    assert texts(pieces_now) == texts(pieces_then)
    assert [piece.opened is not None for piece in pieces_now] == served
    assert again == [sizes for sizes, is_served in zip(first, served, strict=True) if is_served]
    assert len(served) > 2


@pytest.mark.parametrize(
    "change",
    [
        lambda known: known[:-1],
        lambda known: [*known, known[-1]],
        lambda known: [(known[1][0], True), *known[1:]],
        lambda known: [((BATCH, SizeRange(name="seq", least=1, most=200)), False), *known[1:]],
    ],
    ids=["one less", "one more", "another box", "a box outside"],
)
def test_other_pieces_than_were_decided_are_refused(change):
    known = [(piece.box, True) for piece in found(branches)]
    with pytest.raises(OtherPieces):
        find_again((BATCH, SEQ), change(known), capturing(branches))


def test_a_model_that_branches_elsewhere_makes_other_pieces():
    known = [(piece.box, True) for piece in found(branches)]
    with pytest.raises(OtherPieces):
        find_again((BATCH, SEQ), known, capturing(lambda x: x.relu() if x.shape[1] > 33 else x))
