"""BERT's embeddings: three lookups, two adds and a LayerNorm; the adds come in two orders."""

from __future__ import annotations

import torch
from torch.nn.functional import embedding, layer_norm


def reference_type_first(
    words: torch.Tensor,
    types: torch.Tensor,
    positions: torch.Tensor,
    ids: torch.Tensor,
    type_ids: torch.Tensor,
    position_ids: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    eps: float = 1e-12,
) -> torch.Tensor:
    rows = embedding(ids, words) + embedding(type_ids, types)
    rows = rows + embedding(position_ids, positions)
    return layer_norm(rows, (rows.shape[-1],), weight, bias, eps)


def reference_position_first(
    words: torch.Tensor,
    types: torch.Tensor,
    positions: torch.Tensor,
    ids: torch.Tensor,
    type_ids: torch.Tensor,
    position_ids: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    eps: float = 1e-12,
) -> torch.Tensor:
    rows = embedding(ids, words) + embedding(position_ids, positions)
    rows = rows + embedding(type_ids, types)
    return layer_norm(rows, (rows.shape[-1],), weight, bias, eps)
