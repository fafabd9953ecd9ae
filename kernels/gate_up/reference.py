"""The first half of a gated feed-forward layer."""

from __future__ import annotations

import torch


def reference_llama(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    gate, up = torch.nn.functional.linear(x, weight[0]), torch.nn.functional.linear(x, weight[1])
    return torch.nn.functional.silu(gate) * up
