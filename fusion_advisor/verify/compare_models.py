"""Are the outputs of the whole model right? Fused and eager, each against a copy of higher precision where one fits."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from fusion_advisor.records import ModelCheck, Tolerance
from fusion_advisor.verify.accuracy import Error, error_of, is_inside, unit_of
from fusion_advisor.verify.fill_values import parted
from fusion_advisor.verify.pieces import pieces

MODEL_FACTOR = 1.5
"""Times eager's own error that an output's may be."""
_FEW_FACTOR = 8.0
_QUANTILE = 3.09
"""Of the normal distribution: one in a thousand lies above."""
_UNITS = 8.0
"""In the last place, that a number may be off where the original's is lost."""
_LEAST_LOGITS = 1000
"""Columns above which an output holds logits."""
_FILLED = "where masked"
"""Behind an output's name: what it holds at masked places."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Output:
    """A floating output of the model.

    Attributes:
        name: of the output.
        ours: of the fused model.
        theirs: of the original model.
        truth: of the oracle.
        ours_error: against the oracle.
        theirs_error: against the oracle.
        between: error of the fused model's against the original model's.
        is_exact: it holds integers as floats, for which there is no tolerance.
        least_factor: so many times eager's own error may be at least.
        drawn: errors of eager's ops with other rounding (relative L2).
        floor: relative error that is rounding alone, where eager has no digit right.
    """

    name: str
    ours: torch.Tensor
    theirs: torch.Tensor
    truth: torch.Tensor
    ours_error: Error
    theirs_error: Error
    between: Error
    is_exact: bool
    least_factor: float
    drawn: Sequence[float]
    floor: float

    @property
    def is_logits(self) -> bool:
        return self.ours.dim() >= 2 and self.ours.shape[-1] > _LEAST_LOGITS

    def overrun(self, oracle_name: str) -> float:
        """Return the error in multiples of its limit."""
        unit = unit_of(self.ours.dtype)
        if oracle_name == "eager":
            usual = math.hypot(*self.drawn) / math.sqrt(max(len(self.drawn), 1))
            floor = self.floor if usual >= 1 else 0.0
            return self.between.rel_l2 / max(8 * unit, self.factor * usual, floor)
        floor = self.floor if self.has_no_digit else 0.0
        return self.ours_error.rel_l2 / max(self.factor * self.own, unit, floor)

    @property
    def has_no_digit(self) -> bool:
        """Whether eager's error is as large as the output."""
        return self.theirs_error.rel_l2 >= 1

    @property
    def own(self) -> float:
        """Eager's own error: its root mean square where it was drawn more than once."""
        return math.hypot(self.theirs_error.rel_l2, *self.drawn) / math.sqrt(1 + len(self.drawn))

    @property
    def factor(self) -> float:
        """How many times eager's own error this output's may be.

        Of a gradient that is zero but for rounding (of a key's bias, under a softmax) eager has no digit right. What is left is
        the rounding of a few rows, however many numbers it is spread over.
        """
        return _FEW_FACTOR if self.has_no_digit else max(self.least_factor, factor_for(self.ours.numel()))


def factor_for(count: int) -> float:
    """Return how many times eager's own error an output's may be: 1.5, and more where it has fewer than 60 numbers.

    Both errors are of as many numbers as the output has. Half the logarithm of the ratio of two mean squares of n numbers each
    is about normal with variance 1 / (n - 1) (Fisher's z): four numbers of equally exact models differ by 6 once in a thousand.
    """
    return min(_FEW_FACTOR, max(MODEL_FACTOR, math.exp(_QUANTILE / math.sqrt(count - 1)))) if count > 1 else _FEW_FACTOR


def check_model(
    fused: Sequence[tuple[str, torch.Tensor]],
    eager: Sequence[tuple[str, torch.Tensor]],
    oracle: Sequence[tuple[str, torch.Tensor]],
    oracle_name: str,
    *,
    tolerance: Tolerance | None = None,
    exact: Collection[str] = (),
    least_factor: float = MODEL_FACTOR,
    drawn: Mapping[str, Sequence[float]] = MappingProxyType({}),
    floors: Mapping[str, float] = MappingProxyType({}),
) -> ModelCheck:
    """Compare whole-model outputs; the worst floating output decides.

    Args:
        fused: (name, tensor) of every output of the fused model.
        eager: of the original model.
        oracle: of a higher-precision copy, or of the original again where no copy fits.
        oracle_name: ``float64 copy``, ``float32 copy`` or ``eager``.
        tolerance: the user's limit instead of eager's own error; every floating output must keep to it.
        exact: names of outputs that hold integers as floats, for which there is no tolerance.
        least_factor: so many times eager's own error an output's may be at least.
        drawn: by the name of an output, its relative errors in runs of eager's ops with other rounding: of an output with few
            numbers, a loss for one, eager's own error may be small by luck.
        floors: by the name of an output, the relative error that is rounding alone. It counts where eager has no digit right:
            where eager itself is the oracle, other rounding says whether it has.
    """
    other = [name for (name, ours), (_, theirs) in zip(fused, eager, strict=True) if ours.shape != theirs.shape]
    if other:
        return _of_other_shapes(other, oracle_name)
    outputs = [
        replace(one, drawn=drawn.get(one.name, ()), floor=floors.get(one.name, 0.0))
        for one in _floating_outputs(fused, eager, oracle, exact, least_factor)
    ]
    if not outputs:
        raise ValueError("the model returns no floating tensor")
    worst = max(outputs, key=lambda output: (output.between.nonfinite > 0, output.overrun(oracle_name)))
    logits = next((output for output in outputs if output.is_logits), None)
    token, five = (None, None) if logits is None else _agreement(logits.ours, logits.theirs)
    own_token, own_five = (None, None) if logits is None or oracle_name == "eager" else _agreement(logits.theirs, logits.truth)
    mismatches = sum(output.between.nonfinite for output in outputs)
    return ModelCheck(
        oracle=oracle_name,
        outputs=tuple(output.name for output in outputs),
        fused_rel_l2=worst.ours_error.rel_l2,
        eager_rel_l2=worst.theirs_error.rel_l2,
        fused_max_abs=worst.ours_error.max_abs,
        eager_max_abs=worst.theirs_error.max_abs,
        fused_vs_eager_max_abs=worst.between.max_abs,
        cosine=_cosine(worst.ours, worst.theirs),
        argmax_agreement=token,
        top5_agreement=five,
        eager_argmax_agreement=own_token,
        eager_top5_agreement=own_five,
        nonfinite_mismatches=mismatches,
        limit=_limit(worst, oracle_name, tolerance),
        is_passed=_are_within(outputs, oracle_name, tolerance) and mismatches == 0,
        worst=worst.name,
    )


def _cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the cosine of the angle between two tensors as vectors; 0 where one is zero."""
    product, squares, other_squares = 0.0, 0.0, 0.0
    for piece in pieces((one, other)):
        left, right = (part.flatten().to(torch.float64) for part in piece)
        product += float(left @ right)
        squares += float(left @ left)
        other_squares += float(right @ right)
    norms = math.sqrt(squares) * math.sqrt(other_squares)
    return product / norms if norms != 0 else 0.0


def _floating_outputs(
    fused: Sequence[tuple[str, torch.Tensor]],
    eager: Sequence[tuple[str, torch.Tensor]],
    oracle: Sequence[tuple[str, torch.Tensor]],
    exact: Collection[str],
    least_factor: float,
) -> list[_Output]:
    found: list[_Output] = []
    for (name, ours), (_, theirs), (_, truth) in zip(fused, eager, oracle, strict=True):
        if not ours.is_floating_point():
            continue
        parts = parted(*map(_comparable, (ours, theirs, truth)))
        rows = [(name, parts.whole, parts.numbers)]
        rows += [(f"{name} {_FILLED}", parts.fills, parts.fills)] if parts.fills is not None else []
        for title, (mine, eagers, true), numbers in rows:
            found.append(
                _Output(
                    name=title,
                    ours=mine,
                    theirs=eagers,
                    truth=true,
                    ours_error=error_of(numbers[0], numbers[2]),
                    theirs_error=error_of(numbers[1], numbers[2]),
                    between=_between(*numbers),
                    is_exact=name in exact,
                    least_factor=least_factor,
                    drawn=(),
                    floor=0.0,
                )
            )
    return found


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that torch compares: floats of 8 bits have no order in it, and bfloat16 holds each of their numbers."""
    return tensor.to(torch.bfloat16) if tensor.dtype.itemsize == 1 and tensor.is_floating_point() else tensor


def _between(ours: torch.Tensor, theirs: torch.Tensor, truth: torch.Tensor) -> Error:
    """Return the fused model's error against the original's; numbers that the original alone has lost are no mismatch.

    In float16 an op of the original may overflow where a kernel, which computes in float32, does not. The oracle says who is
    right: where it has a finite number, the fused model's must be as near to it as the original's are elsewhere. Where the
    original is the oracle, nobody can be asked.
    """
    found = error_of(ours, theirs)
    if not found.nonfinite:
        return found
    largest = error_of(theirs, truth).max_abs
    cleared = sum(_cleared(one, largest) for one in pieces((ours, theirs, truth)))
    return replace(found, nonfinite=found.nonfinite - cleared)


def _cleared(piece: Sequence[torch.Tensor], largest: float) -> int:
    """Count elements that are not finite in the original, are another value in the fused model, and are the oracle's there."""
    mine, eagers, true = (one.detach().to(torch.float64) for one in piece)
    rounded = piece[2].detach().to(piece[0].dtype).to(torch.float64)
    differ = (mine != eagers) & ~(mine.isnan() & eagers.isnan()) & ~eagers.isfinite()
    allowed = MODEL_FACTOR * largest + _UNITS * unit_of(piece[0].dtype) * true.abs()
    near = mine.isfinite() & true.isfinite() & ((mine - true).abs() <= allowed)
    return int((differ & (near | (mine.isnan() & rounded.isnan()) | (mine.isinf() & (mine == rounded)))).sum())


def _are_within(outputs: Sequence[_Output], oracle_name: str, tolerance: Tolerance | None) -> bool:
    """Whether every output keeps to its limit: eager's own error, or the user's tolerance where the output has one."""
    return all(
        output.overrun(oracle_name) <= 1
        if tolerance is None or output.is_exact
        else is_inside(output.ours, output.truth, tolerance)
        for output in outputs
    )


def _limit(worst: _Output, oracle_name: str, tolerance: Tolerance | None) -> str:
    """Say in words how far the worst output may be off."""
    if tolerance is not None:
        return str(tolerance)
    if oracle_name == "eager":
        units = f"8 units in the last place of {str(worst.ours.dtype).removeprefix('torch.')}"
        drawn = f", or {worst.factor:.2g} × what {len(worst.drawn)} other ways to round eager's ops change" if worst.drawn else ""
        return f"‖fused − eager‖ / ‖eager‖ ≤ {8 * unit_of(worst.ours.dtype):.2g} ({units}{drawn})"
    factor = worst.factor
    few = "" if factor == worst.least_factor else f"; {worst.ours.numel()} numbers say little of it"
    few = "; eager has no digit right" if worst.has_no_digit else few
    few += f", and {worst.floor:.2g} is rounding alone" if worst.has_no_digit and worst.floor else ""
    few += f"; with {len(worst.drawn)} other ways to round, eager's is {worst.own:.2g}" if worst.drawn else ""
    return f"relative error against the oracle ≤ {factor:.2g} × eager's own (or one unit in the last place{few})"


def _of_other_shapes(names: Sequence[str], oracle_name: str) -> ModelCheck:
    """A check that failed because outputs have other shapes than eager's: no error says how far they are off."""
    return ModelCheck(
        oracle=oracle_name,
        outputs=tuple(names),
        fused_rel_l2=math.inf,
        eager_rel_l2=0.0,
        fused_max_abs=math.inf,
        eager_max_abs=0.0,
        fused_vs_eager_max_abs=math.inf,
        cosine=0.0,
        argmax_agreement=None,
        nonfinite_mismatches=0,
        limit="the shapes of eager's outputs, which a model that draws random numbers may not keep to itself",
        is_passed=False,
    )


def _agreement(one: torch.Tensor, other: torch.Tensor) -> tuple[float, float]:
    """Return the shares of positions with the same likeliest token, and with the same five likeliest in any order.

    Args:
        one: logits ``[..., vocabulary]``.
        other: logits of the same shape.
    """
    token = (one.argmax(-1) == other.argmax(-1)).double().mean()
    return float(token), float((_five(one) == _five(other)).all(-1).double().mean())


def _five(logits: torch.Tensor) -> torch.Tensor:
    return logits.topk(5, dim=-1).indices.sort(dim=-1).values
