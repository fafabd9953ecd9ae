"""Ending a comparison as soon as it is decided, with no more false positives than one look at its end would raise.

An interval that is looked at again and again crosses a threshold by chance sooner or later. So there are nine looks at most,
and they share a fifth of the error that the asked confidence allows: at 95 % the first one has 0.2 % and each other 0.1 %, where
the end has the other four fifths (96 %). By the union bound the chance that any look or the end is wrong stays within 5 %,
however the looks depend on each other. An interval of 99.8 % from few rounds is no matter for a bootstrap: a look takes order
statistics of the rounds' ratios, whose level is exact for independent rounds of any distribution (ten rounds: the whole range,
99.8 %).

Several rewrites share their rounds, and each is settled by the first look that decides it. The bound holds for each of them. The
step itself, which tells the noise, may be left out from a look on at which that noise is below the least gain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from fusion_advisor.timing.interleaving import Difference, difference
from fusion_advisor.timing.wall_timer import median_interval

ROUNDS = (10, 15, 20, 28, 40, 56, 80, 113, 160)
_SPENT = 0.2
"""Share of the allowed error that all looks have together."""
_FIRST = 0.2
"""Share of that which the first look has: of ten rounds nothing less than the whole range is enough."""
_LEAST_NS = 500_000_000
"""Gone by ahead of a look: rounds of a few milliseconds may all be disturbed by one thing. Rests count: the device was watched
for as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One rewrite on top of those before it."""

    step_ns: float
    """The step without it."""
    noise_ns: float
    """How far that step differs from itself."""
    change: Difference


def changes(
    times: Sequence[Sequence[int]],
    confidence: float,
    settles: Callable[[Change], bool],
    is_final: Callable[[Sequence[Change]], bool],
    *,
    rest: float = 0.0,
) -> tuple[Change, ...]:
    """Return what each rewrite changes: as the look that settled it saw it, or the look that ended the rounds, or else the end.

    Args:
        times: of the step twice, then with one rewrite more each. Steps that are only next to settled rewrites may have fewer
            rounds, and so may the step itself, whose noise is then that of the rounds that it has.
        confidence: of all verdicts, however often they were looked at.
        settles: whether what a look saw of one rewrite decides it.
        is_final: whether the changes that a look saw decide everything.
        rest: idle time ahead of each run, as a multiple of the run before it.
    """
    seen = at_look(times, confidence, settles, rest=rest)
    if seen and is_final(seen):
        return seen
    end = 1 - (1 - _SPENT) * (1 - confidence)
    return tuple(
        _settled(times, number, confidence, settles, rest) or _read(times, number, _rounds(times), end, difference)
        for number in range(len(times) - 2)
    )


def at_look(
    times: Sequence[Sequence[int]], confidence: float, settles: Callable[[Change], bool], *, rest: float = 0.0
) -> tuple[Change, ...]:
    """Return what each rewrite changes, as the look that settled it saw it, or this one; nothing where no look is due now.

    The arguments are those of :func:`changes`.
    """
    count = _rounds(times)
    if count not in ROUNDS or not _is_long(times, count, rest):
        return ()
    return tuple(
        _settled(times, number, confidence, settles, rest) or _read(times, number, count, _level(confidence, count), _exact)
        for number in range(len(times) - 2)
    )


def _settled(
    times: Sequence[Sequence[int]], number: int, confidence: float, settles: Callable[[Change], bool], rest: float
) -> Change | None:
    """Return what the first look that settles a rewrite saw; None where none does."""
    rounds = min(map(len, times[number + 1 : number + 3]))
    for count in ROUNDS:
        if count <= rounds and _is_long(times, count, rest):
            seen = _read(times, number, count, _level(confidence, count), _exact)
            if settles(seen):
                return seen
    return None


def _rounds(times: Sequence[Sequence[int]]) -> int:
    """Return how many rounds were made: those of the steps that were never left out."""
    return max(map(len, times))


def _is_long(times: Sequence[Sequence[int]], count: int, rest: float) -> bool:
    return (1 + rest) * sum(sum(series[:count]) for series in times) >= _LEAST_NS


def _level(confidence: float, count: int) -> float:
    """Return the level of the look after so many rounds."""
    share = _FIRST if count == ROUNDS[0] else (1 - _FIRST) / (len(ROUNDS) - 1)
    return 1 - share * _SPENT * (1 - confidence)


def _read(
    times: Sequence[Sequence[int]],
    number: int,
    count: int,
    level: float,
    compare: Callable[[Sequence[int], Sequence[int], float], Difference],
) -> Change:
    """Read a rewrite's change off the first so many rounds, or those that a step has."""
    control, untouched = _alike(times[0], times[1], count)
    before, after = _alike(times[number + 1], times[number + 2], count)
    same = compare(control, untouched, level)
    noise_share = max(abs(same.low_ns), abs(same.high_ns)) / max(median(untouched), 1)
    return Change(step_ns=median(before), noise_ns=noise_share * median(before), change=compare(before, after, level))


def _alike(one: Sequence[int], other: Sequence[int], count: int) -> tuple[Sequence[int], Sequence[int]]:
    """Return the first so many rounds of two steps, or those that both have."""
    count = min(count, len(one), len(other))
    return one[:count], other[:count]


def _exact(before_ns: Sequence[int], after_ns: Sequence[int], level: float) -> Difference:
    """Return the difference as ``timing.paired`` does, its interval by order statistics of the rounds' ratios."""
    ratios = [before / max(after, 1) for before, after in zip(before_ns, after_ns, strict=True)]
    ratio, low, high = median_interval(ratios, level)
    middle_ns = median(before_ns)
    middle, most, least = (round(middle_ns / max(one, 1e-12) - middle_ns) for one in (ratio, high, low))
    return Difference(median_ns=middle, low_ns=most, high_ns=least)
