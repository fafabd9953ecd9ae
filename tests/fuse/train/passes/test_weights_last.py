"""Weights' gradients that read what is computed again wait for the input's gradient, and no others do."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from fusion_advisor.fuse.loss.recompute_options import GELU_CHECKPOINT, RECOMPUTE_OPTIONS
from fusion_advisor.fuse.train.passes.weights_last import sink_weight_gradients
from fusion_advisor.runtime.torch_internals import autograd_graphs, fx_trace

WIDTH = 16
(OPTION,) = (one for one in RECOMPUTE_OPTIONS if one.rewrite is GELU_CHECKPOINT)


class Gated(nn.Module):
    def __init__(self, *, has_bias=False):
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=has_bias) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=has_bias)

    def forward(self, x):
        return self.down(functional.silu(self.gate(x)) * self.up(x))


def backward_of(model, prepare, x):
    found = []

    def keep(graph):
        found.append(fx_trace.copied_graph(graph))
        return graph.forward

    def backend(graph_module, given):
        return autograd_graphs.with_backward(graph_module, given, lambda graph: graph.forward, keep, prepare=prepare)

    torch.compile(model, backend=backend, dynamic=False)(x)
    torch.compiler.reset()
    return found[0]


def order(graph_module):
    return [node.name for node in graph_module.graph.nodes]


@pytest.mark.parametrize("x", [torch.randn(5, WIDTH), torch.randn(2, 5, WIDTH)], ids=["rows", "batches"])
def test_the_product_waits_and_results_stay(x):
    torch.manual_seed(0)
    backward = backward_of(Gated(), OPTION.put, x.requires_grad_())
    inputs = [torch.randn(node.meta["val"].shape) for node in backward.graph.nodes if node.op == "placeholder"]
    before, names = backward(*inputs), order(backward)
    sunk = sink_weight_gradients(backward)
    assert order(sunk) != names and sorted(order(sunk)) == sorted(names)
    products = [node for node in sunk.graph.nodes if node.target is torch.ops.aten.mm.default]
    assert products[1].name < products[0].name or names.index(products[1].name) < names.index(products[0].name)
    assert [node.name for node in products[2:]] == [name for name in names if name in {n.name for n in products[2:]}]
    for one, other in zip(before, sunk(*inputs), strict=True):
        assert one is other is None or torch.equal(one, other)


@pytest.mark.parametrize("has_bias", [False, True])
def test_what_is_kept_is_read_where_it_was(has_bias):
    backward = backward_of(Gated(has_bias=has_bias), lambda _: 0, torch.randn(5, WIDTH, requires_grad=True))
    names = order(backward)
    assert order(sink_weight_gradients(backward)) == names


def test_the_cast_of_a_weight_moves_nothing():
    class Cast(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

        def forward(self, x):
            return functional.linear(x.bfloat16(), self.weight.bfloat16())

    backward = backward_of(Cast(), _cast_again, torch.randn(5, WIDTH, requires_grad=True))
    names = order(backward)
    assert order(sink_weight_gradients(backward)) == names


def _cast_again(joint):
    for node in joint.graph.find_nodes(op="call_function", target=torch.ops.aten._to_copy.default):
        node.meta["recompute"] = torch.utils.checkpoint.CheckpointPolicy.PREFER_RECOMPUTE
    return 1
