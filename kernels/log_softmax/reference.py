"""Log-softmax over the last dim: the built-in and the formula."""

from __future__ import annotations

import torch


def reference_builtin(x: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(x, dim=-1)


def reference_written_out(x: torch.Tensor) -> torch.Tensor:
    shifted = x - x.amax(-1, keepdim=True)
    return shifted - torch.log(torch.exp(shifted).sum(-1, keepdim=True))
