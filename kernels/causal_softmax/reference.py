"""Scores of causal attention: scaled, hidden above the diagonal, softmax over the keys; the ways in which masks are written."""

from __future__ import annotations

import torch


def reference_triu(x: torch.Tensor, *, scale: float = 0.08838834764831845) -> torch.Tensor:
    queries, keys = x.shape[-2:]
    hidden = torch.ones(queries, keys, dtype=torch.bool, device=x.device).triu(keys - queries + 1)
    return torch.softmax((x * scale).masked_fill(hidden, float("-inf")), -1)


def reference_masked_then_scaled(x: torch.Tensor, *, scale: float = 0.08838834764831845) -> torch.Tensor:
    queries, keys = x.shape[-2:]
    seen = torch.ones(queries, keys, dtype=torch.bool, device=x.device).tril(keys - queries)
    return torch.softmax(torch.where(seen, x, float("-inf")) * scale, -1)


def reference_compared_places(x: torch.Tensor, *, scale: float = 0.08838834764831845) -> torch.Tensor:
    queries, keys = x.shape[-2:]
    place = torch.arange(keys, device=x.device)
    seen = place <= torch.arange(keys - queries, keys, device=x.device)[:, None]
    return torch.softmax((x * scale).masked_fill(~seen, float("-inf")), -1)


def reference_lowest(x: torch.Tensor, *, scale: float = 0.08838834764831845) -> torch.Tensor:
    queries, keys = x.shape[-2:]
    hidden = torch.ones(queries, keys, dtype=torch.bool, device=x.device).triu(keys - queries + 1)
    return torch.softmax((x * scale).masked_fill(hidden, torch.finfo(x.dtype).min), -1)
