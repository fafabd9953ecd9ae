"""A model with attention that makes its mask and repeats its KV heads as transformers does while it is traced."""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

BATCH, LENGTH, HEADS, KV_HEADS, WIDTH = 2, 24, 4, 2, 8


def places(x):
    every = torch.arange(x.shape[1], device=x.device)
    return every[None, None, :, None], every[None, None, None, :]


def causal(x):
    queries, keys = places(x)
    return (keys <= queries).expand(x.shape[0], -1, -1, -1)


def windowed(x):
    queries, keys = places(x)
    return (keys <= queries) & (keys > queries - 5)


def of_input(x):
    return causal(x) & (x[:, None, None, :, 0] > -9)


def written(x):
    mask = causal(x).clone()
    mask[..., 0, 1] = True
    return mask


def additive(x):
    return torch.zeros((), dtype=x.dtype).masked_fill(~causal(x), torch.finfo(x.dtype).min)


def open_to_all(x):
    queries, keys = places(x)
    return (queries >= 0) & (keys >= 0)


def alternating(x):
    return windowed(x), causal(x)


MASKS = {one.__name__: one for one in (causal, windowed, of_input, written, additive, open_to_all, alternating)}


class Attends(nn.Module):
    """Layers of attention with a residual."""

    def __init__(self, mask="causal", *, layers=2, kv_heads=KV_HEADS, dropout=0.0):
        super().__init__()
        self.mask, self.kv_heads, self.dropout = MASKS[mask], kv_heads, dropout
        self.inner = nn.ModuleList(nn.Linear(HEADS * WIDTH, (HEADS + 2 * kv_heads) * WIDTH) for _ in range(layers))
        self.outer = nn.ModuleList(nn.Linear(HEADS * WIDTH, HEADS * WIDTH) for _ in range(layers))

    def forward(self, x):
        made = self.mask(x)
        masks = itertools.cycle(made if isinstance(made, tuple) else (made,))
        for inner, outer, mask in zip(self.inner, self.outer, masks, strict=False):
            whole = inner(x).view(*x.shape[:2], -1, WIDTH).transpose(1, 2)
            q, k, v = whole.split([HEADS, self.kv_heads, self.kv_heads], dim=1)
            k, v = (self.repeated(one) for one in (k, v))
            out = scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=self.dropout, scale=0.3)
            x = x + outer(out.transpose(1, 2).reshape(x.shape))
        return x

    def repeated(self, heads):
        times = HEADS // self.kv_heads
        if times == 1:
            return heads
        batch, count, length, width = heads.shape
        return heads[:, :, None, :, :].expand(batch, count, times, length, width).reshape(batch, count * times, length, width)


def rows(seed=1):
    return torch.randn(BATCH, LENGTH, HEADS * WIDTH, generator=torch.Generator().manual_seed(seed))
