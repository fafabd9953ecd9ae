"""The chart of speed-ups by size: dots on their scales, numbers apart from each other, the line at 1, the crossover."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from fusion_advisor.records import ShapePiece, ShapeRanges
from fusion_advisor.report.html import charts
from fusion_advisor.report.html.page import render_html
from fusion_advisor.report.html.speed_chart import SpeedChart, speed_charts
from fusion_advisor.report.html.text_width import text_width
from tests.report.fixtures import generated_shapes, hostile_shapes, point, ranges, shapes, sized


def many(count: int, seed: int) -> ShapeRanges:
    """Points anywhere, some in one place, with narrow and with wide intervals."""
    draw = random.Random(seed)
    points = [
        point(draw.choice((1, 2, 16)), draw.choice((1, 2, 7, 512)), draw.randint(700_000, 1_800_000), 1_000_000, "k",
              spread=draw.choice((0.01, 0.8)))
        for _ in range(count)
    ]  # fmt: skip
    return replace(shapes(), pieces=(ShapePiece(ranges=ranges((1, 16), (1, 512)), points=tuple(points)),))


def drawn(made: ShapeRanges) -> SpeedChart:
    (chart,) = speed_charts(made)
    return chart


@pytest.mark.parametrize(
    "made", [shapes(), hostile_shapes(), many(1, 1), many(12, 2), many(36, 3)], ids=["usual", "hostile", "1", "12", "36"]
)
def test_everything_lies_within_the_chart(made: ShapeRanges) -> None:
    chart = drawn(made)
    assert chart.top <= chart.even <= chart.base
    boxes = []
    for dot in chart.dots:
        assert chart.left <= dot.x <= chart.right and chart.top <= dot.high_y <= dot.y <= dot.low_y <= chart.base
        wide = text_width(dot.label, charts.LABEL_SIZE, is_bold=True)
        boxes.append((dot.label_x, dot.label_y - 11, dot.label_x + wide, dot.label_y + 3))
    assert all(chart.left < box[0] and box[2] < charts.WIDTH and box[3] <= chart.base + 1 for box in boxes)
    if len(boxes) < 20:
        for a, b in itertools.combinations(boxes, 2):
            assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
    assert text_width(chart.axis, charts.TICK_SIZE) <= charts.WIDTH
    places = [x for x, _ in chart.x_ticks]
    assert places == sorted(places) and all(chart.left <= x <= chart.right for x in places)


def test_faster_is_above_the_line_and_larger_is_further_right() -> None:
    chart = drawn(shapes())
    by_number = {dot.label: dot for dot in chart.dots}
    assert list(by_number) == ["1", "2", "3", "4", "5"]  # the sixth was not timed
    assert by_number["1"].y < by_number["2"].y < chart.even < by_number["3"].y
    assert by_number["4"].x < by_number["1"].x < by_number["2"].x < by_number["3"].x
    assert [dot.is_served for dot in chart.dots] == [True, True, False, True, True]
    assert by_number["1"].colour == charts.COLOURS["fused"] and by_number["5"].colour == charts.COLOURS["other"]
    (crossing,) = chart.crossings
    assert by_number["2"].x < crossing.x < by_number["3"].x and crossing.label.startswith("even at about 6,")


def test_no_chart_where_nothing_was_timed() -> None:
    untimed = tuple(replace(piece, points=tuple(replace(one, eager=None) for one in piece.points)) for piece in shapes().pieces)
    assert speed_charts(replace(shapes(), pieces=untimed)) == ()
    page = render_html(replace(sized(), shapes=replace(shapes(), pieces=untimed)))
    assert 'id="c-sizes-t"' not in page and "checked at 4 of 6 points, not timed" in page


def test_each_step_of_generate_has_a_chart_over_its_own_sizes() -> None:
    prefill, decode = speed_charts(generated_shapes())
    assert (prefill.call, prefill.axis) == ("prefill", "batch × seq")
    assert (decode.call, decode.axis) == ("decode", "batch × cached")
    assert [dot.label for dot in prefill.dots] == ["1", "2"] and [dot.label for dot in decode.dots] == ["3", "4"]
    page = render_html(replace(sized(), shapes=generated_shapes()))
    assert 'id="c-sizes-t"' in page and 'id="c-sizes2-t"' in page
    assert "decode: batch 8, cached 512" in page
    assert "In decode, by batch × cached, the rewrites are slower than eager from about" in page


def test_the_page_says_what_a_run_without_ranges_serves() -> None:
    page = render_html(replace(sized(), shapes=None))
    assert 'id="sizes"' in page and "any other size runs the original ops" in page
