"""Results compared with eager's and with fp64: errors, units in the last place, what leans to one side."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from fusion_advisor.records import ULP_ENDS, Numerics, Tolerance
from fusion_advisor.verify import special_values
from fusion_advisor.verify.accuracy import Error, count_bit_equal, error_of, is_inside, is_within, limit_for, unit_of
from fusion_advisor.verify.pieces import pieces

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

    def add(self, results: special_values.Results) -> None:
        """Compare one result with eager's and with the oracle's."""
        one, original, truth = results.fused, results.eager, results.oracle
        ours, theirs = error_of(one, truth), error_of(original, truth)
        self._judge(results, ours, theirs)
        self.nonfinite += max(0, ours.nonfinite - theirs.nonfinite)
        self.elements += ours.elements
        self.bit_equal += count_bit_equal(one, original) if one.dtype == original.dtype else 0
        self.fused_ulps = _added(self.fused_ulps, count_ulps(one, truth))
        self.eager_ulps = _added(self.eager_ulps, count_ulps(original, truth))
        badness = _badness(ours, theirs, original.dtype, fast_math=self.fast_math)
        if self.worst is None or badness > self.badness:
            self.worst, self.badness = (ours, theirs), badness

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
            inputs=inputs,
            fused_ulps=self.fused_ulps if any(self.fused_ulps) else (),
            eager_ulps=self.eager_ulps if any(self.eager_ulps) else (),
            faults=tuple(dict.fromkeys(self.faults)),
            bit_equal_elements=self.bit_equal,
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
