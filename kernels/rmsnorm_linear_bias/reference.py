"""RMSNorm and the merged query, key and value projection of Qwen2, which has a bias."""

from __future__ import annotations

import torch


def reference_llama(
    x: torch.Tensor, norm_weight: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, eps: float = 1e-6
) -> torch.Tensor:
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return torch.nn.functional.linear(norm_weight * wide.to(x.dtype), weight, bias)
