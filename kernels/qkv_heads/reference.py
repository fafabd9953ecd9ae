"""From a packed projection to attention: bias add, split into query, key and value, heads moved before the sequence."""

from __future__ import annotations

import torch


def reference_split(packed: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """packed: (batch, seq, 3, heads, dim); bias: (3, heads, dim); each result: (batch, heads, seq, dim), contiguous."""
    batch, seq, _, heads, dim = packed.shape
    width = heads * dim
    projected = packed.reshape(batch, seq, 3 * width) + bias.reshape(3 * width)
    query, key, value = (part.view(batch, seq, heads, dim).transpose(1, 2) for part in projected.split(width, dim=-1))
    return query.contiguous(), key.contiguous(), value.contiguous()


def reference_unbind(packed: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query, key, value = (packed + bias).permute(2, 0, 3, 1, 4).unbind(0)
    return query.contiguous(), key.contiguous(), value.contiguous()
