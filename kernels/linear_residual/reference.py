"""An output or down projection and the residual stream that it is added to."""

from __future__ import annotations

import torch


def reference_written_out(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    return residual + torch.nn.functional.linear(x, weight)
