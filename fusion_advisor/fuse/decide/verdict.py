"""The keep rule's answer for one rewrite, by one measured difference."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fusion_advisor import units
from fusion_advisor.records import Status
from fusion_advisor.timing import interleaving


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer of the step's own time on one rewrite."""

    id: str
    status: Status
    reason: str
    delta_ns: int
    interval_ns: tuple[int, int]
    is_timed: bool = True
    """False: it stays because its numbers pass; the two figures say nothing."""
    timed_with: tuple[str, ...] = ()
    """Ids of the rewrites that were timed together with it; the two figures are then its share of what all change."""
    is_timed_alone: bool = False
    """Whether the two figures are its own times alone, and no step's."""

    @property
    def step_delta_ns(self) -> int | None:
        """The difference for a report; None where nothing was timed."""
        return self.delta_ns if self.is_timed else None

    @property
    def step_delta_ci_ns(self) -> tuple[int, int] | None:
        """Its interval, likewise."""
        return self.interval_ns if self.is_timed else None


def untimed(name: str) -> Verdict:
    """Return the verdict on a rewrite whose numbers pass, where no timing decides (``keep="verified"``)."""
    reason = "its numbers pass; it was not chosen by time (--keep verified)"
    return Verdict(id=name, status=Status.KEPT, reason=reason, delta_ns=0, interval_ns=(0, 0), is_timed=False)


def verdict_of(name: str, change: interleaving.Difference, *, step_ns: float, noise_ns: float, min_gain: float) -> Verdict:
    """Apply the keep rule to one measured difference.

    Args:
        name: of the rewrite.
        change: the step with it minus the step without it.
        step_ns: the step without it.
        noise_ns: how far that step differs from itself.
        min_gain: share of the step that it must save.
    """
    threshold = max(min_gain * step_ns, noise_ns)
    span = span_of(change.median_ns, (change.low_ns, change.high_ns))
    if change.high_ns < -threshold:
        status, reason = Status.KEPT, f"{span}; the whole interval is past the threshold of {units.delta(-threshold)}"
    elif change.low_ns > noise_ns:
        status, reason = Status.SLOWER, f"{span}: the step became slower"
    else:
        status = Status.TOO_LITTLE if change.high_ns < -noise_ns else Status.WITHIN_NOISE
        reason = f"{span}: not past the threshold of {units.delta(-threshold)} (A/A noise {units.duration(noise_ns)})"
    return Verdict(id=name, status=status, reason=reason, delta_ns=change.median_ns, interval_ns=(change.low_ns, change.high_ns))


def span_of(delta_ns: int, interval_ns: tuple[int, int]) -> str:
    """Return a difference and its interval in words."""
    return f"{units.delta(delta_ns)} {units.delta_interval(*interval_ns)} per step"


def once_more(first: Verdict, second: Verdict) -> Verdict:
    """Return the verdict of the second run of a rewrite, which decides, in words that name the first one too."""
    reason = f"{span_of(first.delta_ns, first.interval_ns)}, too little to tell; once more: {second.reason}"
    return replace(second, id=first.id, reason=reason)


def is_unclear(verdict: Verdict, step_ns: float, min_gain: float) -> bool:
    """Whether a rewrite is faster for certain and by more than it must be, but not past it for certain: worth a longer look."""
    return is_small_gain(verdict) and -verdict.delta_ns > min_gain * step_ns


def is_small_gain(verdict: Verdict) -> bool:
    """Whether a rewrite is faster by its whole interval, and not kept all the same."""
    return verdict.status in (Status.WITHIN_NOISE, Status.TOO_LITTLE) and verdict.interval_ns[1] < 0
