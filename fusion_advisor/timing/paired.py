"""Compares two steps that were timed in the same rounds: the one statistic of every before and after.

Each round gives one ratio, so drift and neighbours that slow a whole round down cancel. The bootstrap draws rounds and takes
their median ratio. The difference is that ratio of the median before, so that a rewrite that is kept by the one and the headline
that shows the other cannot say opposite things. No torch is imported here: reports are rendered without it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

_RESAMPLES = 2000
_FEW = 6
"""With fewer rounds the interval is the whole range of the rounds: too few resamples of them differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A step before and after, from paired rounds.

    Attributes:
        ratio: time before over time after; above 1 is faster.
        ratio_low: lower end of its interval.
        ratio_high: upper end of its interval.
        delta_ns: time after less time before; negative is faster.
        low_ns: lower end of its interval.
        high_ns: upper end of its interval.
    """

    ratio: float
    ratio_low: float
    ratio_high: float
    delta_ns: int
    low_ns: int
    high_ns: int


def compare_rounds(before_ns: Sequence[int], after_ns: Sequence[int], confidence: float = 0.95) -> Comparison:
    """Return the ratio of two steps' times and their difference, with bootstrap intervals.

    Args:
        before_ns: one time for each round.
        after_ns: the other step's times in the same rounds; of another number where the two were not timed in turns, then each
            side is resampled by itself.
        confidence: level of both intervals, above 0.5 and below 1.
    """
    return _compared(tuple(before_ns), tuple(after_ns), confidence)


@functools.lru_cache(maxsize=256)
def _compared(before_ns: tuple[int, ...], after_ns: tuple[int, ...], confidence: float) -> Comparison:
    import numpy as np

    before, after = np.asarray(before_ns, dtype=np.float64), np.maximum(np.asarray(after_ns, dtype=np.float64), 1.0)
    middle_ns, few = float(np.median(before)), min(len(before), len(after))
    if len(before) == len(after):
        ratios = before / after
        if few >= _FEW:
            ratios = np.median(ratios[_drawn(few)], axis=1)
    else:
        one, other = (np.median(side[_drawn(len(side))], axis=1) for side in (before, after))
        ratios = one / other
    tail = _tail(few, confidence)
    low, high = map(float, np.quantile(ratios, [tail, 1 - tail]))
    # The ratio of the two medians that a reader sees next to it, as long as the rounds allow that ratio.
    ratio = min(max(middle_ns / float(np.median(after)), low), high)
    delta_ns, low_ns, high_ns = (round(middle_ns / max(one, 1e-12) - middle_ns) for one in (ratio, high, low))
    return Comparison(
        ratio=ratio, ratio_low=low, ratio_high=high, delta_ns=delta_ns, low_ns=low_ns, high_ns=high_ns,
    )  # fmt: skip


def _tail(count: int, confidence: float) -> float:
    """Return the share of resamples outside at each end: few rounds vary less among themselves than further rounds would.

    The expanded percentile interval (Hesterberg, 2015): Student's quantile in place of the normal one, for the deviation of
    ``count`` values.
    """
    if count < _FEW:
        return 0.0
    normal = NormalDist()
    z = normal.inv_cdf((1 + confidence) / 2)
    student = z + (z**3 + z) / (4 * (count - 1))
    return normal.cdf(-student * math.sqrt(count / (count - 1)))


def _drawn(count: int) -> Any:
    """Return the numbers of the rounds of every resample: the same in each run, so that a report can be computed again."""
    import numpy as np

    return np.random.default_rng(count).integers(0, count, (_RESAMPLES, count))
