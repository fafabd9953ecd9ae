"""Rows that nobody reads: only they go, by the same numbers, and every op that mixes rows stops it."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.nn import functional

from fusion_advisor.capture.graph.tracer import capture_regions
from fusion_advisor.capture.sizes.open_capture import capture_open
from fusion_advisor.fuse.passes.slice_pushdown import narrow_rows
from fusion_advisor.runtime.torch_internals import symbolic_sizes

BATCH, TOKENS, WIDTH = 3, 10, 16
X = torch.randn(BATCH, TOKENS, WIDTH)


class Layer(nn.Module):
    """An encoder's last layer, and what is read of it."""

    def __init__(self, read, attend=functional.scaled_dot_product_attention):
        super().__init__()
        torch.manual_seed(0)
        self.read, self.attend = read, attend
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        y = self.norm(x)
        q, k, v = (part(y).view(*x.shape[:2], 2, -1).transpose(1, 2) for part in (self.q, self.k, self.v))
        h = x + self.out(self.attend(q, k, v).transpose(1, 2).reshape(x.shape))
        return self.read(self.last(h + self.down(functional.gelu(self.up(h)))))


class Of(nn.Module):
    """A function behind a linear; what it reads of that is narrowed or not."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.function, self.linear = function, nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.function(self.linear(x))


def narrowed(model, *inputs, **how):
    """Narrow a model's one region and compare it with the model; return the result and the rows of each linear, in order."""
    with torch.no_grad():
        (region,) = capture_regions(model.eval(), inputs, {}).regions
        result = narrow_rows(region, **how)
        ours, theirs = result.region.graph(*region.example_args), region.graph(*region.example_args)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    graph = result.region.graph.graph
    for node in graph.nodes:  # what is said of a value is what it is
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, torch.Tensor):
            assert all(isinstance(size, int) for size in value.shape)
    return result, [node.meta["val"].shape[-2] for node in graph.nodes if node.target is torch.ops.aten.linear.default]


def causal(q, k, v):
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def masked(q, k, v):
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=torch.arange(TOKENS * TOKENS).view(TOKENS, TOKENS) % 3 != 1)


def shared_mask(q, k, v):
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=torch.arange(TOKENS).view(1, 1, 1, TOKENS) % 3 != 1)


@pytest.mark.parametrize("attend", [functional.scaled_dot_product_attention, masked, shared_mask])
@pytest.mark.parametrize(
    ("read", "rows"),
    [
        (lambda y: y[:, 0], 1),
        (lambda y: y[:, -1], 1),
        (lambda y: y[:, -1:], 1),
        (lambda y: y[:, 2:5], 3),
        (lambda y: y[:, 2:5].tanh() + y[:, 2:5], 3),
        (lambda y: (y[:, :1] * 2).transpose(0, 1), 1),
        (lambda y: y[1], None),
    ],
)
def test_only_the_rows_that_are_read_are_computed(read, rows, attend):
    result, per_linear = narrowed(Layer(read, attend), X)
    if rows is None:  # one sequence of three: what follows attention is of that one, attention is not asked for fewer
        assert per_linear == [TOKENS] * 6 and result.changed > 0
    else:
        assert per_linear == [rows, TOKENS, TOKENS, rows, rows, rows]  # q, k, v, out, up, down


def test_queries_are_left_alone_where_asked():
    _, per_linear = narrowed(Layer(lambda y: y[:, 0]), X, with_queries=False)
    assert per_linear == [TOKENS, TOKENS, TOKENS, 1, 1, 1]


@pytest.mark.parametrize(("read", "rows"), [(lambda y: y[:, -1], 1), (lambda y: y[:, 0], TOKENS), (lambda y: y[:, -2:], TOKENS)])
def test_of_causal_queries_only_the_last_one_sees_what_it_would_see_alone(read, rows):
    result, per_linear = narrowed(Layer(read, causal), X)
    assert per_linear[0] == rows and per_linear[3] < TOKENS
    (flags,) = (node.args[3:] for node in result.region.graph.graph.nodes if "scaled_dot" in str(node.target))
    assert flags == (None, 0.0, rows == TOKENS)


@pytest.mark.parametrize(
    "read",
    [
        lambda y: y,
        lambda y: (y, y[:, 0]),
        lambda y: (y[:, 0], y[:, 1]),
        lambda y: y[:, ::2],
        lambda y: y[..., 0],
        lambda y: y[:, 0:],
        lambda y: y.softmax(1)[:, 0],
        lambda y: y.cumsum(1)[:, 0],
        lambda y: (y - y.mean(1, keepdim=True))[:, 0],
        lambda y: y.flatten(0, 1)[0],
        lambda y: y.view(BATCH, -1)[:, :3],
        lambda y: torch.cat([y, y], 1)[:, 0],
        lambda y: y.flip(1)[:, 0],
        lambda y: (y[:1].add_(1), y)[1][:, 0],
        lambda y: functional.dropout(y, 0.5, training=True)[:, 0] * 0,
    ],
)
def test_what_mixes_rows_or_reads_all_of_them_stops_it(read):
    result, per_linear = narrowed(Of(read), X)
    assert (result.changed, per_linear) == (0, [TOKENS])


@pytest.mark.parametrize(
    "read",
    [
        lambda y: y.softmax(-1)[:, 0],
        lambda y: (y - y.mean(-1, keepdim=True))[:, 0],
        lambda y: torch.cat([y, y.tanh()], 2)[:, 0],
        lambda y: (y + torch.arange(TOKENS).view(TOKENS, 1))[:, 4],
        lambda y: (y * torch.ones(BATCH, 1, WIDTH))[:, 4],
        lambda y: y.to(torch.float64).permute(1, 2, 0)[3],
        lambda y: y.unsqueeze(1).contiguous()[:, 0, 3],
        lambda y: y.view(BATCH, TOKENS, 4, -1)[:, 3, 1:3],
        lambda y: functional.dropout(y, 0.5, training=False)[:, 0],
        lambda y: (y.double() * 2).type_as(y)[:, 0],
        lambda y: y.double().type_as(torch.zeros(BATCH, 7, 2))[:, 0],
        lambda y: y[:, 2:7][:, 1:3],
        lambda y: torch.where(y > 0, y, -y)[:, 0].reshape(BATCH, 4, -1),
    ],
)
def test_ops_of_each_row_by_itself_are_gone_through(read):
    result, (rows,) = narrowed(Of(read), X)
    assert rows < TOKENS and result.changed > 0


def test_rows_of_a_folded_batch_are_its_own():
    def read(y):
        return (torch.addmm(torch.ones(WIDTH), y.view(-1, WIDTH), torch.ones(WIDTH, WIDTH)) + 1).view(y.shape)[:, 0]

    for batch, rows in ((1, 1), (BATCH, TOKENS)):  # token 0 of three sequences lies in rows 0, 10 and 20 of the product
        _, per_linear = narrowed(Of(read), X[:batch])
        assert per_linear == [rows]


def test_an_operand_with_rows_of_its_own_is_taken_apart_too():
    rows = torch.randn(TOKENS, WIDTH)
    result, per_linear = narrowed(Of(lambda y: torch.addmm(rows, y[0], torch.ones(WIDTH, WIDTH))[2:4]), X[:1])
    assert per_linear == [2] and result.changed > 1


def test_without_a_product_nothing_is_gained():
    result, _ = narrowed(Of(lambda y: y), X)
    assert result.changed == 0
    with torch.no_grad():
        (region,) = capture_regions(nn.LayerNorm(WIDTH), (X,), {}).regions
    assert narrow_rows(region).changed == 0


def test_a_value_that_is_written_to_keeps_its_rows():
    def read(y):
        z = y * 2
        first = z[:, 0] + 1
        z.mul_(3)
        return first, z.sum()

    result, per_linear = narrowed(Of(read), X)
    assert (result.changed, per_linear) == (0, [TOKENS])


def test_an_autocast_of_the_models_own_stays_around_its_ops():
    def read(y):
        with torch.autocast("cpu", torch.bfloat16):
            return functional.linear(y, torch.eye(WIDTH)).tanh()[:, 0]

    _, per_linear = narrowed(Of(read), X)
    assert per_linear == [1, 1]


OPS = (
    torch.tanh,
    lambda y: y + 1,
    lambda y: functional.layer_norm(y, y.shape[-1:]),
    lambda y: functional.linear(y, torch.eye(y.shape[-1]) * 0.5),
    lambda y: y.transpose(0, 1),
    lambda y: y.transpose(1, 2),
    lambda y: y.softmax(-1),
    lambda y: y.cumsum(1),
    lambda y: y.reshape(y.shape[0], -1, 2),
    lambda y: y.reshape(-1, y.shape[1], y.shape[2]),
    lambda y: y.flip(0),
    lambda y: y * y.mean(-1, keepdim=True),
    lambda y: torch.cat([y, y.neg()], 0),
    lambda y: y[:, :, : max(2, y.shape[2] - 1)],
)


@pytest.mark.parametrize("seed", range(40))
def test_whatever_comes_between_the_numbers_stay(seed):
    chosen = random.Random(seed)
    steps = [chosen.choice(OPS) for _ in range(chosen.randint(1, 7))]
    dim = chosen.randrange(3)
    at = chosen.randrange(2)

    def read(y):
        for step in steps:
            y = step(y)
        return y.select(dim, at) if at else y.narrow(dim, 0, 1)

    narrowed(Of(read), X)


def narrowed_for_all_sizes(model, sizes_of_calls=((2, 2), (5, 31), (BATCH, TOKENS))):
    """Narrow a model's graph with an open batch and length; compare it with the model at other sizes.

    Returns:
        The rows of each linear, in order; None for one that computes all rows.
    """
    torch.compiler.reset()
    with torch.no_grad():
        opened = capture_open(model.eval(), (X,), {}, {"args.0": ("batch", "tokens", "")})
        assumed = symbolic_sizes.assumptions_of(opened.environment)
        with symbolic_sizes.ones_among_the_sizes():
            graph = narrow_rows(opened.region).region.graph
        assert symbolic_sizes.assumptions_of(opened.environment) == assumed
        inputs = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
        for batch, tokens in sizes_of_calls:
            x, sizes = torch.randn(batch, tokens, WIDTH), opened.symbols({"batch": batch, "tokens": tokens})
            given = [
                sizes[symbol] if (symbol := symbolic_sizes.symbol_of(value)) is not None
                else x if isinstance(value, torch.Tensor) and value.dim() == X.dim() else example
                for value, example in zip(inputs, opened.region.example_args, strict=True)
            ]  # fmt: skip
            ours, theirs = graph(*given), model(x)
            torch.testing.assert_close(ours[0] if isinstance(ours, tuple | list) else ours, theirs, rtol=1e-5, atol=1e-6)
    found = [node.meta["val"].shape[-2] for node in graph.graph.nodes if node.target is torch.ops.aten.linear.default]
    return [rows if isinstance(rows, int) else None for rows in found]


def seen_before(q, k, v):
    tokens = q.shape[-2]
    mask = torch.arange(tokens).view(-1, 1) >= torch.arange(tokens)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@pytest.mark.parametrize("attend", [functional.scaled_dot_product_attention, causal, seen_before])
@pytest.mark.parametrize(
    "read", [lambda y: y[:, -1], lambda y: y[:, -1:], lambda y: y[:, -1:, :] * 2], ids=["select", "slice", "and more"]
)
def test_the_last_row_of_an_open_size_is_computed_alone(read, attend):
    assert narrowed_for_all_sizes(Layer(read, attend)) == [1, None, None, 1, 1, 1]


def test_the_first_row_of_an_open_size_is_computed_alone():
    for read in (lambda y: y[:, 0], lambda y: y[:, :1]):
        assert narrowed_for_all_sizes(Layer(read)) == [1, None, None, 1, 1, 1]


@pytest.mark.parametrize(
    "read", [lambda y: y[:, -2:], lambda y: y[:, 1:], lambda y: y[:, ::2], lambda y: y[:, -1] + y.sum(1)],
    ids=["as many as there are", "but one", "every other", "all of them too"],
)  # fmt: skip
def test_rows_whose_number_depends_on_an_open_size_are_all_computed(read):
    assert narrowed_for_all_sizes(Layer(read)) == [None] * 6


def test_rows_stop_at_an_op_whose_operands_count_them_in_two_ways():
    def swap_pairs(y):
        swapped = y.reshape(y.shape[0], y.shape[1] // 2, 2, WIDTH).flip(2).reshape(y.shape[0], y.shape[1] // 2 * 2, WIDTH)
        return swapped + y

    class Pairs(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up = torch.nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.up(swap_pairs(x))[:, -1]

    torch.manual_seed(0)
    assert narrowed_for_all_sizes(Pairs(), ((2, 2), (5, 32), (BATCH, 6))) == [1]
