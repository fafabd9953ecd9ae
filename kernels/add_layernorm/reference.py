"""Residual add, then LayerNorm; a pre-norm model (GPT) needs the sum again, a post-norm one (BERT) does not."""

from __future__ import annotations

import torch


def reference_pre_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, eps: float = 1e-5
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + residual
    return total, torch.nn.functional.layer_norm(total, (total.shape[-1],), weight, bias, eps)


def reference_post_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, eps: float = 1e-5
) -> torch.Tensor:
    total = x + residual
    return torch.nn.functional.layer_norm(total, (total.shape[-1],), weight, bias, eps)
