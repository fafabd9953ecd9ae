"""Dropout on a block's result, then the residual add; what is dropped follows from the seed alone."""

from __future__ import annotations

import torch

from fusion_advisor.library.philox_dropout import seeded_dropout


def reference_seeded(x: torch.Tensor, residual: torch.Tensor, seed: torch.Tensor, *, p: float = 0.1) -> torch.Tensor:
    return residual + seeded_dropout(x, seed, p)


def baseline_seeded(x: torch.Tensor, residual: torch.Tensor, seed: torch.Tensor, *, p: float = 0.1) -> torch.Tensor:  # noqa: ARG001
    return residual + torch.nn.functional.dropout(x, p, training=True)
