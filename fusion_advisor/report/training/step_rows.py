"""A training step by its parts, its throughput, and what holds its memory at the peak: rows and sentences."""

from __future__ import annotations

from dataclasses import dataclass

from fusion_advisor import units
from fusion_advisor.records import HeldMemory, Report, StepMemory
from fusion_advisor.timing.host_timer import CPU_TIME

DATASHEET_FLOPS = {
    "NVIDIA H200": 989_400_000_000_000,
    "NVIDIA H100 80GB HBM3": 989_400_000_000_000,
    "NVIDIA H100 PCIe": 756_000_000_000_000,
    "NVIDIA A100-SXM4-80GB": 312_000_000_000_000,
    "NVIDIA A100-SXM4-40GB": 312_000_000_000_000,
}
"""Of dense matrix products in 16 bits, in a second, by the device's name, from its maker's datasheet."""
_HALVES = ("bf16", "fp16")
KINDS = {
    "activation": "activations and other results of the forward pass",
    "gradient": "gradients of parameters",
    "working": "working memory of the backward pass",
}


@dataclass(frozen=True, slots=True)
class PartRow:
    """One part of the step.

    Attributes:
        name: of the part.
        before: eager's time.
        after: ours; empty where nothing of ours runs.
        change: of the time; empty likewise.
    """

    name: str
    before: str
    after: str = ""
    change: str = ""


def part_rows(report: Report) -> tuple[PartRow, ...]:
    """Return forward, backward and optimizer by their times; empty where they were not timed."""
    parts = None if report.training is None else report.training.parts
    if parts is None:
        return ()
    pairs = (
        ("Forward pass and loss", parts.forward_before_ns, parts.forward_after_ns),
        ("Backward pass", parts.backward_before_ns, parts.backward_after_ns),
    )
    rows = [_part(*pair) for pair in pairs]
    for one in parts.optimizer:
        call = one.change.removeprefix("torch.optim.").replace("model.parameters()", "…")
        rows.append(PartRow(f"{call}, a step of it", units.duration(one.step_ns)))
    return tuple(rows)


def _part(name: str, before_ns: int, after_ns: int) -> PartRow:
    if not after_ns:
        return PartRow(name, units.duration(before_ns))
    return PartRow(
        name, units.duration(before_ns), units.duration(after_ns), units.relative_change(before_ns, after_ns) if before_ns else ""
    )


def part_lines(report: Report) -> tuple[str, ...]:
    """Say how the parts were timed, how much a step trains on in a second, and how much of the device that is."""
    parts = None if report.training is None else report.training.parts
    if parts is None:
        return ()
    clock = "CPU time" if parts.method == CPU_TIME else "wall time"
    lines = [
        f"Medians of {clock}; the backward pass is the step less its forward pass. The optimizer runs on copies of the trained "
        "parameters and is no part of the step."
    ]
    if parts.optimizer_note:
        lines.append(f"The optimizer was not timed: {parts.optimizer_note}.")
    return (*lines, *throughput_lines(report))


def throughput_lines(report: Report) -> tuple[str, ...]:
    """Return tokens or samples in a second and the rate of floating-point operations, before and after."""
    parts = None if report.training is None else report.training.parts
    sides = [
        (label, step.wall.median_ns)
        for label, step in (("eager", report.before), ("ours", report.after))
        if step is not None and step.wall is not None and step.label != "unchanged"
    ]
    if parts is None or not sides:
        return ()
    lines = []
    if parts.tokens:
        rates = ", ".join(f"{label} {units.number(round(parts.tokens * 1e9 / ns))}" for label, ns in sides)
        lines.append(f"{parts.token_word.capitalize()} per second, without an optimizer: {rates}.")
    if parts.flops:
        rates = ", ".join(f"{label} {_rate(report, parts.flops, ns)}" for label, ns in sides)
        lines.append(
            f"{_flops(parts.flops)} a step (matrix products, convolutions and attention, as the model's own ops compute them): "
            f"{rates}."
        )
    return tuple(lines)


def _flops(count: float) -> str:
    for unit, size in (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count / 1e6:.3g} MFLOP"


def _rate(report: Report, flops: int, step_ns: int) -> str:
    share = mfu(report, step_ns)
    return f"{_flops(flops * 1e9 / step_ns)}/s{f' (MFU {share})' if share else ''}"


def mfu(report: Report, step_ns: int) -> str:
    """Return which share of the device's datasheet rate a step of some time reaches; empty where that is not known.

    Args:
        report: of the step.
        step_ns: its time.
    """
    parts = None if report.training is None else report.training.parts
    peak = DATASHEET_FLOPS.get(report.environment.device_name) if report.workload.dtype in _HALVES else None
    return units.share(parts.flops * 1e9 / step_ns / peak) if parts is not None and parts.flops and peak else ""


def memory_lines(report: Report) -> tuple[str, ...]:
    """Say when each recorded step held most, and what of it; empty where none was recorded."""
    memory = () if report.training is None else report.training.memory
    lines = []
    for one in memory:
        where = "backward" if one.peak_share >= one.backward_share else "forward"
        by_kind = ", ".join(
            f"{units.size(held)} {name}" for kind, name in KINDS.items() if (held := _held(one, kind))
        )  # fmt: skip
        lines.append(f"{one.label.capitalize()} holds most, {units.size(one.peak_bytes)}, in the {where} pass: {by_kind}.")
    return tuple(lines)


def _held(memory: StepMemory, kind: str) -> int:
    return sum(row.held_bytes for row in memory.holders if row.kind == kind)


def holder_rows(memory: StepMemory) -> tuple[tuple[str, str, str, str, str], ...]:
    """Return what is held at the peak, largest first: (kind, op, module, tensors, bytes).

    Args:
        memory: of one step.
    """
    return tuple(
        (KINDS[row.kind], _op(memory, row), row.module, units.number(row.tensors), units.size(row.held_bytes))
        for row in memory.holders
    )


def recomputed_rows(report: Report) -> tuple[tuple[str, str, str, str, str], ...]:
    """Return what a memory budget has the backward pass compute again: (op, module, ops, memory saved, their time)."""
    rows = () if report.training is None else report.training.recomputed
    return tuple(
        (
            row.op, row.module, units.number(row.ops), f"{'−' if row.saved_bytes < 0 else ''}{units.size(abs(row.saved_bytes))}",
            units.duration(row.again_ns) if row.again_ns else "–",
        )
        for row in rows
    )  # fmt: skip


def recomputed_line(report: Report) -> str:
    """Sum up what is computed again; empty without a memory budget."""
    rows = () if report.training is None else report.training.recomputed
    if not rows:
        return ""
    saved, again_ns = sum(row.saved_bytes for row in rows), sum(row.again_ns for row in rows)
    paid = f", for {units.duration(again_ns)} of work that is done twice" if again_ns else ""
    return (
        f"The forward pass keeps {units.size(abs(saved))} {'less' if saved >= 0 else 'more'} for the backward pass{paid}. "
        "Times are from the traced forward pass, op by op."
    )


def _op(memory: StepMemory, row: HeldMemory) -> str:
    return row.op or ("a fused kernel" if memory.label != "eager" else "outside every op")
