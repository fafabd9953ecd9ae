"""Results compared with eager's and with fp64: errors, units in the last place, what leans to one side."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from fusion_advisor.records import ULP_ENDS, Numerics, Tolerance
from fusion_advisor.verify import special_values
from fusion_advisor.verify.accuracy import Error, count_bit_equal, error_of, is_inside, is_within, limit_for, unit_of
from fusion_advisor.verify.pieces import pieces

_OTHERS = 8
_STANDS_OUT = 2.0
"""Times the limit: the largest of nine errors of one rounding scatters more than their median."""
_MOVED = f"; errors are medians over {_OTHERS + 1} inputs that differ by roundings"
_NO_ULPS = (0,) * (len(ULP_ENDS) + 1)


@dataclass(slots=True, kw_only=True)
class Comparison:
    """What the results compared so far have shown.

    Attributes:
        fast_math: allow what --fast-math costs.
        tolerance: the user's limit instead of eager's own error.
        worst: errors of the kernel and of eager where the kernel is farthest beyond its limit.
        badness: how far.
        nonfinite: elements that are not finite and are finite in eager.
        has_moved: whether a result was judged by medians over inputs that differ by roundings.
    """

    fast_math: bool
    tolerance: Tolerance | None
    worst: tuple[Error, Error] | None = None
    badness: float = 0.0
    is_passed: bool = True
    nonfinite: int = 0
    elements: int = 0
    bit_equal: int = 0
    faults: list[str] = field(default_factory=list)
    fused_ulps: tuple[int, ...] = _NO_ULPS
    eager_ulps: tuple[int, ...] = _NO_ULPS
    has_moved: bool = False

    def add(self, results: special_values.Results) -> None:
        """Compare one result with eager's and with the oracle's."""
        one, original, truth = results.fused, results.eager, results.oracle
        ours, theirs = error_of(one, truth), error_of(original, truth)
        if typical := self._typical(results, ours, theirs):
            ours, theirs = typical
        self._judge(results, ours, theirs)
        self.nonfinite += max(0, ours.nonfinite - theirs.nonfinite)
        self.elements += ours.elements
        self.bit_equal += count_bit_equal(one, original) if one.dtype == original.dtype else 0
        self.fused_ulps = _added(self.fused_ulps, count_ulps(one, truth))
        self.eager_ulps = _added(self.eager_ulps, count_ulps(original, truth))
        badness = _badness(ours, theirs, original.dtype, fast_math=self.fast_math)
        if self.worst is None or badness > self.badness:
            self.worst, self.badness = (ours, theirs), badness

    def _typical(self, results: special_values.Results, ours: Error, theirs: Error) -> tuple[Error, Error] | None:
        """Return median errors over inputs that differ by roundings, where an error over the limit is a matter of luck.

        Where few elements make up nearly all of an error, as in ``exp(a * b)`` with a large product, one rounding decides it: the
        original's varies sevenfold over such inputs, and may be small on those on which a kernel is judged. Errors of many
        elements hardly change. A less precise kernel shows in the median, and one that is wrong at few elements stands out.

        Returns:
            Errors of the kernel and of the original; None where the error keeps to its limit, or stands out.
        """
        limit, unit = limit_for(results.eager.dtype, fast_math=self.fast_math), unit_of(results.eager.dtype)
        is_asked = self.tolerance is None and results.eager.is_floating_point() and results.elsewhere is not None
        if not is_asked or limit.allows(ours, theirs, unit) or ours.nonfinite > theirs.nonfinite:
            return None
        assert results.elsewhere is not None
        others = [results.elsewhere(seed) for seed in range(_OTHERS)]
        all_ours = [ours, *(error_of(one.fused, one.oracle) for one in others)]
        all_theirs = [theirs, *(error_of(one.eager, one.oracle) for one in others)]
        if any(one.nonfinite > other.nonfinite for one, other in zip(all_ours, all_theirs, strict=True)):
            return None
        typical = _each(statistics.median, all_ours), _each(statistics.median, all_theirs)
        largest = _each(max, all_ours), _each(max, all_theirs)
        if limit.excess(*typical, unit) > 1 or limit.excess(*largest, unit) > _STANDS_OUT:
            return None
        self.has_moved = True
        return typical

    def _judge(self, results: special_values.Results, ours: Error, theirs: Error) -> None:
        """Refuse a result whose error is over the limit, or which was cut off instead of rounded."""
        one, original, truth = results.fused, results.eager, results.oracle
        if self.tolerance is None or not original.is_floating_point():
            is_right = is_within(ours, theirs, original.dtype, fast_math=self.fast_math)
        else:
            is_right = is_inside(one, truth, self.tolerance) and ours.nonfinite <= theirs.nonfinite
        if self.tolerance is None and not self.fast_math:
            bias = special_values.is_biased(one, original, truth)
            if bias is not None:
                is_right = False
                self.faults.append(f"results lean to one side by {bias:+.2f} units in the last place: cut off, not rounded")
        self.is_passed = self.is_passed and is_right

    def numerics(self, *, inputs: str, limit: str) -> Numerics:
        """Return the record of the comparison.

        Args:
            inputs: what was compared, in words.
            limit: of the error, in words.
        """
        assert self.worst is not None
        ours, theirs = self.worst
        return Numerics(
            oracle="float64",
            fused_max_abs=ours.max_abs,
            eager_max_abs=theirs.max_abs,
            fused_rel_l2=ours.rel_l2,
            eager_rel_l2=theirs.rel_l2,
            elements=self.elements,
            limit=limit,
            is_passed=self.is_passed,
            nonfinite_mismatches=self.nonfinite,
            inputs=inputs + _MOVED * self.has_moved,
            fused_ulps=self.fused_ulps if any(self.fused_ulps) else (),
            eager_ulps=self.eager_ulps if any(self.eager_ulps) else (),
            faults=tuple(dict.fromkeys(self.faults)),
            bit_equal_elements=self.bit_equal,
        )


def _each(chosen: Callable[[list[float]], float], errors: list[Error]) -> Error:
    """Return the errors' median or largest, each figure by itself."""
    return replace(
        errors[0],
        max_abs=chosen([one.max_abs for one in errors]),
        rel_l2=chosen([one.rel_l2 for one in errors]),
        oracle_max=chosen([one.oracle_max for one in errors]),
    )


_ORDERED = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}
"""Integers as wide as each float: read as one, a float's bits grow with its magnitude (IEEE 754)."""


def count_ulps(result: torch.Tensor, oracle: torch.Tensor) -> tuple[int, ...]:
    """Count elements by how many numbers of the result's dtype lie between them and the oracle rounded to it.

    Args:
        result: of 16 or 32 bits; an integer counts nothing, nor does fp64, than which the oracle is no wider.
        oracle: fp64, same shape.

    Returns:
        One count for each bin of :data:`fusion_advisor.records.ULP_ENDS`, and one for what lies beyond.
    """
    if result.dtype not in _ORDERED:
        return _NO_ULPS
    counts = _NO_ULPS
    for one, truth in pieces((result, oracle)):
        counts = _added(counts, _count_ulps(one, truth))
    return counts


def _count_ulps(result: torch.Tensor, oracle: torch.Tensor) -> tuple[int, ...]:
    ends = torch.tensor(ULP_ENDS, device=result.device)
    rounded = oracle.detach().to(result.dtype)
    both = torch.isfinite(result) & torch.isfinite(rounded)
    differ = both & (result != rounded)  # most are equal: the others alone are numbered, a third of the time
    distance = (_ordinal(result.detach()[differ]) - _ordinal(rounded[differ])).abs()
    counts = torch.bincount(torch.bucketize(distance, ends), minlength=len(ULP_ENDS) + 1).tolist()
    return (counts[0] + int(both.sum()) - distance.numel(), *counts[1:])


def _ordinal(values: torch.Tensor) -> torch.Tensor:
    """Number floats in order: zero is 0 whatever its sign, its neighbours are ±1."""
    bits = values.contiguous().view(_ORDERED[values.dtype]).to(torch.int64)
    lowest = torch.iinfo(_ORDERED[values.dtype]).min
    return torch.where(bits < 0, lowest - bits, bits)


def _added(counts: tuple[int, ...], more: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(one + other for one, other in zip(counts, more, strict=True))


def _badness(ours: Error, theirs: Error, dtype: torch.dtype, *, fast_math: bool) -> float:
    """How far beyond its limit a result is; the one that is shown is the one that was refused, where one was."""
    own = limit_for(dtype, fast_math=fast_math).excess(ours, theirs, unit_of(dtype))
    return own + 1e9 * max(0, ours.nonfinite - theirs.nonfinite)
