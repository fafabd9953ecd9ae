"""GELU with erf: the built-in and the formula written out."""

from __future__ import annotations

import math

import torch


def reference_builtin(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x)


def reference_written_out(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))
