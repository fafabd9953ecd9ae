"""Functions that read or write where a tensor says, with positions that eager takes and others that it refuses."""

from __future__ import annotations

import torch
from torch.nn import functional as f

TABLE = torch.randn(19, 8, generator=torch.Generator().manual_seed(0))
WIDE = TABLE.t().contiguous()
NUMBERS = torch.arange(19 * 8).reshape(19, 8)


def _row(ids):
    return ids[:, None].expand(-1, 8).contiguous()


def _columns(ids):
    return ids[None].expand(8, -1).contiguous()


CASES = {
    "embedding": (lambda w, i: f.embedding(i, w) * 2, TABLE, lambda i: i),
    "embedding_padding": (lambda w, i: f.embedding(i, w, padding_idx=0) * 2, TABLE, lambda i: i),
    "embedding_int32": (lambda w, i: f.embedding(i, w) * 2, TABLE, lambda i: i.int()),
    "embedding_half": (lambda w, i: f.embedding(i, w) * 2, TABLE.bfloat16(), lambda i: i),
    "embedding_numbers": (lambda w, i: f.embedding(i, w) + 1, NUMBERS, lambda i: i),
    "embedding_computed": (lambda w, i: f.embedding(i + 5, w) * 2, TABLE, lambda i: i - 5),
    "embedding_norm": (lambda w, i: f.rms_norm(f.embedding(i, w), (8,)), TABLE, lambda i: i),
    "embedding_cat": (lambda w, i: torch.cat((f.embedding(i + 5, w), w[:5]), 0) * 2, TABLE, lambda i: i - 5),
    "embedding_bytes": (lambda w, i: f.embedding(i, w) != 0, NUMBERS.to(torch.uint8), lambda i: i),
    "index_select": (lambda w, i: w.index_select(0, i) * 2, TABLE, lambda i: i),
    "index_select_numbers": (lambda w, i: w.index_select(0, i) + 1, NUMBERS, lambda i: i),
    "index_select_columns": (lambda w, i: w.index_select(1, i) * 2, WIDE, lambda i: i),
    "gather_rows": (lambda w, i: w.gather(0, i) * 2, TABLE, _row),
    "gather_columns": (lambda w, i: w.gather(1, i) * 2, WIDE, _columns),
    "gather_numbers": (lambda w, i: w.gather(1, i) + 1, NUMBERS.t().contiguous(), _columns),
    "index": (lambda w, i: w[i] * 2, TABLE, lambda i: i),
    "index_numbers": (lambda w, i: w[i] + 1, NUMBERS, lambda i: i),
    "index_columns": (lambda w, i: w[:, i] * 2, WIDE, lambda i: i),
    "nll": (lambda w, i: f.nll_loss(w, i, reduction="none") * 2, torch.randn(5, 19), lambda i: i),
    "cross_entropy": (lambda w, i: f.cross_entropy(w, i, reduction="none") * 2, torch.randn(5, 19), lambda i: i),
    "index_copy": (lambda c, i, x: c.index_copy_(0, i, x * 2), torch.zeros(19, 8), lambda i: i, torch.randn(5, 8)),
    "index_copy_columns": (lambda c, i, x: c.index_copy_(1, i, x * 2), torch.zeros(8, 19), lambda i: i, torch.randn(8, 5)),
}
"""Name → function, table, how five positions below 19 become its index, more arguments."""
RIGHT = torch.tensor([3, 0, 18, 7, 5])
WRONG = {"end": 19, "last": -1, "first": -19, "before": -20, "ignored": -100, "far": 2**31 - 1}


def inputs(name, position=None):
    """Return a case's arguments, with its third position put in."""
    _, table, as_index, *rest = CASES[name]
    ids = RIGHT.clone()
    if position is not None:
        ids[2] = position
    return [table.clone(), as_index(ids), *rest]


def answer(name, position):
    """What eager does: a tensor, or an exception."""
    try:
        return CASES[name][0](*inputs(name, position))
    except (IndexError, RuntimeError) as error:
        return error
