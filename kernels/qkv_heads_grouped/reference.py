"""Bias add, split and heads before the sequence where several query heads share one key and one value head.

Written for four query heads to a key head; what is compared with a model says nothing of how many there are.
"""

from __future__ import annotations

import torch


def reference_split(packed: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """packed: (batch, seq, 6, key heads, dim), two thirds of it queries; each result: (batch, heads, seq, dim), contiguous."""
    batch, seq, shares, heads, dim = packed.shape
    width = heads * dim
    projected = packed.reshape(batch, seq, shares * width) + bias.reshape(shares * width)
    parts = projected.split([4 * width, width, width], dim=-1)
    query, key, value = (part.unflatten(-1, (-1, dim)).transpose(1, 2) for part in parts)
    return query.contiguous(), key.contiguous(), value.contiguous()


def reference_views(packed: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, seq, shares, heads, dim = packed.shape
    everything = (packed + bias).reshape(batch, seq, shares * heads, dim).transpose(1, 2)
    query, key, value = everything.split([4 * heads, heads, heads], dim=1)
    return query.contiguous(), key.contiguous(), value.contiguous()
