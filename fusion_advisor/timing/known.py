"""Whether times so far are enough: what ends the rounds of an interleaved timing that judges nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection

from fusion_advisor.timing.wall_timer import median_interval

_ALONE, _ALONE_ROUNDS = 0.005, 12
"""What is timed by itself on a GPU is known to within this share, by so many rounds at least."""


def as_before(_: object) -> None:
    """Leave open what is open."""


def is_known(share: float) -> Callable[[list[list[int]]], bool]:
    """Return the question whether the quicker half of the candidates is known to within a share of each one's time."""

    def found(times: list[list[int]]) -> bool:
        spans = sorted(map(median_interval, times))
        return all(high - low <= 2 * share * middle for middle, low, high in spans[: -(-len(spans) // 2)])

    return found


def until_precise(share: float, least: int, of_difference: float = 0.0) -> Callable[[list[list[int]]], Collection[int] | None]:
    """Return what leaves two candidates open until both are known, by so many rounds at least.

    Args:
        share: of each one's time, to within which it is known.
        least: rounds.
        of_difference: share of what they differ by, round by round; to know that to within it is enough. 0: it is not.
    """

    def found(times: list[list[int]]) -> Collection[int] | None:
        if len(times[0]) < least:
            return None
        spans = list(map(median_interval, times))
        middle, low, high = median_interval([after - before for before, after in zip(*times, strict=True)])
        is_told = of_difference > 0 and high - low <= 2 * of_difference * abs(middle)
        return () if is_told or all(high - low <= 2 * share * middle for middle, low, high in spans) else None

    return found


def until_known_alone(*, on_cuda: bool) -> Callable[[list[list[int]]], Collection[int] | None]:
    """Return what ends the rounds of ops that are timed by themselves, before and after; on a CPU nothing does.

    Args:
        on_cuda: whether they run on a GPU, where such times hardly differ from round to round.
    """
    return until_precise(_ALONE, _ALONE_ROUNDS) if on_cuda else as_before
