"""Models that read padding in every way that we could think of are refused, and look-alikes that do not are proved."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import (
    adaptive_avg_pool1d,
    avg_pool1d,
    batch_norm,
    conv1d,
    embedding,
    gelu,
    interpolate,
    layer_norm,
    normalize,
    one_hot,
    pad,
    scaled_dot_product_attention,
)  # fmt: skip

from tests.fuse.dependence.padded_runs import mask_slots, opened, reason, worst

WIDTH = 8
X = {"args.0": ("batch", "seq", "")}
torch.manual_seed(0)
TABLE, SQUARE, POSITIONS = torch.randn(50, WIDTH), torch.randn(WIDTH, WIDTH), torch.randn(64, WIDTH)
KERNEL = torch.randn(WIDTH, WIDTH, 3)


def rows(sizes):
    numbers = torch.Generator().manual_seed(sizes["seq"])
    return (torch.randn(sizes["batch"], sizes["seq"], WIDTH, generator=numbers),)


def ids(sizes):
    numbers = torch.Generator().manual_seed(sizes["seq"])
    return (torch.randint(0, 50, (sizes["batch"], sizes["seq"]), generator=numbers),)


def masked(sizes):
    mask = torch.ones(sizes["batch"], sizes["seq"], dtype=torch.int64)
    mask[0, -1] = 0
    return (*rows(sizes), mask)


def images(sizes):
    numbers = torch.Generator().manual_seed(sizes["seq"])
    return (torch.randn(sizes["batch"], WIDTH, sizes["seq"], generator=numbers),)


INPUTS = {
    rows: X,
    ids: {"args.0": ("batch", "seq")},
    masked: {**X, "args.1": ("batch", "seq")},
    images: {"args.0": ("batch", "", "seq")},
}


def index(x, dim=1):
    return torch.arange(x.shape[dim])


def causal(x):
    return index(x)[None, :] <= index(x)[:, None]


def attend(x, mask=None, **options):
    return scaled_dot_product_attention(x, x, x, attn_mask=mask, **options)


def by_hand(x, scores):
    return torch.softmax(scores, -1) @ x


def rms(x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def causal_twice(x):
    y = rms(by_hand(x, scores(x) / 3 + torch.where(causal(x), 0.0, MINUS)))
    return by_hand(y, scores(y).masked_fill(~causal(x), MINUS))


def accumulate_in_buffer(x):
    out = torch.zeros_like(x)
    out[:, 0] = x[:, -1]
    return out + x


def scores(x):
    return x @ x.transpose(1, 2)


MINUS = float("-inf")
HOSTILE = {
    # name: (inputs, padded size, model, part of the reason)
    "mean over batch": (rows, "batch", lambda x: x - x.mean(0), "takes all of `batch` together"),
    "sum over batch": (rows, "batch", lambda x: x * x.sum(0), "takes all of `batch` together"),
    "mean over all": (rows, "batch", lambda x: x - x.mean(), "together"),
    "max over batch": (rows, "batch", lambda x: x / x.amax(0), "together"),
    "any over batch": (rows, "batch", lambda x: x * (x > 3).any(0), "together"),
    "variance over batch": (rows, "batch", lambda x: x / x.std(0), "together"),
    "batch norm by hand": (rows, "batch", lambda x: (x - x.mean((0, 1))) * torch.rsqrt(x.var((0, 1)) + 1), "together"),
    "batch norm of the batch": (images, "batch", lambda x: batch_norm(x, None, None, training=True), "together"),
    "last row": (rows, "batch", lambda x: x + x[-1], "counts a place from the end"),
    "last token": (rows, "seq", lambda x: x[:, -1] * 2, "counts a place from the end"),
    "last token by slice": (rows, "seq", lambda x: x * x[:, -1:], "counts a place from the end"),
    "last token by its size": (rows, "seq", lambda x: x * x[:, torch.full((1,), x.shape[1] - 1)], "for a number"),
    "last token by index": (rows, "seq", lambda x: x * x[:, torch.tensor([-1])], "may count a place from the end"),
    "token before the last": (rows, "seq", lambda x: x * x[:, -2][:, None], "counts a place from the end"),
    "flip batch": (rows, "batch", lambda x: x + x.flip(0), "moves elements"),
    "flip tokens": (rows, "seq", lambda x: x.flip(1), "moves elements"),
    "roll batch": (rows, "batch", lambda x: x.roll(1, 0), "moves elements"),
    "roll tokens": (rows, "seq", lambda x: x - x.roll(1, 1), "moves elements"),
    "roll of all": (rows, "seq", lambda x: x.roll(1), "moves elements"),
    "sum from the end": (rows, "seq", lambda x: x.flip(1).cumsum(1).flip(1), "moves elements"),
    "what is left": (rows, "seq", lambda x: x.sum(1, keepdim=True) - x.cumsum(1), "together"),
    "sum along flattened rows": (rows, "seq", lambda x: x.flatten(0, 1).cumsum(0).view(x.shape), "flattened"),
    "gram of the batch": (rows, "batch", lambda x: x.sum(1) @ x.sum(1).T @ x.sum(1), "sums over all of `batch`"),
    "gram of tokens": (rows, "seq", lambda x: scores(x) @ x, "sums over all of `seq`"),
    "gram of features": (rows, "seq", lambda x: x @ (x.transpose(1, 2) @ x), "sums over all of `seq`"),
    "einsum over tokens": (rows, "seq", lambda x: torch.einsum("bsd,bse->bde", x, x), "sums over all of `seq`"),
    "einsum over batch": (rows, "batch", lambda x: x * torch.einsum("bsd,bsd->sd", x, x), "sums over all of `batch`"),
    "matmul in place of a sum": (rows, "seq", lambda x: torch.ones(1, x.shape[1]) @ x, "sums over all of `seq`"),
    "trace": (rows, "seq", lambda x: x * torch.einsum("ij,ij->", torch.eye(x.shape[1]), torch.ones(x.shape[1], x.shape[1])),
              "sums over all of `seq`"),
    "sum of a diagonal": (rows, "seq", lambda x: x * torch.eye(x.shape[1]).sum(), "together"),
    "size as a number": (rows, "seq", lambda x: x * x.shape[1], "takes `seq` for a number"),
    "size under a root": (rows, "seq", lambda x: x / x.shape[1] ** 0.5, "takes `seq` for a number"),
    "batch as a number": (rows, "batch", lambda x: x + 1.0 / x.shape[0], "takes `batch` for a number"),
    "filled with a size": (rows, "seq", lambda x: x + torch.full((x.shape[1], 1), x.shape[1]), "takes `seq` for a number"),
    "distance from the end": (rows, "seq", lambda x: x * (x.shape[1] - index(x))[:, None], "takes `seq` for a number"),
    "counted from the end": (rows, "seq", lambda x: x * torch.arange(x.shape[1] - 1, -1, -1)[:, None], "for a number"),
    "relative place": (rows, "seq", lambda x: x * (index(x) / x.shape[1])[:, None], "for a number"),
    "positions counted from the end": (ids, "seq", lambda x: TABLE[x] + POSITIONS[-x.shape[1] :], "for a number"),
    "attends to all": (rows, "seq", attend, "without a mask"),
    "attends backwards": (rows, "seq", lambda x: attend(x, ~causal(x) | (index(x)[:, None] == index(x))), "may let padding"),
    "attends by the data": (rows, "seq", lambda x: attend(x, x @ x.transpose(1, 2) > 0), "may let padding through"),
    "causal or by the data": (rows, "seq", lambda x: attend(x, causal(x) | (scores(x) > 9)), "may let padding through"),
    "causal and one more": (rows, "seq", lambda x: attend(x, index(x)[None, :] <= index(x)[:, None] + 1), "may let padding"),
    "triangle and one more": (
        rows, "seq", lambda x: attend(x, torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(1)), "may let padding"),
    "causal with a small number": (
        rows, "seq", lambda x: attend(x, torch.where(causal(x), 0.0, -3.0)), "may let padding through"),
    "softmax over tokens": (rows, "seq", lambda x: x.softmax(1), "together"),
    "softmax over batch": (rows, "batch", lambda x: x.softmax(0), "together"),
    "softmax before the mask": (rows, "seq", lambda x: (scores(x).softmax(-1) * causal(x)) @ x, "together"),
    "anti-causal softmax": (
        rows, "seq", lambda x: by_hand(x, scores(x).masked_fill(causal(x) & (index(x)[None] < index(x)[:, None]), MINUS)),
        "together"),
    "softmax over queries": (
        rows, "seq", lambda x: scores(x).masked_fill(~causal(x), MINUS).softmax(-2).nan_to_num() @ x, "together"),
    "divided by zeros ahead of a product": (
        rows, "seq", lambda x: (scores(x) * causal(x)) @ (1 / (x.round() + 0.0)), "may hold an infinity"),
    "counts tokens of a kind": (ids, "seq", lambda x: TABLE[x] * (x < 25).sum(), "together"),
    "counts zeros of a mask": (masked, "seq", lambda x, mask: x * (mask == 0).sum(1)[:, None, None], "together"),
    "counts tokens by one_hot": (ids, "seq", lambda x: one_hot(x, 50).sum(1), "together"),
    "mean by a mask's length": (masked, "seq", lambda x, mask: x * mask.float().mean(1)[:, None, None], "together"),
    "layer norm over tokens": (rows, "batch", lambda x: layer_norm(x.transpose(0, 2), [x.shape[0]]).transpose(0, 2), "number"),
    "normalised over tokens": (rows, "seq", lambda x: normalize(x, dim=1), "together"),
    "convolution over tokens": (images, "seq", lambda x: conv1d(x, KERNEL, padding=1), "reads past the end"),
    "convolution over rows": (rows, "batch", lambda x: conv1d(x.permute(1, 2, 0), KERNEL, padding=1), "reads past the end"),
    "pooled with padding": (images, "seq", lambda x: avg_pool1d(x, 3, 1, 1), "reads past the end"),
    "pooled to one": (images, "seq", lambda x: adaptive_avg_pool1d(x, 1) * x, "together"),
    "resampled": (images, "seq", lambda x: interpolate(x, scale_factor=2.0, mode="linear").sum(-1), None),
    "wrapped around": (images, "seq", lambda x: pad(x, (1, 1), mode="circular").unfold(-1, 3, 1).mean(-1), None),
    "padded at the end": (rows, "seq", lambda x: pad(x, (0, 0, 0, 1))[:, 1:] - x, "at its end"),
    "something at the end": (rows, "seq", lambda x: torch.cat([x, x[:, :1]], 1)[:, 1:], "at its end"),
    "sorted tokens": (rows, "seq", lambda x: x.sort(1).values, "orders all of `seq`"),
    "places of sorted tokens": (rows, "seq", lambda x: x.argsort(1), "orders all of `seq`"),
    "largest token": (rows, "seq", lambda x: x * x.argmax(1, keepdim=True), "orders all of `seq`"),
    "best rows": (rows, "batch", lambda x: x * x.topk(2, 0).values[0], "orders all of `batch`"),
    "median of rows": (rows, "batch", lambda x: x - x.median(), "orders all of `batch`"),
    "in place into a buffer": (rows, "seq", accumulate_in_buffer, "writes in place"),
    "flattened to one row": (rows, "batch", lambda x: x.reshape(1, -1).softmax(-1).view(x.shape), "together"),
    "mixed by a view": (rows, "seq", lambda x: x.transpose(1, 2).reshape(x.shape) + x, "mixes padding"),
    "batch and tokens swapped by a view": (
        rows, "batch", lambda x: x.view(x.shape[1], x.shape[0], WIDTH).sum(1), "mixes padding"),
    "two ways to flatten": (
        rows, "batch", lambda x: (x.flatten(0, 1) + x.transpose(0, 1).flatten(0, 1)).view(x.shape), "in different ways"),
    "index across flattened rows": (
        rows, "seq", lambda x: (x.flatten(0, 1) * torch.arange(x.shape[0] * x.shape[1])[:, None]).view(x.shape), "flattened"),
    "repeated tokens": (rows, "seq", lambda x: x.repeat(1, 2, 1)[:, 1:-1].sum(1), "at its end"),
    "random numbers": (rows, "batch", lambda x: x + torch.rand_like(x), "draws random numbers"),
    "histogram": (ids, "batch", lambda x: TABLE[x] * torch.zeros(50).scatter_add(
        0, x.flatten(), torch.ones(x.numel()))[:8], "dim that is padded"),
    "place beyond the table": (
        masked, "seq", lambda x, mask: POSITIONS[:8][mask.cumsum(1).clamp(max=6)] + x,
        "outside of its table"),
    "a size that shrinks": (
        ids, "seq", lambda x: torch.ones(64 - x.shape[1]).sum() + TABLE[x], "may shrink where `seq` grows"),
    "the bits of a mask": (
        rows, "seq", lambda x: attend(x, torch.where(causal(x), 0.0, MINUS).view(torch.int32).float()), "the same bits"),
    "a mask that is taken away": (
        rows, "seq", lambda x: attend(x, torch.sub(0.0 * scores(x), torch.where(causal(x), 0.0, -MINUS), alpha=-1)), None),
    "distance of rows": (rows, "batch", lambda x: torch.cdist(x.flatten(1), x.flatten(1)).sum(1), None),
}  # fmt: skip


UNHARMED = {
    "the bits of a mask",
    "a mask that is taken away",
    "random numbers",
    "divided by zeros ahead of a product",
    "place beyond the table",
}
"""Refused for what other numbers, or a GPU, would do."""


def proved_pairs():
    return {
        "linear": (rows, ("batch", "seq"), lambda x: gelu(x @ SQUARE) + x),
        "flattened rows": (rows, ("batch", "seq"), lambda x: (x.flatten(0, 1) @ SQUARE).view(x.shape)),
        "flattened and normalised": (rows, ("batch", "seq"), lambda x: layer_norm(x.reshape(-1, WIDTH), [WIDTH]).view_as(x)),
        "sequence first": (rows, ("batch", "seq"), lambda x: (x.transpose(0, 1).reshape(-1, WIDTH) @ SQUARE)
                           .view(x.shape[1], x.shape[0], WIDTH).cumsum(0).transpose(0, 1)),
        "positions": (ids, ("batch", "seq"), lambda x: TABLE[x] + POSITIONS[: x.shape[1]]),
        "looked up positions": (ids, ("batch", "seq"), lambda x: embedding(x, TABLE) + embedding(index(x), POSITIONS)),
        "sum so far": (rows, ("batch", "seq"), lambda x: x.cumsum(1) / (index(x) + 1)[:, None]),
        "softmax of features": (rows, ("batch", "seq"), lambda x: x.softmax(-1)),
        "causal flag": (rows, ("batch", "seq"), lambda x: attend(x, is_causal=True)),
        "causal mask": (rows, ("batch", "seq"), lambda x: attend(x, causal(x))),
        "mask of a number": (rows, ("batch", "seq"), lambda x: attend(x, torch.where(causal(x), 0.0, torch.tensor(MINUS)))),
        "window": (rows, ("batch", "seq"), lambda x: attend(x, causal(x) & (index(x)[None] > index(x)[:, None] - 3))),
        "causal and by the data": (rows, ("batch", "seq"), lambda x: attend(x, causal(x) & (scores(x) > 0))),
        "triangle": (rows, ("batch", "seq"), lambda x: attend(x, torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril())),
        "triangle of infinities": (rows, ("batch", "seq"), lambda x: attend(rms(attend(
            x, torch.full((x.shape[1], x.shape[1]), MINUS).triu(1))), torch.full((x.shape[1], x.shape[1]), MINUS).triu(1)[None])),
        "causal by hand, twice": (rows, ("batch", "seq"), causal_twice),
        "linear attention": (rows, ("batch", "seq"), lambda x: (scores(x) * causal(x)) @ x),
        "all to all in a row": (rows, ("batch",), lambda x: by_hand(x, scores(x)) + x.mean(1, keepdim=True) + x.flip(1)),
        "repeated for each row": (rows, ("batch",), lambda x: (x.sum(1).view(-1, 4) + TABLE[:2, :4].repeat(x.shape[0], 1)).view(
            -1, WIDTH)),
        "a size of its own": (rows, ("batch", "seq"), lambda x: (scores(x) * causal(x)).view(x.shape[0], x.shape[1], -1) @ x),
        "first token": (rows, ("batch", "seq"), lambda x: x - x[:, :1] * x[:, 0][:, None]),
        "a token ahead of all": (rows, ("batch", "seq"), lambda x: torch.cat([TABLE[:1].expand(x.shape[0], 1, WIDTH), x], 1)
                                 .cumsum(1)[:, 1:]),
        "token before": (rows, ("batch", "seq"), lambda x: pad(x, (0, 0, 1, 0))[:, :-1] - x),
        "causal convolution": (images, ("batch", "seq"), lambda x: conv1d(pad(x, (2, 0)), KERNEL)),
        "convolution of a row": (images, ("batch",), lambda x: conv1d(x, KERNEL, padding=1).relu()),
        "experts": (rows, ("batch", "seq"), lambda x: (torch.zeros(x.shape).scatter(-1, x.topk(2, -1).indices, 1.0) * x)
                    + TABLE[x.argmax(-1)]),
        "one_hot": (ids, ("batch", "seq"), lambda x: one_hot(x, 50)),
        "gathered": (rows, ("batch", "seq"), lambda x: x.gather(-1, x.argsort(-1))),
        "repeated heads": (rows, ("batch", "seq"), lambda x: attend(*[x[:, None].repeat_interleave(2, 1)], is_causal=True)),
        "einsum of features": (rows, ("batch", "seq"), lambda x: torch.einsum("bsd,de->bse", x, SQUARE)),
        "statistics of the model": (images, ("batch", "seq"), lambda x: batch_norm(x, TABLE[0], TABLE[1].abs() + 1)),
        "bias by distance": (rows, ("batch",), lambda x: by_hand(x, scores(x) + TABLE[
            (index(x)[:, None] - index(x)).abs().clamp(max=9)][..., 0])),
    }  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_what_reads_padding_is_refused_and_says_where(name):
    make, size, model, text = HOSTILE[name]
    found = opened(model, make, INPUTS[make])
    why = reason(found, size)
    assert why, "proved"
    assert text is None or text in why, why
    if name not in UNHARMED:
        assert worst(found, make, size) > 1e-3


@pytest.mark.parametrize(
    "model",
    [
        lambda x, mask: (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1),
        lambda x, mask: attend(x, mask[:, None, :] > 0),
        lambda x, mask: by_hand(x, scores(x).masked_fill(mask[:, None, :] == 0, MINUS)),
        lambda x, mask: x.masked_fill(mask[..., None] == 0, MINUS).amax(1),
        lambda x, mask: x * (mask == 1).any(1)[:, None, None],
    ],
    ids=["mean", "attention", "by hand", "largest", "any"],
)
def test_zeros_in_a_mask_keep_padding_out(model):
    found = opened(model, masked, INPUTS[masked])
    zeroed = mask_slots(found)
    assert len(zeroed) == 1 and reason(found, "seq") and reason(found, "seq", zeroed) == ""
    assert worst(found, masked, "seq", zeroed) < 1e-5


@pytest.mark.parametrize("name", proved_pairs())
def test_what_does_not_read_padding_is_proved_and_right(name):
    make, names, model = proved_pairs()[name]
    found = opened(model, make, INPUTS[make])
    for size in names:
        assert reason(found, size) == ""
        assert worst(found, make, size) < 1e-4, size
