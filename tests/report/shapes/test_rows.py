"""Rows of ``--shapes``: every figure is the report's, every reason stands somewhere, and one chain has one row."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fusion_advisor import units
from fusion_advisor.records import ShapePiece
from fusion_advisor.report import shared_rows
from fusion_advisor.report.shapes.rows import matrix, piece_rows, plain_name, point_rows, range_words
from tests.report.fixtures import hostile_shapes, point, ranges, shapes


def test_a_row_holds_the_points_own_figures() -> None:
    found = shapes()
    points = [point for piece in found.pieces for point in piece.points]
    rows = point_rows(found)
    assert [row.number for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row.piece for row in rows] == [1, 1, 1, 2, 3, 3]
    for row, made in zip(rows, points, strict=True):
        assert row.elements == math.prod(size for _, size in made.sizes)
        assert row.is_served is not bool(made.reason)
        if made.eager is None or made.ours is None:
            assert (row.eager, row.ours, row.speedup, row.compared) == ("–", "–", "–", None)
            continue
        assert (row.eager, row.ours) == (units.duration(made.eager.median_ns), units.duration(made.ours.median_ns))
        ratio, low, high = shared_rows.speedup_bounds(made.eager, made.ours)
        assert (row.speedup, row.spread) == (units.speedup(ratio), units.speedup_interval(low, high))
    assert [row.outcome for row in rows] == ["faster", "faster", "original ops", "faster", "within noise", "original ops"]


@pytest.mark.parametrize(
    ("ours_ns", "outcome", "tone"),
    [(500_000, "faster", "gain"), (1_000_000, "within noise", "warn"), (2_000_000, "slower", "loss")],
)
def test_the_whole_interval_says_which_side_it_is(ours_ns: int, outcome: str, tone: str) -> None:
    base = shapes()
    one = ShapePiece(ranges=base.asked, points=(point(4, 4, 1_000_000, ours_ns, "gelu_tanh"),))
    (row,) = point_rows(replace(base, pieces=(one,)))
    assert (row.outcome, row.tone) == (outcome, tone)


def test_a_point_without_rounds_is_not_timed() -> None:
    base = shapes()
    made = point(4, 4, 1_000_000, 900_000, "gelu_tanh")
    assert made.eager is not None
    for eager in (None, replace(made.eager, times_ns=())):
        one = ShapePiece(ranges=base.asked, points=(replace(made, eager=eager),))
        (row,) = point_rows(replace(base, pieces=(one,)))
        assert (row.speedup, row.outcome, row.compared) == ("–", "not timed", None)


def test_pieces_make_up_the_ranges() -> None:
    found = shapes()
    rows = piece_rows(found)
    assert sum(row.count for row in rows) == 16 * 4096
    assert [row.sizes for row in rows][1:] == ["batch 2..16, seq 1", "batch 1, seq 2..4096", "batch 1, seq 1"]
    assert [row.points for row in rows] == [(1, 2, 3), (4,), (5, 6), ()]
    assert [bool(row.refusal) for row in rows] == [False, False, False, True]
    assert range_words(ranges((3, 3), (4, 5))) == "batch 3, seq 4..5"


def test_the_matrix_says_kept_dropped_or_nothing_and_why() -> None:
    found = matrix(shapes())
    words = {name: [cell.words for cell in cells] for name, cells in found.rows}
    assert words["add_layernorm"] == ["kept", "kept (2)", "", "", "", ""]
    assert words["gelu_tanh"] == ["kept", "kept", "original ops", "kept", "", "original ops"]
    assert words["merge-gemms"] == ["", "dropped", "", "dropped", "", ""]
    assert words["embedding_add_layer_norm"] == ["", "", "", "kept", "kept", ""]
    reasons = dict(found.reasons)
    cells = dict(found.rows)
    assert reasons[cells["merge-gemms"][1].note] == reasons[cells["merge-gemms"][3].note] == "it decides by one size"
    assert "21.40 ms" in reasons[cells["gelu_tanh"][2].note] and "relative error" in reasons[cells["gelu_tanh"][5].note]


def test_a_rewrite_that_stays_at_some_of_its_sites_is_kept_with_the_reason() -> None:
    base = shapes()
    made = point(4, 4, 2, 1, "gelu_tanh", dropped=(("gelu_tanh", "no one program"),))
    found = matrix(replace(base, pieces=(ShapePiece(ranges=base.asked, points=(made,)),)))
    ((_, (cell,)),) = found.rows
    assert cell.words == "kept" and found.reasons == ((cell.note, "no one program"),)


def test_reasons_have_letters_however_many_there_are() -> None:
    base = shapes()
    dropped = tuple((f"kernel_{number}", f"reason {number}") for number in range(60))
    found = matrix(replace(base, pieces=(ShapePiece(ranges=base.asked, points=(replace(point(1, 1, 2, 1), dropped=dropped),)),)))
    letters = [letter for letter, _ in found.reasons]
    assert len(set(letters)) == 60 and letters[0] == "a" and letters[25:28] == ["z", "aa", "ab"]


@pytest.mark.parametrize(
    ("name", "plain"),
    [("add_layer_norm_633b", "add_layer_norm"), ("merge-gemms", "merge-gemms"), ("gelu_tanh", "gelu_tanh"), ("_0a1b", "_0a1b")],
)
def test_a_digest_is_no_part_of_a_name(name: str, plain: str) -> None:
    assert plain_name(name) == plain


def test_no_kernel_of_the_library_ends_like_a_digest() -> None:
    from fusion_advisor.content import content_dir

    names = [folder.name for folder in content_dir("kernels").iterdir()]
    assert names and [name for name in names if plain_name(name) != name] == []


def test_the_largest_sizes_have_rows() -> None:
    assert [row.elements for row in point_rows(hostile_shapes())] == [2**62, 2**62]
    assert len(matrix(hostile_shapes()).rows) == 4
