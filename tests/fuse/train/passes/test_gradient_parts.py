"""A norm's gradients in two calls, sums of columns last: the same results, and chains in the passes of tiny models."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from fusion_advisor.capture.graph.op_records import describe
from fusion_advisor.capture.graph.tracer import Region
from fusion_advisor.chains.find import find_groups
from fusion_advisor.chains.op_inputs import inputs_of
from fusion_advisor.fuse.dynamo_backend import fuse_graph
from fusion_advisor.fuse.plan.plan import judge_with
from fusion_advisor.fuse.train.passes.columns_last import sink_column_sums
from fusion_advisor.fuse.train.passes.gradient_parts import split_norm_gradients
from fusion_advisor.fuse.train.passes.kept_values import keep_less
from fusion_advisor.records import OpClass
from fusion_advisor.records.op_facts import item_bytes, overload_free
from fusion_advisor.runtime.torch_internals import autograd_graphs, fx_trace
from tests.fuse.train.test_models import MODELS, batch
from tests.fuse.train.test_trained_graph import OPTIONS

_aten = torch.ops.aten


class Block(nn.Module):
    """Two norms, a gate and a residual."""

    def __init__(self):
        super().__init__()
        self.norm, self.gain = nn.LayerNorm(16), nn.Parameter(torch.rand(16) + 0.5)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        x = x + self.down(functional.gelu(self.up(self.norm(x))))
        rows = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.up(rows * self.gain)


def passes(model, **inputs):
    """The forward and backward graphs of a model's call, with the gradients that AOTAutograd gives the second."""
    found = {}

    def backend(graph_module, given):
        def keep(name):
            def kept(half):
                found.setdefault(name, []).append(fx_trace.copied_graph(half))
                return half.forward

            return kept

        return autograd_graphs.with_backward(graph_module, given, keep("forward"), keep("backward"), prepare=keep_less)

    torch.compile(model, backend=backend, dynamic=False)(**inputs)
    return found


def targets(graph_module):
    return [node.target for node in graph_module.graph.nodes if node.op == "call_function"]


def test_two_calls_give_what_one_gave():
    (graph_module,) = passes(Block(), x=torch.randn(5, 16, requires_grad=True))["backward"]
    inputs = [torch.randn(node.meta["val"].shape) for node in graph_module.graph.nodes if node.op == "placeholder"]
    before = graph_module(*inputs)
    names = targets(graph_module)
    prepared = sink_column_sums(split_norm_gradients(fx_trace.copied_graph(graph_module)))
    after = prepared(*inputs)
    assert len(before) == len(after)
    for one, other in zip(before, after, strict=True):
        assert one is other is None or torch.equal(one, other)
    norm = _aten.native_layer_norm_backward.default
    assert names.count(norm) == 1 and targets(prepared).count(norm) == 2
    masks = [list(node.args[-1]) for node in prepared.graph.nodes if node.target is norm]
    assert sorted(masks) == [[False, True, True], [True, False, False]]
    assert targets(graph_module).count(norm) == 1  # the graph that was given is as it was


def test_a_norm_without_weights_or_of_frozen_ones_stays_one_call():
    model = Block()
    model.norm.requires_grad_(False)
    (graph_module,) = passes(model, x=torch.randn(5, 16, requires_grad=True))["backward"]
    assert targets(split_norm_gradients(graph_module)).count(_aten.native_layer_norm_backward.default) == 1


def test_sums_of_columns_stand_right_before_the_next_product():
    (graph_module,) = passes(Block(), x=torch.randn(5, 16, requires_grad=True))["backward"]
    prepared = sink_column_sums(split_norm_gradients(graph_module))
    nodes = list(prepared.graph.nodes)
    row_sum = next(place for place, node in enumerate(nodes) if node.target is _aten.sum.dim_IntList and node.args[1] == [1])
    products = [place for place, node in enumerate(nodes) if node.target in (_aten.mm.default, _aten.addmm.default)]
    gain = next(
        place for place, node in enumerate(nodes) if node.target is _aten.sum.dim_IntList and node.meta["val"].numel() == 16
    )
    assert row_sum < gain
    assert any(gain < product for product in products)


def most_alive(graph_module, elements):
    """The most results of a size that wait at once for an op that reads them."""
    alive, most = {}, 0
    for node in graph_module.graph.nodes:
        if isinstance(value := node.meta.get("val"), torch.Tensor) and node.op == "call_function" and value.numel() == elements:
            alive[node] = set(node.users)
        most = max(most, len(alive))
        for users in alive.values():
            users.discard(node)
        alive = {one: users for one, users in alive.items() if users}
    return most


def test_sums_of_one_norm_do_not_wait_for_those_of_others():
    """Without a product between them, the gradients of all norms would be kept until the end."""
    blocks = [nn.Sequential(nn.LayerNorm(16), nn.GELU()) for _ in range(8)]
    (backward,) = passes(nn.Sequential(*blocks), input=torch.randn(64, 16, requires_grad=True))["backward"]
    assert most_alive(sink_column_sums(split_norm_gradients(backward)), 64 * 16) <= 4


def test_a_sum_that_is_used_on_stays_where_it_is():
    class Used(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias, self.mix = nn.Parameter(torch.randn(16)), nn.Linear(16, 16, bias=False)

        def forward(self, x):
            return x * self.mix(self.bias).tanh()

    (graph_module,) = passes(Used(), x=torch.randn(5, 16))["backward"]
    before = targets(graph_module)
    assert targets(sink_column_sums(graph_module)) == before


CHAINED = {
    "gpt2": {"native_layer_norm", "native_layer_norm_backward", "sum", "_log_softmax", "nll_loss_backward"},
    "llama": {"sum", "mean", "_log_softmax", "_log_softmax_backward_data", "nll_loss_backward"},
    "bert": {"native_layer_norm", "native_layer_norm_backward", "sum", "gelu_backward", "nll_loss_backward"},
    "vit": {"native_layer_norm", "native_layer_norm_backward", "sum", "_log_softmax_backward_data"},
}
LEAST_SHARE = {"gpt2": 0.9, "llama": 0.9, "bert": 0.85, "vit": 0.9}
"""Of the bytes of all ops but products of matrices and attention."""


@pytest.mark.parametrize("name", MODELS)
def test_most_bytes_of_both_passes_are_in_chains(name):
    torch.compiler.reset()
    model = MODELS[name]().train()
    found, inside, everything = set(), 0, 0
    for training_pass, graphs in passes(model, **batch(name, 0, range(4))).items():
        for graph_module in graphs:
            graph = sink_column_sums(split_norm_gradients(graph_module))
            names = tuple(node.name for node in graph.graph.nodes if node.op == "placeholder")
            region = Region(
                index=0, graph=graph, original=graph, names=names, roles=("input",) * len(names), training_pass=training_pass
            )
            ops, _ = describe(region)
            groups = find_groups(ops, functools.partial(judge_with, ops))
            members = {member for group in groups if group.verdict.is_fusible for member in group.members}
            found |= {overload_free(ops[member].target) for member in members}
            for op in ops:
                if op.op_class in (OpClass.POINTWISE, OpClass.REDUCTION, OpClass.MEMORY):
                    moved = sum(_bytes(meta) for index in (*inputs_of(op), op.index) for meta in ops[index].outputs)
                    everything += moved
                    inside += moved * (op.index in members)
    assert found >= CHAINED[name]
    assert inside >= LEAST_SHARE[name] * everything, inside / everything


def _bytes(meta):
    return math.prod(meta.shape) * item_bytes(meta.dtype)


@pytest.mark.parametrize("rows", [5, 1])
def test_the_gradients_are_those_of_fp64(rows):
    """Every chain runs in C++: no gradient is further from fp64's than four times eager's."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model, x = Block(), torch.randn(rows, 16)
    wide = Block().double()
    wide.load_state_dict(model.state_dict())
    plain = Block()
    plain.load_state_dict(model.state_dict())
    graphs = []

    def backend(graph_module, given):
        graphs.append(fuse_graph(graph_module, given, OPTIONS))
        return graphs[-1]

    compiled = torch.compile(model, backend=backend, dynamic=False)
    for call, given in ((compiled, x), (plain, x), (wide, x.double())):
        call(given).square().mean().backward()
    assert all(graph.is_rewritten for graph in graphs)
    for (key, ours), theirs, truth in zip(model.named_parameters(), plain.parameters(), wide.parameters(), strict=True):
        unit = torch.finfo(torch.float32).eps * truth.grad.norm()
        assert (ours.grad - truth.grad).norm() <= 4 * (theirs.grad - truth.grad).norm() + 4 * unit, key
