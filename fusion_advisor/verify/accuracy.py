"""Error of a kernel's result against a wider oracle, and the limit that the original's own error sets.

A result computed in fp32 and rounded once to 16 bits is nearly always nearer to the truth than the original ops, which round
after each; half a unit of the last place is that rounding itself. An fp32 result is computed in its own width: another order of
the same sum is already a unit away, on either side (1.4 in sums of a dozen numbers), so there two units are the least limit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fusion_advisor.records import Tolerance
from fusion_advisor.verify.pieces import pieces

_REL_FACTOR = 1.5
_ABS_OVER_REL = 4 / 3
"""The largest of a million errors scatters more than their norm: its limit is a third wider."""
_FAST_FACTOR, _FAST_UNITS = 16.0, 8.0
"""With --fast-math: approximate exp, division and square root are good for a few units each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Error:
    """Error of one result against an oracle."""

    max_abs: float
    rel_l2: float
    oracle_max: float
    nonfinite: int
    elements: int


def error_of(result: torch.Tensor, oracle: torch.Tensor) -> Error:
    """Measure ``result`` against ``oracle`` (same shape, fp64 or any wider type), over positions where both are finite."""
    parts = [_part(one, truth) for one, truth in pieces((result, oracle))]
    error, norm = math.hypot(*(part.error_norm for part in parts)), math.hypot(*(part.norm for part in parts))
    return Error(
        max_abs=_largest([part.max_abs for part in parts]),
        rel_l2=error / norm if norm > 0 else error,
        oracle_max=_largest([part.oracle_max for part in parts]),
        nonfinite=sum(part.nonfinite for part in parts),
        elements=result.numel(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Errors of a piece: the largest, and Euclidean norms of the errors and of the oracle."""

    max_abs: float
    error_norm: float
    norm: float
    oracle_max: float
    nonfinite: int


def _part(result: torch.Tensor, oracle: torch.Tensor) -> _Part:
    got, want = result.detach().to(torch.float64), oracle.detach().to(torch.float64)
    both = torch.isfinite(got) & torch.isfinite(want)
    if both.all():
        return _part_of_finite(got - want, want)
    # A NaN answers a NaN, and an infinity one of the same sign or what the result's dtype has no number for; everything else that
    # is not finite is a mismatch.
    rounded = want.to(result.dtype).to(torch.float64) if result.dtype.is_floating_point else want
    agree = both | (torch.isnan(got) & torch.isnan(want)) | (got == rounded)
    zero = torch.zeros_like(got)
    part = _part_of_finite(torch.where(both, got - want, zero), torch.where(both, want, zero))
    return replace(part, nonfinite=int((~agree).sum()))


def _part_of_finite(difference: torch.Tensor, want: torch.Tensor) -> _Part:
    return _Part(
        max_abs=float(difference.abs().max()) if difference.numel() else 0.0,
        error_norm=float(torch.linalg.vector_norm(difference)),
        norm=float(torch.linalg.vector_norm(want)),
        oracle_max=float(want.abs().max()) if want.numel() else 0.0,
        nonfinite=0,
    )


def _largest(values: Sequence[float]) -> float:
    """Return the largest value; NaN where one is."""
    return math.nan if any(math.isnan(value) for value in values) else max(values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """How far from the truth a result of one dtype may be."""

    factor: float
    """Times the original's error."""
    units: float
    """Or this many units in the last place, whichever is larger."""

    def allows(self, ours: Error, theirs: Error, unit: float) -> bool:
        """Whether ``ours`` keeps to the limit that the original's error ``theirs`` sets."""
        return self.excess(ours, theirs, unit) <= 1 and ours.nonfinite <= theirs.nonfinite

    def excess(self, ours: Error, theirs: Error, unit: float) -> float:
        """Return how many times its limit the relative or the largest error is, whichever is further beyond.

        Args:
            ours: errors of the result.
            theirs: errors of the original's.
            unit: of the dtype, from :func:`unit_of`.
        """
        relative = _over(ours.rel_l2, max(self.factor * theirs.rel_l2, self.units * unit))
        largest = max(self.factor * _ABS_OVER_REL * theirs.max_abs, 2 * self.units * unit * ours.oracle_max)
        return max(relative, _over(ours.max_abs, largest))

    def __str__(self) -> str:
        return (
            f"relative error ≤ {self.factor:g} × the original's (or {self.units:g} units in the last place), "
            f"largest error ≤ {self.factor * _ABS_OVER_REL:.3g} × the original's "
            f"(or {2 * self.units:g} units of the largest value)"
        )


def _over(error: float, limit: float) -> float:
    """Divide an error by its limit; at most 1 exactly where the error keeps to the limit, which no NaN does."""
    if error <= limit:
        return error / limit if 0 < limit < math.inf else 0.0
    return max(error / limit, math.nextafter(1, 2)) if limit > 0 and error < math.inf else math.inf


def limit_for(dtype: torch.dtype, *, fast_math: bool = False) -> Limit:
    """Return the limit for a result of ``dtype``."""
    if fast_math:
        return Limit(factor=_FAST_FACTOR, units=_FAST_UNITS)
    return Limit(factor=_REL_FACTOR, units=2.0 if dtype in (torch.float32, torch.float64) else 0.5)


def unit_of(dtype: torch.dtype) -> float:
    """Return the spacing of a dtype's numbers just above 1; 0 for integers and booleans, which have no error."""
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def is_within(ours: Error, theirs: Error, dtype: torch.dtype, *, fast_math: bool = False) -> bool:
    """Whether a fused result's error keeps to the limit that the original's error sets."""
    return limit_for(dtype, fast_math=fast_math).allows(ours, theirs, unit_of(dtype))


def is_inside(result: torch.Tensor, oracle: torch.Tensor, tolerance: Tolerance) -> bool:
    """Whether every element where both are finite keeps to a limit of the user's, as ``torch.testing.assert_close`` has it.

    Args:
        result: floating point.
        oracle: the same shape, fp64 or any wider type.
        tolerance: rtol and atol.
    """
    return all(_is_inside(one, truth, tolerance) for one, truth in pieces((result, oracle)))


def _is_inside(result: torch.Tensor, oracle: torch.Tensor, tolerance: Tolerance) -> bool:
    got, want = result.detach().to(torch.float64), oracle.detach().to(torch.float64)
    both = torch.isfinite(got) & torch.isfinite(want)
    allowed = tolerance.atol + tolerance.rtol * want.abs()
    return bool((((got - want).abs() <= allowed) | ~both).all())


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def count_bit_equal(result: torch.Tensor, expected: torch.Tensor) -> int:
    """Count the elements of two tensors of one shape and dtype that have the same bits; a NaN answers any NaN.

    Zeros of different signs differ.
    """
    one, other = (torch.view_as_real(t) if t.is_complex() else t for t in (result.detach(), expected.detach()))
    bits = _BITS[one.element_size()]
    same = one.contiguous().view(bits) == other.contiguous().view(bits)
    if one.is_floating_point():
        same |= torch.isnan(one) & torch.isnan(other)
    return int((same.all(-1) if result.is_complex() else same).sum())
