"""Embedding, then LayerNorm: BLOOM's word_embeddings_layernorm."""

from __future__ import annotations

import torch


def reference_builtin(
    table: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, eps: float = 1e-5
) -> torch.Tensor:
    rows = torch.nn.functional.embedding(ids, table)
    return torch.nn.functional.layer_norm(rows, (rows.shape[-1],), weight, bias, eps)
