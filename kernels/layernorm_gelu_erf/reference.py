"""LayerNorm, then exact GELU."""

from __future__ import annotations

import torch


def reference_builtin(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, eps: float = 1e-5) -> torch.Tensor:
    y = torch.nn.functional.layer_norm(x, (x.shape[-1],), weight, bias, eps)
    return torch.nn.functional.gelu(y)
