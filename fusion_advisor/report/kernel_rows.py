"""Rows on kernels: every kernel by name, and of a fused one its bytes, bits, special values and distances."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from fusion_advisor import units
from fusion_advisor.records import ULP_ENDS, Fusion, Report
from fusion_advisor.report.escape import plural, visible


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that one site moves, before and after, and the rates."""

    bytes_before: str
    bytes_after: str
    speed_after: str
    share_of_copy: str


def traffic(report: Report, fusion: Fusion) -> Traffic | None:
    """Bytes of one site; None where nothing tells. The ops' own traffic before, each outside value once after."""
    chain = next((chain for chain in report.chains if chain.id == fusion.chain_id and chain.sites), None)
    if chain is None and fusion.kernel_bytes is None:
        return None
    before = "not known" if chain is None else units.size(chain.moved_bytes / chain.runs)
    floor = float(fusion.kernel_bytes or 0) if chain is None else chain.floor_bytes / chain.runs
    if fusion.chain_after is None:
        return Traffic(before, units.size(floor), "not timed", "")
    speed = floor * 1e9 / max(fusion.chain_after.median_ns, 1)
    of_copy = f"{units.share(speed / max(report.bandwidth.copy_bytes_per_s, 1))} of the copy measured here"
    return Traffic(before, units.size(floor), units.bandwidth(speed), of_copy)


def bits_line(report: Report, fusion: Fusion) -> str:
    """Say whether an exact kernel's results have eager's bits; empty without --exact."""
    checked = fusion.numerics
    if not report.is_exact or checked is None:
        return ""
    if checked.is_bit_equal:
        return f"bit-equal to eager on {plural(checked.elements, 'element')}"
    differing = checked.elements - checked.bit_equal_elements
    return f"not bit-equal: {units.number(differing)} of {plural(checked.elements, 'element')} differ: {checked.differs_by}"


def special_line(fusion: Fusion) -> str:
    """Say what a check on special values found: faults, and differences that were declared; empty where nothing differs."""
    checked = fusion.numerics
    if checked is None:
        return ""
    parts = [f"faults: {'; '.join(checked.faults)}"] if checked.faults else []
    parts += [f"declared exceptions: {'; '.join(checked.declared)}"] if checked.declared else []
    return "; ".join(parts)


def ulp_rows(fusion: Fusion) -> tuple[tuple[str, tuple[str, str], tuple[str, str]], ...]:
    """Distances in units in the last place: (bin, fused, original), each as share and count; empty where none were counted."""
    checked = fusion.numerics
    if checked is None or not checked.fused_ulps or not checked.eager_ulps:
        return ()
    starts = (0, *(end + 1 for end in ULP_ENDS))
    names = [str(end) if start == end else f"{start} to {end}" for start, end in zip(starts, ULP_ENDS, strict=False)]
    names.append(f"over {ULP_ENDS[-1]}")

    def cells(counts: tuple[int, ...]) -> list[tuple[str, str]]:
        return [(units.share(count / max(sum(counts), 1)), units.number(count)) for count in counts]

    return tuple(zip(names, cells(checked.fused_ulps), cells(checked.eager_ulps), strict=True))


def reproduce_one(report: Report, fusion: Fusion) -> str:
    """The run's command for one fusion alone; empty where the run was started from Python."""
    return f"{report.command} --only {shlex.quote(visible(fusion.kernel, 80))}" if report.command else ""


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One kernel name with its counts and time on both sides."""

    name: str
    category: str
    before_count: int
    before_ns: int
    after_count: int
    after_ns: int


def kernel_rows(report: Report, limit: int) -> tuple[tuple[KernelRow, ...], int, int]:
    """Kernels by name and category on both sides, largest first; how many are left out and their time."""
    rows: dict[tuple[str, str], KernelRow] = {}
    for name, category, count, ns in report.before.kernels:
        rows[name, category] = KernelRow(name, category, count, ns, 0, 0)
    for name, category, count, ns in report.after.kernels if report.after else ():
        old = rows.get((name, category), KernelRow(name, category, 0, 0, 0, 0))
        rows[name, category] = KernelRow(name, category, old.before_count, old.before_ns, count, ns)
    ranked = sorted(rows.values(), key=lambda row: (-max(row.before_ns, row.after_ns), row.name))
    rest = ranked[limit:]
    return tuple(ranked[:limit]), len(rest), sum(max(row.before_ns, row.after_ns) for row in rest)
