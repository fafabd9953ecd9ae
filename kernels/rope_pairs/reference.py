"""Rotary embedding over neighbouring pairs with tables that hold every angle once, as Llama's first code and Cohere write it."""

from __future__ import annotations

import torch


def reference_stack(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x: (batch, heads, seq, pairs, 2); cos, sin: (batch, 1, seq, pairs)."""
    even, odd = x[..., 0], x[..., 1]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)


def reference_repeated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """GPT-J's and Cohere's: every angle is doubled on the way, and no table of doubled angles is read."""
    whole = x.flatten(-2)
    rotated = torch.stack((-whole[..., 1::2], whole[..., ::2]), dim=-1).flatten(-2)
    turned = whole * cos.repeat_interleave(2, dim=-1) + rotated * sin.repeat_interleave(2, dim=-1)
    return turned.unflatten(-1, (-1, 2))
