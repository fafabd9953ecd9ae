"""Ending a comparison as soon as it is decided, with no more false positives than one look at its end would raise.

An interval that is looked at again and again crosses a threshold by chance sooner or later. So there are five looks at most,
after 10, 20, 40, 80 and 160 rounds, and they share a fifth of the error that the asked confidence allows: 0.2 % each at 95 %,
where the end has the other four fifths (96 %). By the union bound the chance that any look or the end is wrong stays within 5
%, however the looks depend on each other. An interval of 99.8 % from few rounds is no matter for a bootstrap: a look takes
order statistics of the rounds' ratios, whose level is exact for independent rounds of any distribution (ten rounds: the whole
range, 99.8 %).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from fusion_advisor.timing.interleaving import Difference, difference
from fusion_advisor.timing.wall_timer import median_interval

ROUNDS = (10, 20, 40, 80, 160)
_SPENT = 0.2
"""Share of the allowed error that all looks have together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One rewrite on top of those before it."""

    step_ns: float
    """The step without it."""
    noise_ns: float
    """How far that step differs from itself."""
    change: Difference


def changes(
    times: Sequence[Sequence[int]], confidence: float, is_final: Callable[[Sequence[Change]], bool]
) -> tuple[Change, ...]:
    """Return what each rewrite changes: as the look saw it where the rounds ended at one, else as one look at the end sees it.

    Args:
        times: of the step twice, then with one rewrite more each, in the same rounds.
        confidence: of all verdicts, however often they were looked at.
        is_final: whether the changes that a look saw decide everything.
    """
    seen = at_look(times, confidence)
    return seen if seen and is_final(seen) else _read(times, 1 - (1 - _SPENT) * (1 - confidence), difference)


def at_look(times: Sequence[Sequence[int]], confidence: float) -> tuple[Change, ...]:
    """Return what each rewrite changes where a look is due after this many rounds; nothing where none is."""
    if len(times[0]) not in ROUNDS:
        return ()
    return _read(times, 1 - _SPENT / len(ROUNDS) * (1 - confidence), _exact)


def _read(
    times: Sequence[Sequence[int]], level: float, compare: Callable[[Sequence[int], Sequence[int], float], Difference]
) -> tuple[Change, ...]:
    control, stacked = times[0], times[1:]
    same = compare(control, stacked[0], level)
    noise_share = max(abs(same.low_ns), abs(same.high_ns)) / max(median(stacked[0]), 1)
    return tuple(
        Change(step_ns=median(before), noise_ns=noise_share * median(before), change=compare(before, after, level))
        for before, after in pairwise(stacked)
    )


def _exact(before_ns: Sequence[int], after_ns: Sequence[int], level: float) -> Difference:
    """Return the difference as ``timing.paired`` does, its interval by order statistics of the rounds' ratios."""
    ratios = [before / max(after, 1) for before, after in zip(before_ns, after_ns, strict=True)]
    ratio, low, high = median_interval(ratios, level)
    middle_ns = median(before_ns)
    middle, most, least = (round(middle_ns / max(one, 1e-12) - middle_ns) for one in (ratio, high, low))
    return Difference(median_ns=middle, low_ns=most, high_ns=least)
