"""Modules as people write them by hand: gradients beside eager's and fp64, with kernels or, where none can be, with a reason."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from fusion_advisor.fuse.train.trained_graph import SPARSE
from tests.fuse.train.kept_graphs import KeptGraphs
from tests.fuse.train.test_trained_graph import OPTIONS

WIDTH, WORDS = 32, 50
DRAWN = torch.Generator().manual_seed(3)
ROWS, PICTURES = torch.randn(6, 7, WIDTH, generator=DRAWN), torch.randn(4, 3, 8, 8, generator=DRAWN)
IDS = torch.randint(0, WORDS, (6, 7), generator=DRAWN)


def linear(width=WIDTH, **how):
    return nn.Linear(WIDTH, width, **how)


class LstmLoop(nn.Module):
    """A recurrent cell step by step."""

    def __init__(self):
        super().__init__()
        self.of_input, self.of_state = linear(4 * WIDTH), linear(4 * WIDTH, bias=False)

    def forward(self, x):
        state = cell = x.new_zeros(x.shape[0], WIDTH)
        states = []
        for place in range(x.shape[1]):
            i, f, g, o = (self.of_input(x[:, place]) + self.of_state(state)).chunk(4, -1)
            cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
            state = torch.sigmoid(o) * torch.tanh(cell)
            states.append(state)
        return torch.stack(states, 1)


class Rounding(torch.autograd.Function):
    """Rounds, and hands gradients on where its input is small."""

    @staticmethod
    def forward(ctx, x, units):
        ctx.save_for_backward(x)
        return torch.round(x * units) / units

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < 0.5), None


class OwnFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = linear(), linear()

    def forward(self, x):
        return self.second(functional.gelu(Rounding.apply(self.first(x), 8.0)))


class TiedList(nn.Module):
    """One layer twice in a list, and its weight in another layer too."""

    def __init__(self):
        super().__init__()
        layer = linear()
        self.layers, self.norms = nn.ModuleList([layer, linear(), layer]), nn.ModuleList([nn.LayerNorm(WIDTH)] * 3)
        self.layers[1].weight = layer.weight

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + functional.silu(layer(norm(x)))
        return x


class GatheredLoss(nn.Module):
    """Picks one of each row's logarithms, and adds those up by what was picked."""

    def __init__(self):
        super().__init__()
        self.layer = linear()

    def forward(self, x):
        rows = functional.log_softmax(self.layer(x), -1)
        places = (x[..., :1].abs() * 7).long().clamp(0, WIDTH - 1)
        picked = rows.gather(-1, places)
        sums = torch.zeros(WIDTH, dtype=x.dtype).scatter_add(0, places.flatten(), picked.flatten())
        return sums.square().mean() - picked.mean()


class GroupedPictures(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16)
        self.second, self.batch = nn.Conv2d(16, 16, 3, padding=1, groups=4), nn.BatchNorm2d(16)

    def forward(self, x):
        x = functional.silu(self.norm(self.first(x)))
        return (x + functional.relu(self.batch(self.second(x)))).mean((2, 3))


class Bag(nn.Module):
    def __init__(self, *, is_sparse=False):
        super().__init__()
        self.words, self.layer = nn.EmbeddingBag(WORDS, WIDTH, mode="mean", sparse=is_sparse), linear()

    def forward(self, ids):
        return functional.gelu(self.layer(self.words(ids)))


class SparseWords(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.norm = nn.Embedding(WORDS, WIDTH, sparse=True), nn.LayerNorm(WIDTH)

    def forward(self, ids):
        return functional.gelu(self.norm(self.words(ids)))


class Dropped(nn.Module):
    """Dropout under checkpoints."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down, self.drop = nn.LayerNorm(WIDTH), linear(64), nn.Linear(64, WIDTH), nn.Dropout(0.3)

    def layer(self, x):
        return self.drop(self.down(functional.gelu(self.up(self.norm(x)))))

    def forward(self, x):
        for _ in range(2):
            x = x + checkpoint(self.layer, x, use_reentrant=False)
        return x


class Counting(nn.Module):
    """Keeps a running mean that it subtracts."""

    def __init__(self):
        super().__init__()
        self.layer = linear()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        x = functional.gelu(self.layer(x))
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
            self.steps += 1
        return (x - self.mean) * torch.rsqrt(x.var(-1, keepdim=True) + 1e-5)


class Islands(nn.Module):
    """Values that are detached, and ops that nobody differentiates; a part is frozen."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third, self.norm = linear(), linear(), linear(), nn.LayerNorm(WIDTH)
        self.third.weight.requires_grad_(False)
        self.norm.bias.requires_grad_(False)

    def forward(self, x):
        x = functional.silu(self.first(x))
        with torch.no_grad():
            gate = torch.softmax(self.second(x), -1)
        x = self.third(self.norm(x.detach() * gate + x))
        return x * torch.sigmoid(x.detach())


class Experts(nn.Module):
    """Each row has two of four experts; a loss of their shares beside the rows."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = linear(4), nn.ModuleList(linear() for _ in range(4))

    def forward(self, x):
        shares = functional.softmax(self.router(x), -1)
        weights, chosen = shares.topk(2, -1)
        rows = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = rows + functional.silu(expert(x)) * ((chosen == number) * weights).sum(-1, keepdim=True)
        return {"rows": rows, "shares": (4 * shares.mean((0, 1))).square().sum()}


class Written(nn.Module):
    """Writes into what it has computed."""

    def __init__(self):
        super().__init__()
        self.layer, self.row = linear(), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        rows = self.layer(x).clone()
        rows[:, ::2] = self.row
        rows[:, 1].mul_(2)
        rows[x > 1] = 0.5
        return torch.cumsum(functional.gelu(rows), 1)


class Hooked(nn.Module):
    """Doubles a gradient inside of it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = linear(), linear()

    def forward(self, x):
        x = functional.gelu(self.first(x))
        x.register_hook(lambda gradient: 2 * gradient)
        return self.second(x)


class Continued(nn.Module):
    """After a graph break it writes to what the graph before has computed."""

    is_checkpointed = False

    def __init__(self):
        super().__init__()
        self.first, self.second, self.norm = linear(), linear(), nn.LayerNorm(WIDTH)

    def forward(self, x):
        x = self.norm(functional.silu(self.first(x)))
        torch._dynamo.graph_break()
        functional.relu(x[:, 1:].mul_(2), inplace=True)
        x = self.second(x)
        return checkpoint(self.last, x, use_reentrant=False) if self.is_checkpointed else self.last(x)

    def last(self, x):
        return functional.gelu(self.norm(x))


class ContinuedInCheckpoint(Continued):
    is_checkpointed = True


SERVED = {
    LstmLoop: ROWS, OwnFunction: ROWS, TiedList: ROWS, GatheredLoss: ROWS, GroupedPictures: PICTURES, Bag: IDS, Dropped: ROWS,
    Counting: ROWS, Islands: ROWS, Experts: ROWS, Written: ROWS, Hooked: ROWS, Continued: ROWS, ContinuedInCheckpoint: ROWS,
}  # fmt: skip


def loss_of(outputs):
    leaves = [one for one in pytree.tree_leaves(outputs) if isinstance(one, torch.Tensor) and one.requires_grad]
    return sum((number + 1) * one.square().mean() for number, one in enumerate(leaves))


def dense(model):
    return {name: one.grad.to_dense() for name, one in model.named_parameters() if one.grad is not None}


def distance(one, other):
    return float((one - other).norm() / other.norm().clamp_min(1e-30))


def beside_eager_and_fp64(model, x):
    """Run three steps of all three, gradients added up from the second on, and return the graphs that were judged."""
    plain, wide, backend = copy.deepcopy(model), copy.deepcopy(model).double(), KeptGraphs(OPTIONS)
    compiled = torch.compile(model, backend=backend, dynamic=False)
    for number in range(3):
        for one, call in ((model, compiled), (plain, plain), (wide, wide)):
            if number == 1:
                one.zero_grad()
            torch.manual_seed(number)
            given = x.double() if one is wide and x.is_floating_point() else x
            loss_of(call(given)).backward()
        ours, own, truth = dense(model), dense(plain), dense(wide)
        assert ours.keys() == own.keys() == truth.keys() and ours
        for name, true in truth.items():
            assert distance(ours[name].double(), true) <= 3 * distance(own[name].double(), true) + 2e-6, (name, number)
    for (name, one), (_, other) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, msg=lambda said, name=name: f"{name}: {said}")
    torch.compiler.reset()
    return backend.graphs


@pytest.mark.parametrize("kind", SERVED)
def test_kernels_run_and_gradients_are_eagers(kind):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="fusion-advisor runs the original ops")
        graphs = beside_eager_and_fp64(kind().train(), SERVED[kind])
    assert graphs and all(graph.is_rewritten for graph in graphs)
    assert any(half.is_changed for graph in graphs for half in graph.halves)


@pytest.mark.parametrize("make", [SparseWords, lambda: Bag(is_sparse=True)], ids=["embedding", "bag"])
def test_sparse_gradients_run_the_original_ops_with_a_reason(make):
    torch.manual_seed(0)
    model = make().train()
    with pytest.warns(UserWarning, match=SPARSE):
        (graph,) = beside_eager_and_fp64(model, IDS)
    assert not graph.is_rewritten and model.words.weight.grad.layout is torch.sparse_coo


class TurnedNorm(nn.Module):
    """A batch norm of sequences, as PatchTST has it: torch 2.13 on a CPU traces other strides than its kernel writes."""

    def __init__(self, words=0):
        super().__init__()
        self.norm, self.last, self.words = nn.BatchNorm1d(WIDTH), linear(words or WIDTH), words

    def forward(self, x):
        rows = self.last(torch.tanh(self.norm(x.transpose(1, 2)).transpose(1, 2).reshape(-1, WIDTH)))
        return functional.cross_entropy(rows, torch.arange(len(rows), device=x.device) % self.words) if self.words else rows


@pytest.mark.parametrize("words", [0, 512], ids=["rows", "loss in chunks"])
def test_a_step_that_fails_as_torch_traces_it_runs_the_original_ops_with_a_reason(words):
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        (graph,) = beside_eager_and_fp64(TurnedNorm(words).train(), ROWS)
    reason = graph.outcome.reason
    assert graph.is_rewritten or reason.startswith("the step fails as torch's AOTAutograd traces it: ")
    assert graph.is_rewritten or any(reason in str(one.message) for one in said)
