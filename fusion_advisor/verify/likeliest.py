"""Agreement of two models on the likeliest tokens."""

from __future__ import annotations

import torch


def agreement(one: torch.Tensor, other: torch.Tensor) -> tuple[float, float]:
    """Return the shares of positions with the same likeliest token, and with the same five likeliest in any order.

    Args:
        one: logits ``[..., vocabulary]``.
        other: logits of the same shape.
    """
    token = (one.argmax(-1) == other.argmax(-1)).double().mean()
    return float(token), float((_five(one) == _five(other)).all(-1).double().mean())


def _five(logits: torch.Tensor) -> torch.Tensor:
    return logits.topk(5, dim=-1).indices.sort(dim=-1).values
