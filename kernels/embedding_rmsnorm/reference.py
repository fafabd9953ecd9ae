"""Embedding and the first block's RMSNorm: the rows themselves start the residual stream, as in Llama."""

from __future__ import annotations

import torch


def reference_llama(
    table: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.nn.functional.embedding(ids, table)
    wide = rows.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return rows, weight * wide.to(rows.dtype)


def reference_builtin(
    table: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.nn.functional.embedding(ids, table)
    return rows, torch.nn.functional.rms_norm(rows, (rows.shape[-1],), weight, eps)
