"""How a step scales over ranks: what each rank of one run gets done, as a share of what each rank of the other does."""

from __future__ import annotations

from dataclasses import dataclass

from fusion_advisor.records import Report, StepProfile, Timing

SHARED = "tensor parallel"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """Two runs of a step on other numbers of ranks.

    Attributes:
        a_ranks: of the first run; one process counts as one.
        b_ranks: of the second.
        efficiency_share: 1 where each rank of the second run gets as much done in a second as each of the first; None where the
            runs share the work in other ways, or were not timed alike.
    """

    a_ranks: int
    b_ranks: int
    efficiency_share: float | None


def rank_count(report: Report) -> int:
    """Return how many ranks a run had; 1 without torchrun."""
    return 1 if report.ranks is None else len(report.ranks.rows)


def scaling(a: Report, b: Report, a_step: StepProfile, b_step: StepProfile) -> Scaling | None:
    """Compare the ranks of two runs; None where both had one.

    Ranks that share a step (tensor parallel) would scale linearly if it took 1/n of the time; replicas, if it took the same time.

    Args:
        a: the first run.
        b: the second.
        a_step: of the first run, in the state that is compared.
        b_step: of the second.
    """
    a_ranks, b_ranks = rank_count(a), rank_count(b)
    if a_ranks == b_ranks == 1:
        return None
    ways = {report.ranks.way for report in (a, b) if report.ranks is not None and len(report.ranks.rows) > 1}
    times = _times(a_step, b_step)
    if len(ways) > 1 or times is None:
        return Scaling(a_ranks=a_ranks, b_ranks=b_ranks, efficiency_share=None)
    faster = times[0].median_ns / max(times[1].median_ns, 1)
    return Scaling(
        a_ranks=a_ranks, b_ranks=b_ranks, efficiency_share=faster * a_ranks / b_ranks if SHARED in ways else faster
    )  # fmt: skip


def _times(a: StepProfile, b: StepProfile) -> tuple[Timing, Timing] | None:
    """Return both steps' times of one clock; None where they have none in common."""
    for left, right in ((a.wall, b.wall), (a.device, b.device)):
        if left is not None and right is not None:
            return left, right
    return None
