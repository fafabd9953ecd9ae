"""QuickGELU: the sigmoid approximation of GELU, as CLIP writes it."""

from __future__ import annotations

import torch


def reference_sigmoid(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)
