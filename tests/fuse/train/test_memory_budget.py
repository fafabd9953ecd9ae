"""A memory budget: the peak before and after, eager's gradients, and no random op drawn again."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from fusion_advisor.errors import UsageError
from fusion_advisor.fuse.loss.budget import MEMORY_BUDGET, row_of_budget
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.fuse.plan.training_options import check_options_of_other_phases
from fusion_advisor.records import Status
from fusion_advisor.runtime.torch_internals import fx_trace
from tests.fuse.train.test_chunked_losses import Backend
from tests.fuse.train.test_trained_graph import OPTIONS, WIDTH, Block, compare, gradients, step

BUDGET = replace(OPTIONS, memory_budget=0.2)


class Deep(nn.Module):
    """Blocks one after the other."""

    def __init__(self, *, dropout=0.0):
        super().__init__()
        self.blocks = nn.Sequential(*(Block(dropout=dropout) for _ in range(4)))

    def forward(self, x):
        return self.blocks(x)


@pytest.fixture(autouse=True)
def _forget():
    yield
    torch.compiler.reset()


def made(options, **kind):
    torch.manual_seed(0)
    model, backend = Deep(**kind), Backend(options)
    return model, copy.deepcopy(model), torch.compile(model, backend=backend, dynamic=False), backend


def test_the_peak_falls_and_gradients_are_eagers():
    model, plain, compiled, backend = made(BUDGET)
    x = torch.randn(16, 8, WIDTH)
    step(compiled, x)
    step(plain, x)
    compare(gradients(model), gradients(plain))
    (row,) = backend.graphs[0].outcome.step_rows
    assert (row.id, row.status) == (MEMORY_BUDGET.id, Status.KEPT) and row.saved_bytes > 0
    assert "the step's peak falls from" in row.reason and backend.graphs[0].is_rewritten


def test_time_does_not_take_back_what_the_user_asked_for():
    """Nothing is timed against eager, which would be faster: it computes nothing again."""
    model, _, compiled, backend = made(replace(BUDGET, keep="paying", only=("no_kernel", "memory-budget")))
    step(compiled, torch.randn(16, 8, WIDTH))
    assert backend.graphs[0].outcome.reason == "" and gradients(model)


@pytest.mark.parametrize("budget", [0.2, 0.0])
def test_dropout_is_not_drawn_again(budget):
    model, _, compiled, backend = made(replace(BUDGET, memory_budget=budget), dropout=0.5)
    step(compiled, torch.randn(16, 8, WIDTH))
    graph = backend.graphs[0]
    assert graph.is_rewritten and graph.outcome.step_rows[0].status is Status.KEPT and gradients(model)
    for half in graph.halves:
        draws = sum(str(node.target) == "aten.native_dropout.default" for node in half.graph.graph.nodes)
        assert draws in (0, 4)
    assert sum(fx_trace.draws_numbers(half.graph) for half in graph.halves) == 1


class Counted(nn.Module):
    """Norms of batches, and a table that moves on after it has been read."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv1d(8, 8, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm1d(8) for _ in range(3))
        self.register_buffer("table", torch.randn(WIDTH, WIDTH))

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            shares = torch.sigmoid(x.detach() @ self.table.t())
            x = functional.silu(norm(layer(x))) * shares
        with torch.no_grad():
            self.table.mul_(0.9)
        return x


@pytest.mark.parametrize("budget", [0.5, 0.0])
def test_what_the_step_writes_over_is_not_read_again(budget):
    torch.manual_seed(0)
    model, backend = Counted(), Backend(replace(BUDGET, memory_budget=budget))
    plain, compiled, x = copy.deepcopy(model), torch.compile(model, backend=backend, dynamic=False), torch.randn(4, 8, WIDTH)
    for _ in range(3):
        step(compiled, x)
        step(plain, x)
    compare(gradients(model), gradients(plain))
    compare(dict(model.named_buffers()), dict(plain.named_buffers()))
    (row,) = backend.graphs[0].outcome.step_rows
    assert backend.graphs[0].is_rewritten and row.status is Status.KEPT


def test_what_is_no_share_is_refused():
    for budget in (-0.1, 1.5):
        with pytest.raises(UsageError, match=r"--memory-budget .* is no share"):
            ApplyOptions(memory_budget=budget)
    with pytest.raises(UsageError, match="--memory-budget needs --phase train"):
        check_options_of_other_phases(ApplyOptions(memory_budget=0.5))
    check_options_of_other_phases(ApplyOptions())


class Adapted(nn.Module):
    """A frozen layer with an adapter: under a budget the adapted weight is made again, and with it the peak is higher."""

    def __init__(self):
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH).requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(4, WIDTH)), nn.Parameter(torch.randn(2 * WIDTH, 4))

    def forward(self, x):
        return functional.gelu(functional.linear(self.norm(x), self.layer.weight + self.up @ self.down, self.layer.bias))


def test_passes_with_a_higher_peak_do_not_stay():
    ops = []
    for options in (OPTIONS, replace(BUDGET, memory_budget=0.0)):
        torch.manual_seed(0)
        model, backend = Adapted(), Backend(options)
        plain, x = copy.deepcopy(model), torch.randn(2, 4, WIDTH)
        step(torch.compile(model, backend=backend, dynamic=False), x)
        step(plain, x)
        compare(gradients(model), gradients(plain))
        (graph,) = backend.graphs
        ops.append([[str(node.target) for node in half.graph.graph.nodes] for half in graph.halves])
    row = next(one for one in graph.outcome.step_rows if one.id == MEMORY_BUDGET.id)
    assert row.status is Status.NOT_REPLACED and graph.is_rewritten and ops[0] == ops[1]


def test_a_budget_that_lowers_nothing_says_so():
    row = row_of_budget(0.9, 1000, 1000)
    assert row.status is Status.NOT_REPLACED and "does not lower the step's peak" in row.reason and row.saved_bytes == 0
