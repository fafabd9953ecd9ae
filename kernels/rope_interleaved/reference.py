"""Rotary embedding over neighbouring pairs, as GPT-J and its heirs write it: (x0, x1) becomes (-x1, x0)."""

from __future__ import annotations

import torch


def reference_stack(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    rotated = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    return x * cos + rotated * sin


def reference_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return x * cos + torch.stack((-odd, even), dim=-1).reshape(x.shape) * sin
