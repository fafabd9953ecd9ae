"""Residual add, then RMSNorm; the sum goes on as the next residual."""

from __future__ import annotations

import torch


def reference_llama(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + residual
    wide = total.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(variance + eps)
    return total, weight * wide.to(total.dtype)


def reference_builtin(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + residual
    return total, torch.nn.functional.rms_norm(total, (total.shape[-1],), weight, eps)
