"""What a report says about ranges of sizes."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from fusion_advisor.records import ShapePiece, ShapePoint, ShapeRanges
from fusion_advisor.report.shapes import sentences
from fusion_advisor.report.shapes.rows import point_rows
from tests.report.fixtures import generated_shapes, point, shapes


def with_points(*points: ShapePoint) -> ShapeRanges:
    base = shapes()
    return replace(base, pieces=(ShapePiece(ranges=base.asked, points=points),))


def test_what_a_range_costs_at_the_examples_sizes_is_said() -> None:
    assert sentences.general_line(shapes()) == ""
    pair = point(2, 2, 1_000_000, 1_100_000)
    line = sentences.general_line(replace(shapes(), exact=pair.eager, general=pair.ours))
    assert line.startswith("Launch by launch, at the example's sizes")
    replays = sentences.general_line(replace(shapes(), exact=pair.eager, general=pair.ours, is_replayed=True))
    assert replays.startswith("In CUDA graphs, at")
    assert "the plan of the range takes 1.10 ms and the plan of exactly these sizes 1.00 ms: 1.10× as long" in line
    assert sentences.general_line(replace(shapes(), exact=pair.eager)) == ""


def test_sizes_of_generate_are_counted_step_by_step() -> None:
    made = generated_shapes()
    assert sentences.share_line(made) == "All 8,192 sizes lie in 2 pieces with rewrites, one graph each."
    (line,) = sentences.left_to_original_ops(made)
    assert line.startswith("Near decode: batch 8, cached 512, in decode: batch 1..8, cached 1..512: the original ops run.")
    assert "prefill input_ids (batch, seq)" in sentences.dims_line(made)


def test_points_that_took_over_the_rewrites_of_another_are_named() -> None:
    assert sentences.carried_line(shapes()) == ""
    whole = point(4, 4, 3_000_000, 2_000_000, "gelu_tanh")
    carried = [replace(point(batch, 8, 3_000_000, 2_000_000, "gelu_tanh"), carried_from=whole.sizes) for batch in (1, 8)]
    slower = replace(point(16, 8, 3_000_000, 4_000_000), carried_from=whole.sizes, reason="the original ops take less")
    line = sentences.carried_line(with_points(carried[0], whole, carried[1], slower))
    assert line.startswith("Rewrites were carried over with --quick: to points 1, 3 from point 2. There each kernel")
    assert sentences.carried_line(with_points(whole, slower)) == ""


def test_the_summary_counts_what_is_served() -> None:
    assert sentences.summary(shapes()) == (
        "serves batch 1..16, seq 1..4096: 1.004 to 1.42 times as fast as eager at 4 of 6 points, launch by launch; "
        "the original ops run in 1 of 4 pieces"
    )
    one = point(4, 4, 3_000_000, 2_000_000, "gelu_tanh")
    at_one = "serves batch 1..16, seq 1..4096: 1.50 times as fast as eager at 1 point"
    assert sentences.summary(with_points(one)) == f"{at_one}, launch by launch"
    assert sentences.summary(with_points(replace(one, in_segments=True))) == at_one
    assert sentences.summary(with_points(replace(one, in_graph=True))) == at_one
    mixed = sentences.summary(with_points(one, replace(one, in_graph=True)))
    assert mixed.endswith("1.50 times as fast as eager at 2 points, 1 of them launch by launch")
    assert one.ours is not None
    assert sentences.summary(with_points(replace(one, ours=replace(one.ours, method="cpu_time")))) == at_one
    untimed = replace(one, eager=None, ours=None)
    assert sentences.summary(with_points(untimed)).endswith("seq 1..4096: checked at 1 point, not timed")
    none = sentences.summary(with_points(replace(one, reason="slower")))
    assert none == "serves no other size: in batch 1..16, seq 1..4096 the original ops run"


def test_sizes_with_rewrites_are_counted() -> None:
    assert sentences.share_line(shapes()) == "65,535 of 65,536 sizes lie in 3 pieces with rewrites, one graph each."
    whole = with_points(point(4, 4, 3, 2, "gelu_tanh"))
    assert sentences.share_line(whole) == "All 65,536 sizes lie in 1 piece with rewrites, one graph each."
    assert sentences.share_line(with_points(replace(point(4, 4, 3, 2), reason="x"))) == ""


def test_every_place_of_the_original_ops_has_its_reason() -> None:
    near_large, near_long, piece = sentences.left_to_original_ops(shapes())
    assert near_large.startswith("Near batch 16, seq 1024, in batch 2..16, seq 2..4096: the original ops run.")
    assert "relative error 4.10e-02" in near_long
    assert piece == "batch 1, seq 1 (1 size): the original ops run. Dynamo takes seq for a constant: it is compared with 1."
    all_slower = with_points(*(replace(point(size, 2, 2, 1), reason="it is slower") for size in (1, 16)))
    assert sentences.left_to_original_ops(all_slower) == (
        "batch 1..16, seq 1..4096 (65,536 sizes): the original ops run. It is slower.",
    )


def test_dims_cost_and_clock() -> None:
    assert sentences.dims_line(shapes()).endswith("attention_mask (batch, seq); table (fixed, seq).")
    assert sentences.cost_line(shapes()) == "Tracing, deciding and building took 1 min 37 s."
    assert sentences.clock_line(shapes()) == "Medians of interleaved calls (GPU time); 95% intervals in brackets."
    empty = replace(shapes(), dims=(), seconds=0.0, pieces=())
    assert sentences.dims_line(empty) == sentences.cost_line(empty) == sentences.clock_line(empty) == ""
    made = point(4, 4, 3, 2)
    assert made.ours is not None
    replays = sentences.clock_line(with_points(made, replace(made, in_graph=True), replace(made, in_graph=True)))
    assert replays.endswith(
        "in brackets. Ours at points 2, 3: replays of one CUDA graph. A size's first call is launched kernel by kernel."
    )
    on_cpu = sentences.clock_line(with_points(replace(made, ours=replace(made.ours, method="cpu_time"))))
    assert "CPU time" in on_cpu and "CUDA" not in on_cpu


def crossed(*points: tuple[int, float]) -> list[tuple[int, bool]]:
    made = with_points(*(point(1, size, round(1e9 * ratio), 1_000_000_000) for size, ratio in points))
    return [(round(one.elements), one.is_faster_above) for one in sentences.crossovers(point_rows(made))]


def test_the_crossover_lies_between_points_that_are_clearly_on_either_side() -> None:
    assert crossed((10, 2.0), (1000, 0.5)) == [(100, False)]
    assert crossed((1000, 0.5), (10, 2.0)) == [(100, False)]  # the order of the points does not matter
    assert crossed((10, 0.5), (1000, 2.0)) == [(100, True)]
    assert crossed((10, 2.0), (100, 1.0), (1000, 0.5)) == [(100, False)]  # a point within noise is on no side
    assert crossed((10, 2.0), (100, 0.5), (1000, 2.0)) == [(32, False), (316, True)]
    assert crossed((10, 2.0), (100, 1.5)) == crossed((10, 1.0), (100, 0.5)) == crossed((10, 2.0)) == crossed() == []
    assert crossed((10, 2.0), (10, 0.5), (1000, 1.5)) == []  # points of one product disagree


@pytest.mark.parametrize(("value", "text"), [(0.2, "1"), (7.4, "7"), (32.1, "32"), (316.2, "320"), (6213, "6,200")])
def test_a_place_between_points_has_two_digits(value: float, text: str) -> None:
    assert sentences.rounded(value) == text


def test_the_crossover_in_words() -> None:
    assert sentences.crossover_line(shapes()).startswith("By batch × seq, the rewrites are slower than eager from about 6,")
    assert sentences.crossover_line(replace(shapes(), pieces=())) == ""


def test_sentences_end_once() -> None:
    for made in (shapes(), with_points(replace(point(1, 1, 2, 1), reason="it ends in a stop."))):
        lines = itertools.chain(
            sentences.left_to_original_ops(made), (sentences.share_line(made), sentences.crossover_line(made))
        )
        assert all(line == "" or (line.endswith(".") and not line.endswith("..")) for line in lines)
