"""Baselines of the step, and predictions against measurements: rows and sentences that all views share."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from fusion_advisor import units
from fusion_advisor.records import (
    COMPILED,
    EAGER,
    OURS,
    OURS_COMPILED,
    Baseline,
    Fusion,
    GraphRewrite,
    Report,
    Status,
    StepProfile,
    Timing,
)
from fusion_advisor.report.escape import plural, visible
from fusion_advisor.timing.host_timer import CPU_TIME
from fusion_advisor.timing.paired import compare_rounds

UNCHANGED = "unchanged"
"""Label of the profile after a run that kept nothing."""


def is_unchanged(report: Report) -> bool:
    """Whether a finished run left the model as it was: then before and after are one measurement, and have no ratio."""
    return report.after is not None and report.after.label == UNCHANGED


def timed(report: Report) -> list[tuple[str, Timing]]:
    """Every way whose steps were timed from the host's side: eager, ours where it is another step, all others that are right."""
    sides = [(EAGER, report.before.wall)]
    if report.after is not None and not is_unchanged(report):
        sides.append((OURS, report.after.wall))
    others = [row for row in report.baselines if row.is_right and row.name not in (EAGER, OURS)]
    sides += [(row.name, row.step.wall) for row in others if row.step is not None]
    return [(name, timing) for name, timing in sides if timing is not None]


def compiled_walls(report: Report) -> list[tuple[str, Timing]]:
    """The modes of torch.compile that were measured, with their wall times; not those that compute something else."""
    return [
        (row.name.removeprefix(COMPILED), row.step.wall)
        for row in report.baselines
        if row.name.startswith(COMPILED) and row.is_right and row.step is not None and row.step.wall is not None
    ]


def best_compile(report: Report) -> tuple[str, Timing] | None:
    """The fastest mode of torch.compile; None where none was measured."""
    return min(compiled_walls(report), key=lambda row: row[1].median_ns, default=None)


def why_no_compile(report: Report) -> str:
    """Say why there is no time of torch.compile to compare with: not measured, not runnable, or not eager's step."""
    rows = [row for row in report.baselines if row.name.startswith(COMPILED)]
    if not rows:
        return "torch.compile was not measured"
    row = min(rows, key=lambda one: one.step is None or one.step.wall is None)
    name = visible(row.name, 60)
    if row.step is None or row.step.wall is None:
        return f"{name} could not be measured: {visible(row.note, 200)}"
    why = "" if row.check is None else visible(row.check.reason, 200)
    return f"{name} takes {units.duration(row.step.wall.median_ns)} and does not count, for it computes something else: {why}"


def own_wall(report: Report) -> Timing | None:
    """Wall time of what stays in the model: eager's where nothing did."""
    return None if report.after is None else report.after.wall


def own_rested(report: Report) -> Timing | None:
    """As :func:`own_wall`, after rests."""
    return None if report.after is None else report.after.rested


def faster_compile(report: Report) -> tuple[str, Timing] | None:
    """The fastest mode of torch.compile, if it is faster than what stays in the model, intervals and all."""
    own, best = own_wall(report), best_compile(report)
    return best if best is not None and own is not None and best[1].ci_high_ns < own.ci_low_ns else None


def best_peer(report: Report) -> tuple[str, Timing] | None:
    """The fastest other way to run the step, eager among them; None where nothing else was measured."""
    return _fastest([(name, step.wall) for name, step in _peers(report)])


def best_rested_peer(report: Report) -> tuple[str, Timing] | None:
    """As :func:`best_peer`, after rests."""
    return _fastest([(name, step.rested) for name, step in _peers(report)])


def _peers(report: Report) -> list[tuple[str, StepProfile]]:
    rows = [row for row in report.baselines if row.name not in (OURS, OURS_COMPILED) and row.is_right]
    return [(row.name, row.step) for row in rows if row.step is not None]


def _fastest(rows: Sequence[tuple[str, Timing | None]]) -> tuple[str, Timing] | None:
    timed = [(name, timing) for name, timing in rows if timing is not None]
    return min(timed, key=lambda row: row[1].median_ns) if len(timed) > 1 else None


def cost_line(report: Report) -> str:
    """If another way is measurably faster than ours: the kind of kernel that loses the time, and its most expensive kernel."""
    own, peer = own_wall(report), best_peer(report)
    if own is None or peer is None or report.after is None or is_unchanged(report):
        return ""
    if compare_rounds(peer[1].times_ns, own.times_ns).ratio_high >= 1:
        return ""
    theirs = next(row.step for row in report.baselines if row.name == peer[0])
    assert theirs is not None
    lost = {
        kind: _by_kind(report.after).get(kind, 0) - _by_kind(theirs).get(kind, 0)
        for kind in (*_by_kind(report.after), *_by_kind(theirs))
    }
    kind, ns = max(lost.items(), key=lambda row: row[1], default=("", 0))
    begin = f"{peer[0]} is faster by {units.duration(own.median_ns - peer[1].median_ns)}"
    if ns <= 0:
        return f"{begin} although its kernels take no less: the difference is the host's."
    slowest = max((row for row in report.after.kernels if _kind(row[1]) == kind), key=lambda row: row[3], default=None)
    name = f", most of all in {visible(slowest[0], 80)} ({units.duration(slowest[3])})" if slowest else ""
    return f"{begin}: ours spends {units.duration(ns)} more in {kind} kernels{name}."


def _kind(category: str) -> str:
    return category if category in ("gemm", "attention", "convolution") else "pointwise and reduction"


def _by_kind(step: StepProfile) -> dict[str, int]:
    found: dict[str, int] = {}
    for category, _, ns in step.categories:
        found[_kind(category)] = found.get(_kind(category), 0) + ns
    return found


@dataclass(frozen=True, slots=True)
class BaselineRow:
    """One line of the baselines table, formatted."""

    name: str
    wall: str
    spread: str
    against: str
    rested: str
    rested_against: str
    """Its wall time over what stays in the model."""
    device: str
    launches: str
    first_call: str
    memory: str
    note: str


def baseline_rows(report: Report) -> tuple[BaselineRow, ...]:
    """Every way to run the step that was tried, in the order of the run; empty where ours was compared with eager alone."""
    if not any(row.name not in (EAGER, OURS) for row in report.baselines):
        return ()
    return tuple(_baseline_row(row, own_wall(report), own_rested(report)) for row in report.baselines)


def _baseline_row(row: Baseline, own: Timing | None, rested: Timing | None) -> BaselineRow:
    step = row.step
    if step is None or step.wall is None:
        return BaselineRow(row.name, "–", "", "–", "–", "", "–", "–", "–", "–", row.note)
    return BaselineRow(
        name=row.name,
        wall=units.duration(step.wall.median_ns),
        spread=units.duration_interval(step.wall.ci_low_ns, step.wall.ci_high_ns),
        against=_against(step.wall, own),
        rested="–" if step.rested is None else units.duration(step.rested.median_ns),
        rested_against=_against(step.rested, rested),
        device=units.duration(step.device_ns) if step.device_ns else "–",
        launches=units.number(step.launches) if step.launches else "–",
        first_call="–" if row.first_call_s is None else units.seconds(row.first_call_s),
        memory=units.size(step.peak_memory_bytes) if step.peak_memory_bytes else "–",
        note=row.note if row.check is None or row.is_right else f"wrong: {row.check.reason}",
    )


def _against(timing: Timing | None, own: Timing | None) -> str:
    return "–" if timing is None or own is None else units.speedup(timing.median_ns / max(own.median_ns, 1))


def has_rested(report: Report) -> bool:
    """Whether steps were also timed after rests, where the power limit holds none down."""
    return any(row.step is not None and row.step.rested is not None for row in report.baselines)


def warm_up_line(report: Report) -> str:
    """How long a saved plan takes to the first fused step; empty where nothing was kept."""
    warm = report.warm_up
    if warm is None:
        return ""
    phases = ", ".join(f"{name} {units.seconds(taken)}" for name, taken in warm.phases_s)
    compiled = next((row for row in report.baselines if row.name == f"{COMPILED}default" and row.first_call_s is not None), None)
    first_call = "" if compiled is None else f" torch.compile's first call took {units.seconds(compiled.first_call_s or 0.0)}."
    return (
        f"Warm-up: {units.seconds(warm.seconds)} from the saved plan to the first fused step ({phases}); building its kernels "
        f"took {units.seconds(warm.build_s)}, once.{first_call}"
    )


def overhead_line(report: Report) -> str:
    """What a fused call costs besides its graphs; empty where it was not measured."""
    if report.call_overhead is None or report.after is None:
        return ""
    spent = units.duration(report.call_overhead.median_ns)
    return f"Overhead: a fused call spends {spent} in Python around its graph (signature, dynamo's guards, checks of the model)."


def prediction_error(report: Report) -> tuple[float, int] | None:
    """The median of |predicted − measured| / measured over the kept rewrites that have both figures, and how many they are.

    A rewrite of which nothing was expected, and which saved something, counts as a whole error.
    """
    errors = []
    rows: list[Fusion | GraphRewrite] = [*report.fusions, *report.rewrites]
    for row in rows:
        expected_ns = predicted_ns(row)
        if row.status is Status.KEPT and row.step_delta_ns and expected_ns is not None:
            errors.append(abs(expected_ns + row.step_delta_ns) / abs(row.step_delta_ns))
    return (statistics.median(errors), len(errors)) if errors else None


def prediction_coverage(report: Report) -> tuple[int, int] | None:
    """How many kept rewrites were measured within their prediction's interval, and how many have both; None where none has."""
    rows: list[Fusion | GraphRewrite] = [*report.fusions, *report.rewrites]
    inside = [
        row.predicted_low_ns <= -row.step_delta_ns <= row.predicted_high_ns
        for row in rows
        if row.status is Status.KEPT
        and row.step_delta_ns is not None
        and row.predicted_low_ns is not None
        and row.predicted_high_ns is not None
    ]
    return (sum(inside), len(inside)) if inside else None


def prediction_line(report: Report) -> str:
    """Median error of the predictions; empty where no kept rewrite has a prediction and a measurement."""
    found = prediction_error(report)
    if found is None:
        return ""
    error, count = found
    cost = report.launch_cost_ns
    launch = f"; a launch adds {units.duration(cost)} to its kernel" if cost else ""
    covered = prediction_coverage(report)
    within = f"; {covered[0]} of {covered[1]} lie within their 90% intervals" if covered else ""
    return (
        f"Prediction: estimates missed the measured savings by {units.share(error)} (median of {plural(count, 'kept rewrite')})"
        f"{within}{launch}.{_at_power_limit(report)}"
    )


def _at_power_limit(report: Report) -> str:
    """Costs measured at the power limit; empty where the limit did not throttle the step."""
    copies, launches = report.copy_cost_share, report.short_launch_cost_share
    if min(copies, launches) >= 1:
        return ""
    return (
        f" At the device's power limit the step feels {units.share(copies)} of a copy's time and {units.share(launches)} of a "
        "short launch's, as measured with copies and launches in it; so much of what memory-bound kernels save was expected."
    )


def predicted(row: Fusion | GraphRewrite) -> str:
    """A rewrite's predicted change, signed like the measured change; a dash without a prediction."""
    saving_ns = predicted_ns(row)
    return "–" if saving_ns is None else units.delta(-saving_ns)


def predicted_interval(row: Fusion | GraphRewrite) -> str:
    """The ends between which nine of ten measured changes lie, signed like them; empty in reports without intervals."""
    low_ns, high_ns = row.predicted_low_ns, row.predicted_high_ns
    if low_ns is None or high_ns is None or predicted_ns(row) is None:
        return ""
    return units.delta_interval(-high_ns, -low_ns)


def predicted_ns(row: Fusion | GraphRewrite) -> int | None:
    """A rewrite's predicted saving; None for rewrites that were not timed alone.

    In reports of before linears' kernels were timed against what the step had in their places, 0 stands for no figure.
    """
    if isinstance(row, Fusion) and (row.chain_after is None or not (row.chain_id or row.predicted_saving_ns)):
        return None
    return row.predicted_saving_ns


def run_lines(report: Report) -> list[str]:
    """Prediction, warm-up, and what is lost against a faster way: the sentences that there are."""
    lines = (prediction_line(report), warm_up_line(report), overhead_line(report), cost_line(report))
    return [line for line in lines if line]


def step_label(timing: Timing | None) -> str:
    """Name the row of a step's host-side time by the clock that was read."""
    return "Step, CPU time" if timing is not None and timing.method == CPU_TIME else "Step, wall clock"
