"""Dropout, residual add and RMSNorm; the sum goes on as the next residual."""

from __future__ import annotations

import torch

from fusion_advisor.library.philox_dropout import seeded_dropout


def reference_builtin(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, seed: torch.Tensor, *, p: float = 0.1, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    total = residual + seeded_dropout(x, seed, p)
    return total, torch.nn.functional.rms_norm(total, (total.shape[-1],), weight, eps)


def baseline_builtin(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    seed: torch.Tensor,  # noqa: ARG001
    *,
    p: float = 0.1,
    eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor]:
    total = residual + torch.nn.functional.dropout(x, p, training=True)
    return total, torch.nn.functional.rms_norm(total, (total.shape[-1],), weight, eps)
