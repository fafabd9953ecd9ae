"""What a package's README says: what the kernels save, where that was measured, and for which calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fusion_advisor.export.kernel_ops import KernelOp
from fusion_advisor.records import Report, Status, TensorMeta
from fusion_advisor.units import delta, duration


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadmeRow:
    """One kept rewrite of the package."""

    id: str
    title: str
    sites: str
    saved: str
    source: str


def rows(report: Report, ops: Sequence[KernelOp]) -> list[ReadmeRow]:
    """Return a row for each kernel and each graph rewrite that the package holds.

    Args:
        report: of the run.
        ops: of the package.
    """
    by_fusion: dict[str, list[KernelOp]] = {}
    for op in ops:
        by_fusion.setdefault(op.fusion_id, []).append(op)
    sources = {answer.chain_id: answer.source for answer in report.answers if hasattr(answer, "source")}
    found = [
        ReadmeRow(
            id=row.id, title=row.kernel, sites=f"{row.receipt.sites_replaced}", saved=_saved(row.step_delta_ns),
            source=sources.get(row.chain_id, "") or ", ".join(op.origin for op in by_fusion.get(row.id, ())[:1]),
        )
        for row in report.fusions
        if row.status is Status.KEPT
    ]  # fmt: skip
    order = {op.fusion_id: place for place, op in reversed(list(enumerate(ops)))}
    found.sort(key=lambda row: order.get(row.id, len(ops)))
    found += [
        ReadmeRow(id=row.id, title=row.name, sites=str(row.sites), saved=_saved(row.step_delta_ns), source="")
        for row in report.rewrites
        if row.status is Status.KEPT and row.id not in ("cuda-graph",)
    ]
    return found


def _saved(delta_ns: int | None) -> str:
    return "not timed" if delta_ns is None else delta(-delta_ns).lstrip("+")


def step_sentence(report: Report) -> str:
    """Say how long the step took before and after.

    Args:
        report: of the run.
    """
    before, after = report.step_before, report.step_after
    if before is None or after is None:
        return "The step was not timed."
    ratio = before.median_ns / after.median_ns
    times = f"{duration(before.median_ns)} eager, {duration(after.median_ns)} with all that the run kept"
    return f"One step: {times}: {ratio:.2f} times as fast."


def call_lines(tensors: Iterable[tuple[str, TensorMeta]], values: dict[str, object]) -> list[str]:
    """Return one line for each argument of the verified call.

    Args:
        tensors: by argument.
        values: of the other arguments.
    """
    lines = [f"`{name}`: {' × '.join(map(str, meta.shape))} {meta.dtype}" for name, meta in tensors]
    return lines + [f"`{name}={value!r}`" for name, value in values.items()]
