"""Token embedding plus the first rows of a position table: a slice, or a lookup at 0, 1, 2 and so on."""

from __future__ import annotations

import torch


def reference_sliced(weight: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.embedding(ids, weight) + positions[: ids.shape[1]]


def reference_counted(weight: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    counted = torch.arange(ids.shape[1], device=ids.device)
    return torch.nn.functional.embedding(ids, weight) + torch.nn.functional.embedding(counted, positions)
