"""RMSNorm and a linear layer; model families differ in where the norm's weight is applied, and in which dtype."""

from __future__ import annotations

import torch


def reference_llama(x: torch.Tensor, norm_weight: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6) -> torch.Tensor:
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return torch.nn.functional.linear(norm_weight * wide.to(x.dtype), weight)


def reference_gemma(x: torch.Tensor, norm_weight: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6) -> torch.Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return torch.nn.functional.linear((wide * (1.0 + norm_weight.float())).type_as(x), weight)
