"""RMSNorm over each head, then rotary embedding, as Qwen3 and Gemma 3 treat queries and keys."""

from __future__ import annotations

import torch


def reference_llama(
    x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, eps: float = 1e-6
) -> torch.Tensor:
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    y = (weight * wide.to(x.dtype)).transpose(1, 2)
    low = y[..., : y.shape[-1] // 2]
    high = y[..., y.shape[-1] // 2 :]
    return y * cos + torch.cat((-high, low), dim=-1) * sin


def reference_gemma(
    x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, eps: float = 1e-6
) -> torch.Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    y = (wide * (1.0 + weight.float())).type_as(x).transpose(1, 2)
    low = y[..., : y.shape[-1] // 2]
    high = y[..., y.shape[-1] // 2 :]
    return y * cos + torch.cat((-high, low), dim=-1) * sin
