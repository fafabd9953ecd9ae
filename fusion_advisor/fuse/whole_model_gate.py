"""The last gate: what the whole call's numbers and times must show, or everything is reverted."""

from __future__ import annotations

import math

from fusion_advisor import units
from fusion_advisor.fuse.decide.keep_rule import Decision
from fusion_advisor.records import ModelCheck, OpClass, Status, StepProfile, Timing
from fusion_advisor.timing import interleaving

_CAPTURED_OTHERWISE = (
    "dynamo's capture computes other numbers than the model, with the model's own ops too (torch's transformer layers leave "
    "their fast path when captured, transformers builds masks that eager skips, for example)"
)


def shortfall(check: ModelCheck) -> str:
    """Say where a whole model's numbers fail: the worst output, how far it is off, and how far eager's is."""
    if check.fused_rel_l2 == math.inf and check.eager_rel_l2 == 0 and not check.worst:
        return f"{', '.join(map(repr, check.outputs))}: another shape than eager's"
    if count := check.nonfinite_mismatches:
        elements = "1 element is" if count == 1 else f"{count:,} elements are"
        return f"{elements} NaN or infinite in eager's outputs alone or in ours alone, {check.worst!r} among them"
    if check.oracle == "eager":
        return f"{check.worst!r} is {check.fused_rel_l2:.2g} off eager's, relative"
    return f"{check.worst!r} is {check.fused_rel_l2:.2g} off a {check.oracle}, relative, and eager's {check.eager_rel_l2:.2g}"


def comparable_device_ns(before: StepProfile, after: StepProfile) -> tuple[int, int] | None:
    """Return the device times of two steps by which they can be compared, in nanoseconds; None where only their wall times can.

    A kernel between ranks runs until the last rank has come to it: most of its time is waiting, and says nothing of this rank's
    work. So ops between ranks are left out. Where one step has more of them than the other, its kernels may do their work.

    Args:
        before: eager.
        after: the rewritten step.
    """
    (one, one_ns), (other, other_ns) = _between_ranks(before), _between_ranks(after)
    return (before.device_ns - one_ns, after.device_ns - other_ns) if one == other else None


def _between_ranks(step: StepProfile) -> tuple[int, int]:
    """Return how many kernels between ranks a step has, and their nanoseconds."""
    return next(((count, ns) for name, count, ns in step.categories if name == OpClass.COLLECTIVE), (0, 0))


def why_nothing_stays(
    check: ModelCheck | None,
    before_ns: int,
    after_ns: int,
    wall_before: Timing,
    wall_after: Timing,
    *,
    is_device_judged: bool,
    is_time_judged: bool,
    captured: ModelCheck | None = None,
) -> str | None:
    """The whole-model gate: numbers pass and the step never becomes slower than eager, or everything is reverted.

    Without a graph, device time may not rise either: a wall time that the host decides would hide it. With ``keep="verified"`` no
    time is judged. ``captured`` is the check of the captured graphs with the model's own ops, where the fused model's failed.
    """
    is_wrong = check is not None and not check.is_passed
    if is_wrong and captured is not None and not captured.is_passed:
        return f"{_CAPTURED_OTHERWISE}: {shortfall(captured)}; everything was reverted"
    if check is not None and is_wrong:
        return f"the whole model's numbers do not pass ({shortfall(check)}): everything was reverted"
    if not is_time_judged:
        return None
    if is_device_judged and after_ns > before_ns:
        return f"device time would rise {_from_to(before_ns, after_ns)} against eager: everything was reverted"
    if wall_after.ci_low_ns > wall_before.ci_high_ns:
        return f"the step would rise {_from_to(wall_before.median_ns, wall_after.median_ns)}: everything was reverted"
    return None


def given_back(check: ModelCheck | None) -> Status:
    """Return the verdict on each rewrite of a step that the gate gave back: slower, if its numbers passed.

    Args:
        check: of the whole model. Where it failed, nothing says which rewrite it was.
    """
    return Status.SLOWER if check is None or check.is_passed else Status.NOT_REPLACED


def _from_to(before_ns: float, after_ns: float) -> str:
    """Return both times in one unit, with a digit more than other sentences have: they may be near each other."""
    scale, unit = (1e6, "ms") if after_ns >= 1e6 else (1e3, "µs")
    return f"from {before_ns / scale:,.3f} to {after_ns / scale:,.3f} {unit}"


def why_parts_do_not_pay(decision: Decision, before: Timing, after: Timing, confidence: float) -> str | None:
    """The keep rule of a call that is more than its captured graphs: the whole of it must be measurably faster.

    The verdicts on single rewrites time the graphs one after the other. What lies between them they do not see: the model's own
    Python, and dynamo's guards in front of each graph.

    Args:
        decision: with the graphs' times.
        before: of the whole call, eager.
        after: of the whole call, fused, interleaved with it.
        confidence: of the interval.
    """
    change = interleaving.difference(before.times_ns, after.times_ns, confidence)
    if change.high_ns < 0:
        return None
    graphs = f"from {units.duration(decision.before.median_ns)} to {units.duration(decision.after.median_ns)}"
    interval = units.delta_interval(change.low_ns, change.high_ns)
    return (
        f"the whole call does not measurably pay ({units.delta(change.median_ns)} {interval} against eager), whatever its "
        f"captured graphs alone do ({graphs}): everything was reverted"
    )
