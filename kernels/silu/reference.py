"""SiLU, also called swish: the built-in and the formula."""

from __future__ import annotations

import torch


def reference_builtin(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(x)


def reference_written_out(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)
