"""Dropout, residual add and LayerNorm: a post-norm block (BERT) goes on with the normed rows, a pre-norm one with both."""

from __future__ import annotations

import torch

from fusion_advisor.library.philox_dropout import seeded_dropout


def reference_pre_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    seed: torch.Tensor,
    *,
    p: float = 0.1,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor]:
    total = residual + seeded_dropout(x, seed, p)
    return total, torch.nn.functional.layer_norm(total, (total.shape[-1],), weight, bias, eps)


def baseline_pre_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    seed: torch.Tensor,  # noqa: ARG001
    *,
    p: float = 0.1,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor]:
    total = residual + torch.nn.functional.dropout(x, p, training=True)
    return total, torch.nn.functional.layer_norm(total, (total.shape[-1],), weight, bias, eps)
