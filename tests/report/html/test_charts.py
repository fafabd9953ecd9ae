from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fusion_advisor.records import Timing
from fusion_advisor.report.escape import shortened
from fusion_advisor.report.html import charts
from fusion_advisor.report.html.page import render_html
from fusion_advisor.report.html.roofline import points, roofline
from fusion_advisor.report.html.text_width import text_width
from fusion_advisor.report.html.waterfall import waterfall
from tests.report.fixtures import applied, profiled, real


def test_no_figure_of_the_waterfall_is_struck_out_by_a_whisker_or_leaves_the_chart() -> None:
    def wide(timing: Timing | None) -> Timing:
        assert timing is not None
        return replace(timing, ci_low_ns=timing.median_ns // 2, ci_high_ns=timing.median_ns * 2)

    report = applied()
    fusions = tuple(
        replace(row, step_delta_ci_ns=(-9_000_000, 30_000_000)) if row.step_delta_ns else row for row in report.fusions
    )
    assert report.after is not None
    before, after = (replace(step, wall=wide(step.wall)) for step in (report.before, report.after))
    noisy = replace(report, before=before, after=after, fusions=fusions)
    for shown in (report, noisy):
        fall = waterfall(shown)
        assert fall is not None
        for row in fall.rows:
            assert row.figure_x >= row.high + 4
            assert row.figure_x + text_width(row.figure, charts.LABEL_SIZE, is_bold=True) <= charts.WIDTH, row.figure


@pytest.mark.parametrize("kernel", ["gelu", "embedding_embedding_add_layer_norm_8d2f", "add_" * 90, "\u202e" * 60],
                         ids=["short", "long", "very long", "unseen"])  # fmt: skip
def test_every_name_of_the_waterfall_has_room_and_is_told_in_full(kernel: str) -> None:
    report = applied()
    longest = replace(report.fusions[0], id="F12", kernel=kernel)
    fall = waterfall(replace(report, fusions=(longest, *report.fusions[1:])))
    assert fall is not None
    assert all(text_width(row.name, charts.LABEL_SIZE) + 10 <= fall.left for row in fall.rows)
    assert fall.left < charts.WIDTH / 2
    row = next(row for row in fall.rows if row.title.startswith("F12 "))
    assert row.name.startswith(row.title[:15]) and row.name.endswith(row.title[-15:])
    assert row.title in {name for name, *_ in fall.table}


def test_the_page_tells_a_shortened_name_in_full() -> None:
    report = applied()
    longest = replace(report.fusions[0], kernel="embedding_embedding_add_layer_norm_8d2f")
    page = render_html(replace(report, fusions=(longest, *report.fusions[1:])))
    full = f"{longest.id} {longest.kernel}"
    assert f"<title>{full}</title>{shortened(full, 40)}</text>" in page
    assert f'<th scope="row">{full}</th>' in page


def test_every_bar_has_room_for_its_name() -> None:
    report = applied()
    chart = charts.where_time_went(report)
    assert chart is not None
    assert any("compile reduce-overhead" in bar.name for bar in chart.bars)
    assert all(text_width(bar.name, charts.LABEL_SIZE) + 10 <= chart.left for bar in chart.bars)


def test_no_waterfall_without_both_ends() -> None:
    assert waterfall(profiled()) is None
    assert waterfall(replace(applied(), after=None)) is None


def test_idle_is_what_no_kernel_filled() -> None:
    report = applied()
    assert report.before.wall is not None
    assert charts.idle_ns(report.before) == report.before.wall.median_ns - report.before.device_ns
    assert charts.idle_ns(replace(report.before, wall=None)) == 0
    chart = charts.where_time_went(report)
    assert chart is not None
    assert [segment.colour for segment in chart.bars[0].segments][-1] == charts.IDLE


def test_kernels_that_a_trace_drew_out_are_no_part_of_a_shorter_step() -> None:
    report = applied()
    drawn_out = replace(report, before=replace(report.before, device_ns=report.before.wall.median_ns + 1))
    figures = [chart.bars[0].figure for chart in map(charts.where_time_went, (report, drawn_out)) if chart]
    assert " of " in figures[0]
    assert " of " not in figures[1] and figures[1].endswith("(traced)")


def test_the_roofline_stands_on_the_measured_copy() -> None:
    report = real()
    roof = roofline(report)
    assert roof is not None
    for point, fusion in zip(roof.points, report.fusions, strict=True):
        chain = next(chain for chain in report.chains if chain.id == fusion.chain_id)
        assert fusion.chain_after is not None
        moved = chain.floor_bytes / len(chain.sites)
        speed = moved / fusion.chain_after.median_ns * 1e9
        assert point.share_after == pytest.approx(speed / report.bandwidth.copy_bytes_per_s, rel=1e-6)
        assert point.flops == len(chain.ops) * math.prod(chain.shape)
        assert not point.is_above
    # below the ceiling on paper means below its line on the drawing
    line = roof.ceilings[0]
    slope = (line.y2 - line.y1) / (line.x2 - line.x1)
    for arrow in roof.arrows:
        assert arrow.y2 > line.y1 + slope * (arrow.x2 - line.x1)
        assert arrow.x2 > arrow.x1
        assert arrow.y2 < arrow.y1
    assert [ceiling.is_measured for ceiling in roof.ceilings] == [True, False]


def test_the_ceiling_is_the_fastest_mix() -> None:
    report = real()
    faster = replace(report, bandwidth=replace(report.bandwidth, read_bytes_per_s=4_500_000_000_000))
    for before, after in zip(points(report), points(faster), strict=True):
        assert after.share_after < before.share_after
    roof = roofline(faster)
    assert roof is not None
    assert roof.ceilings[0].label == "memory, measured in this run (read): 4,500 GB/s"


def test_what_beats_the_ceiling_is_marked_and_what_was_not_timed_is_named() -> None:
    report = applied()
    slow = replace(report, bandwidth=replace(report.bandwidth, copy_bytes_per_s=1_000_000))
    assert all(point.is_above for point in points(slow))
    roof = roofline(slow)
    assert roof is not None
    assert all(arrow.label.endswith("▲") for arrow in roof.arrows)
    assert roof.left_out == ("F4",)
    assert roofline(profiled()) is None
