from __future__ import annotations

import base64
import itertools
import re
import zlib
from dataclasses import replace

import numpy as np
import pytest

from fusion_advisor.records import Report, StepProfile, Timeline
from fusion_advisor.records.serialize import read_report
from fusion_advisor.report import shared_rows
from fusion_advisor.report.html import timeline as strip
from fusion_advisor.report.html.module_lanes import spans
from fusion_advisor.report.html.timeline import COLUMNS, HEIGHT, strips, unprofiled
from tests.report.fixtures import EXAMPLES, applied, timing


def with_timeline(timeline: Timeline, kernels: tuple[tuple[str, str, int, int], ...]) -> Report:
    step = StepProfile(
        label="eager", device_ns=sum(timeline.duration_ns), launches=2, categories=(), kernels=kernels, timeline=timeline
    )
    return replace(applied(), before=step, captured=None, after=None)


TWO = (("matmul", "gemm", 1, 300), ("mul", "pointwise", 1, 100))


def unpacked(planes: object) -> tuple[list[int], list[int], list[int]]:
    raw = zlib.decompress(base64.b64decode(str(planes)), wbits=-15)
    count = len(raw) // 10
    since = np.frombuffer(raw, "<u4", count)
    return (
        np.cumsum(since).tolist(),
        np.frombuffer(raw, "<u4", count, 4 * count).tolist(),
        np.frombuffer(raw, "<u2", count, 8 * count).tolist(),
    )


def covered(path: str) -> int:
    """Columns × pixels of a path of boxes."""
    return sum(int(wide) * int(tall) for wide, tall in re.findall(r"h(\d+)v(\d+)h-", path))


def test_the_canvas_gets_every_kernel() -> None:
    report = applied()
    drawn = strips(report)
    assert drawn is not None
    for step, side in zip((report.before, report.after), drawn.sides, strict=True):
        assert step is not None
        assert step.timeline is not None
        start, duration, names = unpacked(side.data["planes"])
        assert tuple(start) == unprofiled(step, step.timeline).start_ns
        assert tuple(duration) == step.timeline.duration_ns
        assert tuple(names) == step.timeline.kernel


def test_the_drawing_has_each_categorys_share() -> None:
    # 300 ns of GEMM, 300 ns of nothing, 100 ns of pointwise, 100 ns at the end of nothing (the other side is longer)
    timeline = Timeline(kernel=(0, 1), start_ns=(0, 600), duration_ns=(300, 100))
    drawn = strips(with_timeline(timeline, TWO))
    assert drawn is not None
    (side,) = drawn.sides
    assert drawn.span_ns == 700
    share = {colour: covered(path) / (COLUMNS * HEIGHT) for colour, path in side.paths}
    assert list(share.values()) == pytest.approx([3 / 7, 1 / 7], abs=0.01)
    assert side.width == COLUMNS


def test_kernels_on_two_streams_never_fill_a_column_twice() -> None:
    timeline = Timeline(kernel=(0, 1), start_ns=(0, 0), duration_ns=(1000, 1000))
    drawn = strips(with_timeline(timeline, TWO))
    assert drawn is not None
    assert [covered(path) for _, path in drawn.sides[0].paths] == [COLUMNS * HEIGHT // 2] * 2


def test_too_many_kernels_become_columns_with_the_same_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strip, "MAX_KERNELS", 100)
    report = applied()
    assert report.before.timeline is not None
    drawn = strips(report)
    assert drawn is not None
    assert "eager, fused: more than 100 kernels" in drawn.note
    start, duration, names = unpacked(drawn.sides[0].data["planes"])
    assert sum(duration) == sum(report.before.timeline.duration_ns)
    assert start == sorted(start)
    kernels = drawn.sides[0].data["kernels"]
    assert isinstance(kernels, list)
    gemm = sum(ns for ns, name in zip(duration, names, strict=True) if kernels[name][1] == "gemm")
    assert gemm == next(ns for name, _, ns in report.before.categories if name == "gemm") // 97 * 97


def test_no_timeline_no_strip() -> None:
    report = applied()
    assert report.after is not None
    bare = replace(report, before=replace(report.before, timeline=None), after=replace(report.after, timeline=None))
    assert strips(bare) is None
    assert strips(with_timeline(Timeline(kernel=(), start_ns=(), duration_ns=()), TWO)) is None


def test_a_strip_is_as_long_as_the_step_without_a_profiler() -> None:
    traced = Timeline(kernel=(0, 1), start_ns=(0, 700), duration_ns=(300, 100))
    wall = timing(600, spread=0.0, method="wall")
    step = replace(applied().before, wall=wall)
    shown = unprofiled(step, traced)
    assert shown.duration_ns == traced.duration_ns and shown.start_ns == (0, 500)  # the gap of 400 ns is 200 ns
    squeezed = unprofiled(replace(step, wall=timing(200, spread=0.0, method="wall")), traced)
    assert max(start + long for start, long in zip(squeezed.start_ns, squeezed.duration_ns, strict=True)) == 200
    assert unprofiled(replace(step, wall=None), traced) is traced


@pytest.mark.parametrize("name", [path.parent.name for path in EXAMPLES])
def test_the_shorter_step_has_the_shorter_strip(name: str) -> None:
    report = read_report(next(path for path in EXAMPLES if path.parent.name == name))
    drawn = strips(report)
    assert drawn is not None
    walls = {step.label: step.wall.median_ns for step in shared_rows.steps(report) if step.wall is not None}
    sides = [(side.width, walls[side.label]) for side in drawn.sides]
    assert len(sides) == 3
    assert [width for width, _ in sorted(sides)] == [width for width, _ in sorted(sides, key=lambda row: row[1])]


def test_modules_lie_under_our_strip_by_level() -> None:
    report = read_report(next(path for path in EXAMPLES if "qwen2.5-7b-bf16-1x512" in str(path)))
    assert report.after is not None and report.after.timeline is not None
    found = spans(report, report.after.timeline)
    layers = [span for span in found if span.level == 1 and span.name.startswith("layers.")]
    assert [span.path for span in layers] == [f"model.layers.{number}" for number in range(28)]
    attention = [span for span in found if span.path.endswith("self_attn")]
    assert [span.path for span in attention] == [f"model.layers.{number}.self_attn" for number in range(28)]
    for outer, inner in zip(layers, attention, strict=True):
        assert outer.start_ns <= inner.start_ns < inner.end_ns <= outer.end_ns
    for level in range(4):
        row = sorted((span.start_ns, span.end_ns) for span in found if span.level == level)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(row))
    drawn = strips(report)
    assert drawn is not None and [bool(side.spans) for side in drawn.sides] == [False, True, False]


def test_launches_that_no_site_explains_have_no_module() -> None:
    report = read_report(next(path for path in EXAMPLES if "qwen2.5-7b-bf16-1x512" in str(path)))
    assert report.after is not None and report.after.timeline is not None
    fewer = replace(report.after.timeline, kernel=tuple(0 for _ in report.after.timeline.kernel))
    assert spans(report, fewer) == ()
