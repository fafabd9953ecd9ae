"""From the headline's step before to its step after, row by row: what each rewrite took off, and what no rewrite accounts for.

The rows add up exactly. Rewrites were timed on replays of the captured step, the headline on calls as a user makes them: rows of
their own say by how much the two differ, so that no part of the headline is left without a name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fusion_advisor import units
from fusion_advisor.records import Fusion, GraphRewrite, Report, RewriteStage, Status, Timing
from fusion_advisor.report import shared_rows
from fusion_advisor.report.escape import plural, visible
from fusion_advisor.timing.host_timer import CPU_TIME

DEVICE_TIME = "device time"
"""The clock of a step that only the device timed; every other clock also sees launches and the host."""
Kind = Literal["whole", "rewrite", "other", "removed"]

_COUNTED = (Status.KEPT, Status.ABSORBED)
"""Both were in the step when the next row was timed: a larger kernel took an absorbed fusion in only later."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the waterfall."""

    kind: Kind
    """``whole``: one of the two ends; ``rewrite``: measured and in the step; ``removed``: counts for nothing."""
    name: str
    delta_ns: int
    level_ns: int
    """The step once this row is counted."""
    ci_ns: tuple[int, int] | None = None
    """Of ``delta_ns``, or of the whole step at the two ends; None where no interval was recorded."""
    note: str = ""
    """Where the figure comes from, or why a rewrite was removed."""
    anchor: str = ""
    """The fusion's id, which its card carries."""


def rows(report: Report) -> tuple[Row, ...]:
    """Return the rows from the headline's step before to its step after; empty where nothing was kept or timed."""
    pair = shared_rows.step_pair(report)
    if pair is None or shared_rows.is_unchanged(report):
        return ()
    clock, before, after = pair
    found = [Row("whole", f"eager ({clock})", 0, before.median_ns, _interval(before))]

    def add(kind: Kind, name: str, delta_ns: int, ci_ns: tuple[int, int] | None = None, note: str = "", anchor: str = "") -> None:
        level = found[-1].level_ns + (0 if kind == "removed" else delta_ns)
        found.append(Row(kind, name, delta_ns, level, ci_ns, note, anchor))

    if extra_ns := _captured_extra_ns(report):
        add("other", "kernels of the captured graph", extra_ns, note="kernel time of two traced steps, captured less eager")
    counted_ns = 0
    for row in _timed(report):
        delta_ns, is_counted = row.step_delta_ns or 0, row.status in _COUNTED
        counted_ns += delta_ns if is_counted else 0
        note = "" if row.status is Status.KEPT else shared_rows.VERDICTS[row.status].words
        anchor = row.id if isinstance(row, Fusion) else ""
        add("rewrite" if is_counted else "removed", _title(row), delta_ns, row.step_delta_ci_ns, note, anchor)
    if report.step_before is not None and report.step_after is not None:
        again_ns = report.step_after.median_ns - report.step_before.median_ns - counted_ns
        if again_ns:
            # On a CPU the rounds that judged each rewrite often hold all kept ones too: then nothing is measured twice.
            name = "all together in the step" if report.step_before.method == CPU_TIME else "all together, measured again"
            add("other", name, again_ns, note="the final measurement of all rewrites, less their sum")
    if untimed_ns := _untimed_ns(report, clock, counted_ns):
        add(
            "other", "rewrites that were not timed in the step", untimed_ns, note="kernel time of two traced steps, less what was"
        )
    for call in report.rewrites if clock != DEVICE_TIME else ():
        if call.stage is RewriteStage.CALL and call.status is Status.KEPT and call.step_delta_ns is not None:
            add("rewrite", visible(call.name, 120), call.step_delta_ns, call.step_delta_ci_ns, "timed on the whole call")
    if throttled_ns := _back_to_back_ns(report, clock, before, after):
        add(
            "other",
            "back-to-back steps instead of rested",
            throttled_ns,
            note="the headline's change, less the change after rests",
        )
    if rest_ns := after.median_ns - found[-1].level_ns:
        add("other", *_rest(report, clock, rest_ns))
    found.append(Row("whole", f"ours ({clock})", 0, after.median_ns, _interval(after)))
    return tuple(found)


def sum_line(report: Report) -> str:
    """Return the waterfall in one sentence: the rewrites as one figure, every other row by its name; empty without one."""
    found = rows(report)
    if not found:
        return ""
    kept = [row for row in found if row.kind == "rewrite"]
    parts = [f"{plural(len(kept), 'measured rewrite')} {units.delta(sum(row.delta_ns for row in kept))}"] if kept else []
    parts += [f"{row.name} {units.delta(row.delta_ns)}" for row in found if row.kind == "other"]
    ends = f"{found[0].name} {units.duration(found[0].level_ns)} to {found[-1].name} {units.duration(found[-1].level_ns)}"
    return f"From {ends}: {', '.join(parts)}."


def _interval(timing: Timing) -> tuple[int, int] | None:
    return (timing.ci_low_ns, timing.ci_high_ns) if timing.ci_high_ns > timing.ci_low_ns else None


def _title(row: Fusion | GraphRewrite) -> str:
    return f"{row.id} {visible(row.kernel, 120)}" if isinstance(row, Fusion) else visible(row.name, 120)


def _timed(report: Report) -> list[Fusion | GraphRewrite]:
    """Rewrites and fusions of the captured step in the order in which they were timed."""
    passes = [row for row in report.rewrites if row.stage is RewriteStage.PASS]
    chains = [row for row in report.fusions if row.chain_id]
    on_top = [row for row in report.rewrites if row.stage is RewriteStage.ON_TOP]
    ordered: list[Fusion | GraphRewrite] = [*passes, *chains, *on_top, *(row for row in report.fusions if not row.chain_id)]
    return [row for row in ordered if row.step_delta_ns is not None]


def _captured_extra_ns(report: Report) -> int:
    """Kernel time that the captured graph has beyond the eager step, both traced; 0 on a CPU, where tracing slows every op."""
    if report.captured is None or report.step_before is None or report.environment.device_kind == "cpu":
        return 0
    return report.captured.device_ns - report.before.device_ns


def _untimed_ns(report: Report, clock: str, counted_ns: int) -> int:
    """Change of the traced kernel time beside what was timed; 0 where the step was timed as a whole, or each kept fusion in it.

    ``--quick`` chooses the kernels of a training step by their own times.
    """
    kept = [row for row in report.fusions if row.status is Status.KEPT]
    is_timed = report.step_before is not None or all(row.step_delta_ns is not None for row in kept)
    if is_timed or report.after is None or clock == DEVICE_TIME or report.environment.device_kind == "cpu":
        return 0
    return report.after.device_ns - report.before.device_ns - counted_ns


def _back_to_back_ns(report: Report, clock: str, before: Timing, after: Timing) -> int:
    """How the change differs between steps that run back to back and steps after rests; 0 where both were not timed."""
    rested = (report.before.rested, report.after.rested if report.after else None)
    if clock == DEVICE_TIME or rested[0] is None or rested[1] is None:
        return 0
    return (after.median_ns - before.median_ns) - (rested[1].median_ns - rested[0].median_ns)


def _rest(report: Report, clock: str, rest_ns: int) -> tuple[str, int, None, str]:
    """Name the remainder, and say what it may be."""
    if report.environment.device_kind == "cpu" or clock == DEVICE_TIME or report.after is None:
        return "not attributed", rest_ns, None, "the remainder: no measurement separates it further"
    sides = f"{units.number(report.before.launches)} → {units.number(report.after.launches)} launches"
    if rest_ns <= 0:
        return "launch and host time", rest_ns, None, f"the remainder; {sides}, and no Python between the ops"
    hidden = "rewrites saved kernel time that ran while the host launched, so the call gained less"
    return "launch and host time", rest_ns, None, f"the remainder; {sides}; {hidden}"
