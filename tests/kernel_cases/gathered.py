"""Functions that read where a tensor says, with inputs, as Programs that the tests of every backend run."""

from __future__ import annotations

import functools

import torch
from torch.nn import functional as f

from tests.kernel_cases.lowered import lower_function


def _floats(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _ids(below, *shape, dtype=torch.int64):
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(5)).to(dtype)


def _planted(ids, *values):
    ids.view(-1)[: len(values)] = torch.tensor(values)
    return ids


def _places(below, count):
    return torch.randperm(below, generator=torch.Generator().manual_seed(6))[:count]


def _turned(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def _rope_cache(q, k, v, cos, sin, at, keys, values):
    """Heads outside the sequence in the results, inside it where they are read."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return _turned(q, cos, sin), keys.index_copy_(2, at, _turned(k, cos, sin)), values.index_copy_(2, at, v)


def _rope_inputs(batch, heads, kv_heads, tokens, dim, room, dtype=torch.float32):
    heads_of = [_floats(batch, tokens, count, dim, dtype=dtype, seed=count) for count in (heads, kv_heads, kv_heads)]
    tables = [_floats(1, 1, tokens, dim, dtype=dtype, seed=seed) for seed in (7, 8)]
    caches = [torch.zeros(batch, kv_heads, room, dim, dtype=dtype) for _ in range(2)]
    return *heads_of, *tables, _places(room, tokens), *caches


def _joint(text, image, weight, cos, sin):
    """Queries of text and image, normed apart and turned as one sequence (Flux): a row of one lies outside the other."""
    width = (text.shape[-1],)
    both = torch.cat([f.rms_norm(text, width, weight[0]), f.rms_norm(image, width, weight[1])], 1)
    even, odd = both.unflatten(-1, (-1, 2)).unbind(-1)
    return both * cos + torch.stack([-odd, even], -1).flatten(-2) * sin


def _functions():
    half, brain = torch.float16, torch.bfloat16
    norm = (_floats(40, seed=8), _floats(40, seed=9))
    return {
        "embedding": (lambda w, i: f.embedding(i, w) * 2, _floats(19, 40), _ids(19, 3, 5)),
        "embedding-bfloat16": (
            lambda w, i: f.embedding(i, w) * 2,
            _floats(19, 40, dtype=brain),
            _ids(19, 3, 5, dtype=torch.int32),
        ),
        "embedding_odd": (lambda w, i: f.embedding(i, w) * 2, _floats(19, 33, dtype=half), _ids(19, 7)),
        "embedding_one_token": (lambda w, i: f.embedding(i, w) * 2, _floats(19, 40), _ids(19, 1, 1)),
        "embedding_layernorm_one_token": (
            lambda w, g, b, i: f.layer_norm(f.embedding(i, w), (40,), g, b),
            _floats(19, 40),
            *norm,
            _ids(19, 1, 1),
        ),
        "cross_entropy_one_row": (lambda x, t: f.cross_entropy(x, t, reduction="none"), _floats(1, 40), _ids(40, 1)),
        "embedding_one_column": (lambda w, i: f.embedding(i, w) * 2, _floats(19, 1), _ids(19, 5)),
        "embedding_transposed": (lambda w, i: f.embedding(i, w.t()) * 2, _floats(40, 19), _ids(19, 9)),
        "embedding_add": (
            lambda w, p, i, q: f.embedding(i, w) + f.embedding(q, p),
            _floats(19, 40),
            _floats(9, 40),
            _ids(19, 3, 8),
            _ids(9, 1, 8),
        ),
        "embedding_arange": (
            lambda w, p, i: f.embedding(i, w) + f.embedding(torch.arange(8), p),
            _floats(19, 40),
            _floats(9, 40),
            _ids(19, 3, 8),
        ),
        "embedding_layernorm": (
            lambda w, g, b, i: f.layer_norm(f.embedding(i, w), (40,), g, b),
            _floats(19, 40, dtype=brain),
            *(t.to(brain) for t in norm),
            _ids(19, 3, 5),
        ),
        "looped_embedding_rmsnorm": (lambda w, i: f.rms_norm(f.embedding(i, w), (16400,)), _floats(3, 16400), _ids(3, 2)),
        "index_negative": (lambda w, i: w[i] * 2, _floats(19, 40), _planted(_ids(19, 9), -1, -19, 18)),
        "index_columns": (lambda w, i: w[:, i] * 2, _floats(6, 19), _ids(19, 3, 5)),
        "index_flat": (lambda w, i: w[i] * 2, _floats(19), _ids(19, 50)),
        "gather": (lambda w, i: w.gather(1, i) * 2, _floats(6, 19), _ids(19, 6, 7)),
        "gather_rows": (lambda w, i: w.gather(0, i) * 2, _floats(19, 40), _ids(19, 7, 40)),
        "gather_integers": (lambda w, i: w.gather(1, i) + 1, _ids(90, 6, 19), _planted(_ids(19, 6, 7), 18)),
        "cross_entropy": (
            lambda x, t: f.cross_entropy(x * 4, t, reduction="none"),
            _floats(9, 40),
            _planted(_ids(40, 9), -100, 39, 0),
        ),
        "looped_cross_entropy": (
            lambda x, t: f.cross_entropy(x, t, reduction="none"),
            _floats(3, 16400, dtype=half),
            _planted(_ids(16400, 3), -100),
        ),
        "nll": (lambda x, t: f.nll_loss(x, t, reduction="none") * 2, _floats(9, 40), _planted(_ids(40, 9), -100)),
        "group_norm": (
            lambda x, w, b: f.silu(f.group_norm(x, 3, w, b)),
            _floats(2, 6, 4, 8, dtype=brain),
            _floats(6, dtype=brain),
            _floats(6, dtype=brain),
        ),
        "group_norm_odd": (lambda x, w, b: f.group_norm(x, 3, w, b), _floats(2, 6, 3, 5), _floats(6), _floats(6)),
        "group_norm_narrow": (lambda x, w, b: f.group_norm(x, 2, w, b), _floats(2, 8, 2, 1), _floats(8), _floats(8)),
        "index_copy": (lambda c, i, x: c.index_copy_(1, i, x * 2), _floats(3, 9, 16), _places(9, 5), _floats(3, 5, 16)),
        "index_copy_bfloat16": (
            lambda c, i, x: c.index_copy_(0, i, x),
            _floats(9, 33, dtype=brain),
            _places(9, 4).int(),
            _floats(4, 33, dtype=brain),
        ),
        "index_copy_one": (lambda c, i, x: c.index_copy_(2, i, x), _floats(1, 2, 7, 40), _ids(7, 1), _floats(1, 2, 1, 40)),
        "index_copy_columns": (lambda c, i, x: c.index_copy_(1, i, x * 2), _floats(6, 19), _places(19, 8), _floats(6, 8)),
        "index_copy_normed": (
            lambda c, i, x: c.index_copy_(0, i, f.rms_norm(x, (40,))),
            _floats(19, 40, dtype=half),
            _places(19, 5),
            _floats(5, 40, dtype=half),
        ),
        "index_copy_sums": (lambda c, i, x: c.index_copy_(0, i, x.sum(-1)), _floats(19), _places(19, 5), _floats(5, 40)),
        "looped_index_copy": (
            lambda c, i, x: c.index_copy_(0, i, f.rms_norm(x, (16400,))),
            _floats(4, 16400),
            _places(4, 2),
            _floats(2, 16400),
        ),
        "norms_in_a_cat": (
            lambda t, i, w: torch.cat([f.layer_norm(t, (40,), w), f.layer_norm(i, (40,))], 1) * 2,
            _floats(2, 3, 40, dtype=brain),
            _floats(2, 5, 40, dtype=brain, seed=1),
            _floats(40, dtype=brain, seed=2),
        ),
        "norms_in_a_cat_turned": (
            _joint,
            _floats(2, 3, 4, 16),
            _floats(2, 5, 4, 16, seed=1),
            _floats(2, 16, seed=2),
            _floats(1, 8, 1, 16, seed=3),
            _floats(1, 8, 1, 16, seed=4),
        ),
        "looped_norms_in_a_cat": (
            lambda t, i: torch.cat([f.softmax(t, -1), f.rms_norm(i, (16400,))], 0) + 1,
            _floats(1, 16400),
            _floats(2, 16400, seed=1),
        ),
        "rope_cache": (_rope_cache, *_rope_inputs(2, 6, 2, 5, 16, 9)),
        "rope_cache_bfloat16": (_rope_cache, *_rope_inputs(1, 4, 1, 1, 32, 9, brain)),
        "rope_cache_alike": (_rope_cache, *_rope_inputs(2, 3, 3, 3, 10, 7, half)),
        "group_norm_split": (
            lambda x, w, b: f.group_norm(x, 2, w, b),
            _floats(2, 16, 7, 7, dtype=half),
            _floats(16, dtype=half),
            _floats(16, dtype=half),
        ),
        "group_norm_table": (lambda x, t, i: f.group_norm(x, 2, t[i]), _floats(2, 8, 4, 4), _floats(5), _ids(5, 8)),
        # Channels that tiles of 2,048 columns lie inside of: their weights are one number for a tile.
        "looped_group_norm_whole": (
            lambda x, w, b: f.group_norm(x, 2, w, b),
            _floats(2, 18, 32, 64, dtype=brain),
            _floats(18, dtype=brain),
            _floats(18, dtype=brain),
        ),
        # Side by side, with channels of 2,048 and of 1,024 columns: one tile must lie inside of both.
        "looped_group_norms": (
            lambda x, y, w: (f.group_norm(x, 2, w), f.group_norm(y, 1, w)),
            _floats(2, 32, 32, 64),
            _floats(2, 32, 16, 64),
            _floats(32),
        ),
        # A channel's weight is looked up in a table.
        "looped_group_norm_table": (
            lambda x, t, i: f.group_norm(x, 1, t[i]),
            _floats(2, 9, 32, 64),
            _floats(5),
            _ids(5, 9),
        ),
        "looped_group_norm_one": (lambda x, w: f.group_norm(x, 1, w), _floats(2, 9, 32, 64), _floats(9)),
        "looped_group_norm": (lambda x, w: f.group_norm(x, 2, w), _floats(1, 10, 52, 64, dtype=half), _floats(10, dtype=half)),
    }


def _key(name):
    return name if name.startswith("looped") else f"gathered_{name}"


NAMES = {_key(name): name for name in _functions()}
"""Names of the cases, and of their functions."""


@functools.cache
def gathered(name):
    """Trace one case; return (Program, input tensors in the order of its operands)."""
    function, *inputs = _functions()[NAMES[name]]
    lowered, ops = lower_function(function, *inputs)
    at = [op.index for op in ops if op.role not in ("op", "output")]
    return lowered.program, [inputs[at.index(root)].flatten() for root in lowered.inputs]
