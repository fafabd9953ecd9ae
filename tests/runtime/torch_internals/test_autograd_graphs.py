"""Both passes of a dynamo graph as graphs of their own."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fusion_advisor.runtime.torch_internals import autograd_graphs


def halves_of(function, *args):
    """Compile a function with both passes as they are; returns (result, graphs of the passes)."""
    seen = []

    def take(graph_module):
        seen.append(graph_module)
        return graph_module.forward

    def backend(graph_module, inputs):
        return autograd_graphs.with_backward(graph_module, inputs, take, take)

    result = torch.compile(function, backend=backend, dynamic=False)(*args)
    torch.compiler.reset()
    return result, seen


def test_there_is_a_graph_for_each_pass_and_the_backward_pass_may_run_twice():
    x = torch.randn(5, requires_grad=True)
    result, seen = halves_of(lambda x: torch.nn.functional.gelu(x).sum(), x)
    result.backward(retain_graph=True)
    result.backward()
    assert len(seen) == 2
    own = x.detach().clone().requires_grad_()
    torch.nn.functional.gelu(own).sum().backward()
    torch.testing.assert_close(x.grad, 2 * own.grad)


def test_both_graphs_are_handed_over_before_the_first_backward_pass():
    x = torch.randn(5, requires_grad=True)
    _, seen = halves_of(lambda x: torch.nn.functional.gelu(x).sum(), x)
    assert len(seen) == 2


def test_attention_is_kept_under_a_checkpoint_and_what_is_not_random_is_computed_again():
    x = torch.randn(1, 2, 8, 16, requires_grad=True)

    def attend(x):
        return torch.nn.functional.scaled_dot_product_attention(x.sin(), x, x)

    result, (forward, backward) = halves_of(lambda x: checkpoint(attend, x, use_reentrant=False).sum(), x)
    result.backward()
    own = x.detach().clone().requires_grad_()
    attend(own).sum().backward()
    torch.testing.assert_close(x.grad, own.grad)
    names = {which: [str(node.target) for node in graph.graph.nodes] for which, graph in (("F", forward), ("B", backward))}
    assert not any("rng_state" in name for found in names.values() for name in found)
    assert sum("dot_product" in name for name in names["F"]) == 1
    assert [name for name in names["B"] if "dot_product" in name and "backward" not in name] == []
    assert any("aten.sin" in name for name in names["B"])


def test_a_copy_of_a_graph_may_be_changed():
    graph = torch.fx.symbolic_trace(lambda x: torch.relu(x) + 1)
    copy = autograd_graphs.copied_graph(graph)
    copy.graph.find_nodes(op="call_function", target=torch.relu)[0].target = torch.neg
    copy.recompile()
    x = torch.tensor([2.0])
    assert copy(x) == -1 and graph(x) == 3


@pytest.mark.parametrize(
    ("function", "is_random"),
    [
        (lambda x: torch.ops.aten.native_dropout.default(x, 0.5, True), True),
        (lambda x: torch.ops.aten.native_dropout.default(x, 0.5, False), False),
        (lambda x: torch.ops.aten.native_dropout.default(x, 0.0, True), False),
        (lambda x: torch.ops.aten.bernoulli.default(x) + 1, True),
        (lambda x: torch.ops.aten.scaled_dot_product_attention.default(x, x, x), False),
        (lambda x: torch.ops.aten.scaled_dot_product_attention.default(x, x, x, None, 0.1), True),
        (lambda x: torch.ops.aten.relu.default(x) + 1, False),
    ],
)
def test_which_ops_draw_numbers(function, is_random):
    assert autograd_graphs.draws_numbers(torch.fx.symbolic_trace(function)) is is_random


def kept_bytes(memory_budget):
    """What the forward pass of four layers keeps, its gradients, and the backward graph's ops."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU()) for _ in range(4)))
    graphs = []

    def take(graph_module):
        graphs.append(graph_module)
        return graph_module.forward

    def backend(graph_module, inputs):
        return autograd_graphs.with_backward(graph_module, inputs, take, take, memory_budget=memory_budget)

    torch.compile(model, backend=backend, dynamic=False)(torch.ones(64, 16)).square().sum().backward()
    torch.compiler.reset()
    given = [node for node in graphs[1].graph.nodes if node.op == "placeholder" and "tangents" not in str(node.target)]
    sizes = [node.meta["val"].nbytes for node in given if node.meta["val"].shape[0] == 64]
    return sum(sizes), [parameter.grad.clone() for parameter in model.parameters()]


def test_a_memory_budget_keeps_less_and_gives_the_same_gradients():
    whole, gradients = kept_bytes(1.0)
    half, of_half = kept_bytes(0.5)
    least, of_least = kept_bytes(0.0)
    assert least < half < whole
    for found in (of_half, of_least):
        for mine, own in zip(found, gradients, strict=True):
            torch.testing.assert_close(mine, own)
