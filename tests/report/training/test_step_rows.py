"""A training step by its parts, its throughput and its memory, as the page shows them."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from fusion_advisor.errors import UnreadableReport
from fusion_advisor.records import HeldMemory, OptimizerTime, Recomputed, StepMemory, StepParts, Timing
from fusion_advisor.records.serialize import dump_report, load_report
from fusion_advisor.report.html.page import render_html
from fusion_advisor.report.training import step_rows
from fusion_advisor.report.training.memory_chart import memory_chart
from tests.report.fixtures import HOSTILE, trained

TEN_MS = Timing(times_ns=(10**7,) * 6, median_ns=10**7, ci_low_ns=10**7, ci_high_ns=10**7, method="wall")
COLOURS = {"activation": "#111111", "gradient": "#222222", "working": "#333333"}


def memory(label, peak_bytes):
    return StepMemory(
        label=label, at_share=(0.1, 0.5, 0.6, 1.0), activation_bytes=(10, peak_bytes - 20, 40, 0), gradient_bytes=(0, 0, 30, 50),
        working_bytes=(0, 20, 10, 0), backward_share=0.4, peak_share=0.5, peak_bytes=peak_bytes,
        holders=(
            HeldMemory(kind="activation", op="mm", module=HOSTILE, tensors=2, held_bytes=peak_bytes - 20),
            HeldMemory(kind="working", op="", module="", tensors=1, held_bytes=20),
        ),
    )  # fmt: skip


@pytest.fixture
def report():
    base = trained()
    parts = StepParts(
        forward_before_ns=4_000_000, backward_before_ns=8_000_000, forward_after_ns=3_000_000, backward_after_ns=8_000_000,
        optimizer=(OptimizerTime(change="torch.optim.AdamW(model.parameters(), fused=True)", step_ns=500_000),),
        tokens=4096, token_word="tokens", flops=989_400_000_000,
    )  # fmt: skip
    training = replace(base.training, parts=parts, memory=(memory("eager", 1000), memory("fused", 800)))
    return replace(
        base, training=training, environment=replace(base.environment, device_name="NVIDIA H200"),
        workload=replace(base.workload, dtype="bf16"), before=replace(base.before, wall=TEN_MS),
    )  # fmt: skip


def test_parts_are_rows_and_the_rate_is_a_share_of_the_datasheets(report):
    rows = step_rows.part_rows(report)
    assert [(row.name, row.change) for row in rows] == [
        ("Forward pass and loss", "−25.0%"), ("Backward pass", "±0.0%"), ("AdamW(…, fused=True), a step of it", ""),
    ]  # fmt: skip
    rate, work = step_rows.throughput_lines(report)
    assert rate.startswith("Tokens per second, without an optimizer: eager 409,600, ours ")
    assert work.startswith("989 GFLOP a step") and "eager 98.9 TFLOP/s (MFU 10.0%)" in work
    assert "MFU" not in "".join(step_rows.throughput_lines(replace(report, workload=replace(report.workload, dtype="fp32"))))


def test_the_peak_is_told_by_what_holds_it(report):
    assert step_rows.memory_lines(report)[0] == (
        "Eager holds most, 1.00 kB, in the backward pass: 980 B activations and other results of the forward pass, 20 B "
        "working memory of the backward pass."
    )
    fused = step_rows.holder_rows(report.training.memory[1])
    assert fused[1][1] == "a fused kernel" and step_rows.holder_rows(report.training.memory[0])[1][1] == "outside every op"


def test_what_is_computed_again_has_its_bytes_and_time(report):
    rows = (
        Recomputed(op="gelu", module="h.*.mlp", ops=12, saved_bytes=3000, again_ns=2_000_000),
        Recomputed(op="addmm", module="", ops=1, saved_bytes=-1000, again_ns=0),
    )
    with_rows = replace(report, training=replace(report.training, recomputed=rows))
    assert step_rows.recomputed_rows(with_rows) == (
        ("gelu", "h.*.mlp", "12", "3.00 kB", "2.00 ms"), ("addmm", "", "1", "−1.00 kB", "–"),
    )  # fmt: skip
    assert step_rows.recomputed_line(with_rows).startswith(
        "The forward pass keeps 2.00 kB less for the backward pass, for 2.00 ms of work that is done twice."
    )
    assert step_rows.recomputed_rows(report) == () and step_rows.recomputed_line(report) == ""
    assert with_rows.training.eager_alone().recomputed == ()


def test_panels_share_a_scale_and_areas_lie_on_each_other(report):
    chart = memory_chart(report.training.memory, width=960, colours=COLOURS)
    eager, fused = chart.panels
    assert eager.peak_y == eager.top and fused.peak_y == fused.top + 30  # 800 of 1,000 in a panel of 150
    first, second, third = eager.areas
    count = len(first.points) // 2
    assert second.points[count:] == tuple(reversed(first.points[:count]))
    assert min(y for _, y in third.points) == eager.top
    assert memory_chart((), width=960, colours=COLOURS) is None


def test_the_page_draws_every_point_and_hides_nothing(report):
    assert load_report(dump_report(report)) == report
    page = render_html(report)
    section = page[page.index('<section id="step"') : page.index('<section id="modules"')]
    polygons = re.findall(r'<polygon points="([^"]*)" fill="#', section)
    assert [len(points.split()) for points in polygons] == [8] * 6
    assert "Parts of the training step" in page and HOSTILE not in page
    assert "Parts of the training step" not in render_html(trained())


def test_a_record_whose_lists_differ_in_length_is_not_read(report):
    first = replace(report.training.memory[0], working_bytes=(0,))
    text = dump_report(replace(report, training=replace(report.training, memory=(first,))))
    with pytest.raises(UnreadableReport, match="memory of the eager step"):
        load_report(text)
