"""What an output holds at masked places, apart from its other numbers.

``finfo.min`` and -1e9 are no results: the mask's author chose them. In the norm of an output they hide every error of the numbers
beside them. A copy of the model in a wider dtype fills with that dtype's least number, and eager's dtype cannot hold it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fusion_advisor.verify.pieces import pieces

_LEAST, _STEP = 1e3, 1e3
"""A fill is at least 1,000, and at least 1,000 times any number beside it. Logits stay below 100."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """An output of the fused model, of eager and of the oracle.

    Attributes:
        whole: all three.
        numbers: all three with zeros in place of fills.
        fills: all three where eager holds a fill, flat; None where it holds none.
    """

    whole: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    numbers: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    fills: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None


def parted(ours: torch.Tensor, theirs: torch.Tensor, truth: torch.Tensor) -> Parts:
    """Set an output's fill apart. Eager's number stands for a truth that its dtype has no number for.

    Args:
        ours: of the fused model.
        theirs: of the original model, the same shape.
        truth: of the oracle, the same shape.
    """
    truth = _in_reach(theirs, truth)
    whole = (ours, theirs, truth)
    size = _fill(theirs)
    if size is None:
        return Parts(whole=whole, numbers=whole, fills=None)
    at = theirs.detach().abs() == size
    one, other, true = (tensor.detach().masked_fill(at, 0) for tensor in whole)
    mine, eager, wide = (tensor.detach()[at] for tensor in whole)
    return Parts(whole=whole, numbers=(one, other, true), fills=(mine, eager, wide))


def _in_reach(theirs: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Return the truth with eager's finite number wherever eager's dtype holds no number as large as the truth."""
    most = torch.finfo(theirs.dtype).max
    if not truth.is_floating_point() or torch.finfo(truth.dtype).max <= most or truth.numel() == 0:
        return truth
    if not any(bool((one.detach().abs() > most).any()) for (one,) in pieces((truth,))):
        return truth
    return torch.where((truth.detach().abs() > most) & theirs.isfinite(), theirs.to(truth.dtype), truth)


def _fill(theirs: torch.Tensor) -> float | None:
    """Return the magnitude of an output's fill; None where no number stands out."""
    largest = max((_largest(one, float("inf")) for (one,) in pieces((theirs,))), default=0.0)
    if largest < _LEAST:
        return None
    others = max(_largest(one, largest) for (one,) in pieces((theirs,)))
    return largest if 0 < others * _STEP < largest else None


def _largest(values: torch.Tensor, below: float) -> float:
    """Return the largest magnitude below another; 0 where there is none."""
    size = values.detach().abs()
    return float(size.masked_fill(~(size < below), 0).max()) if size.numel() else 0.0
