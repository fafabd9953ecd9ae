"""RMSNorm and the first half of a gated feed-forward layer."""

from __future__ import annotations

import torch


def reference_llama(x: torch.Tensor, norm_weight: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6) -> torch.Tensor:
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    normed = norm_weight * wide.to(x.dtype)
    gate, up = torch.nn.functional.linear(normed, weight[0]), torch.nn.functional.linear(normed, weight[1])
    return torch.nn.functional.silu(gate) * up
