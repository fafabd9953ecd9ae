"""SwiGLU: the built-in silu and the sigmoid written out."""

from __future__ import annotations

import torch


def reference_builtin(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(gate) * up


def reference_written_out(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return gate * torch.sigmoid(gate) * up
