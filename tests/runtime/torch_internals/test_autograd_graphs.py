"""Both passes of a dynamo graph as graphs of their own."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fusion_advisor.errors import NoSecondDerivative
from fusion_advisor.runtime.torch_internals import autograd_graphs


def halves_of(function, *args, prepare=None):
    """Compile a function with both passes as they are; returns (result, graphs of the passes)."""
    seen = []

    def take(graph_module):
        seen.append(graph_module)
        return graph_module.forward

    def backend(graph_module, inputs):
        return autograd_graphs.with_backward(graph_module, inputs, take, take, prepare=prepare)

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


def test_both_passes_can_be_made_after_dynamos_trace_has_ended():
    later = []

    def backend(graph_module, inputs):
        trace = autograd_graphs.within_this_trace()

        def made():
            with trace():
                return autograd_graphs.with_backward(graph_module, inputs, lambda one: one.forward, lambda one: one.forward)

        later.append(made)
        return graph_module.forward

    x = torch.randn(5, requires_grad=True)
    torch.compile(lambda x: torch.nn.functional.gelu(x).sum(), backend=backend, dynamic=False)(x)
    (result,) = later[0]()(x)
    result.backward(retain_graph=True)
    result.backward()  # what the forward pass kept is there still
    own = x.detach().clone().requires_grad_()
    torch.nn.functional.gelu(own).sum().backward()
    torch.testing.assert_close(x.grad, 2 * own.grad)
    assert autograd_graphs.within_this_trace()() is not None  # outside of a trace there is nothing to go back to
    torch.compiler.reset()


def test_a_gradient_that_is_not_asked_for_is_none_where_a_pass_takes_none_and_zeros_elsewhere():
    def given(takes_none):
        seen = []

        class Backward:
            def __init__(self, graph):
                self.graph, self.takes_none = graph, takes_none

            def take(self, args):
                places = map(autograd_graphs.output_of_gradient, self.graph.graph.find_nodes(op="placeholder"))
                seen.append([one for place, one in zip(places, args, strict=True) if place == 1])
                return [torch.ones(3)]

        def backend(graph_module, inputs):
            return autograd_graphs.with_backward(graph_module, inputs, lambda graph: graph.forward, Backward)

        x = torch.randn(3, requires_grad=True)
        first, _ = torch.compile(lambda x: (x.sin().sum(), x.cos()), backend=backend, dynamic=False)(x)
        first.backward()
        torch.compiler.reset()
        return seen

    assert given(True) == [[None]]
    ((zeros,),) = given(False)
    assert not zeros.any() and zeros.shape == (3,)


@pytest.mark.parametrize("reads_weights", [True, False])
def test_a_gradient_that_is_differentiated_says_that_it_has_none(reads_weights):
    x = torch.randn(3, requires_grad=True)
    result, _ = halves_of(lambda x: ((x.sin() if reads_weights else x) * 2).sum(), x)
    (gradient,) = torch.autograd.grad(result, x, create_graph=True)
    torch.testing.assert_close(gradient.detach(), 2 * x.detach().cos() if reads_weights else torch.full((3,), 2.0))
    assert gradient.requires_grad
    with pytest.raises(NoSecondDerivative, match=r"fused\.revert\(\)"):
        gradient.square().sum().backward()


class Doubled(torch.autograd.Function):
    """Hands on a gradient that nobody else holds."""

    seen = None

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        made = 2 * gradient
        Doubled.seen = weakref.ref(made)
        return made


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch itself holds what it is given until 2.13")
def test_what_a_backward_pass_is_given_is_free_once_it_has_emptied_its_list():
    held = []

    class Backward:
        def __init__(self, graph):
            self.graph = graph

        def take(self, args):
            gradients = self.graph.forward(*args)
            args.clear()
            held.append(Doubled.seen() is not None)
            return gradients

    def backend(graph_module, inputs):
        return autograd_graphs.with_backward(graph_module, inputs, lambda graph: graph.forward, Backward)

    x = torch.randn(4, requires_grad=True)
    Doubled.apply(torch.compile(lambda x: x.sin(), backend=backend, dynamic=False)(x)).sum().backward()
    torch.compiler.reset()
    assert held == [False]


def test_what_another_compiled_step_made_before_is_left_alone():
    """A view of an input is a result too; its node is that of whoever made the input."""

    class Backward:
        takes_none = True

        def __init__(self, graph):
            self.take = lambda args: graph.forward(*args)

    def earlier(graph_module, inputs):
        return autograd_graphs.with_backward(graph_module, inputs, lambda graph: graph.forward, lambda graph: graph.forward)

    def later(graph_module, inputs):
        return autograd_graphs.with_backward(graph_module, inputs, lambda graph: graph.forward, Backward)

    x = torch.randn(4, requires_grad=True)
    one, _ = torch.compile(lambda x: (x.sin(), x.cos()), backend=earlier, dynamic=False)(x)
    later_step = torch.compile(lambda one: (one.view(2, 2), (two := one.exp())[:2], two[1:]), backend=later, dynamic=False)
    view, *parts = later_step(one)
    (view.sum() + sum(part.sum() for part in parts)).backward()  # nothing is asked of the cosine: autograd makes zeros for it
    own = x.detach().clone().requires_grad_()
    made = own.sin().exp()
    (own.sin().sum() + made[:2].sum() + made[1:].sum()).backward()
    torch.testing.assert_close(x.grad, own.grad)
    torch.compiler.reset()


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


class Calls(TorchDispatchMode):
    """Counts calls of an op."""

    def __init__(self, op):
        super().__init__()
        self.op, self.count = op, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is self.op
        return func(*args, **kwargs or {})


def test_dynamos_graph_with_a_checkpoint_has_eagers_gradients_and_computes_again():
    """With a checkpoint in a checkpoint and an argument by name; dropout drops the same in both passes."""

    def inner(x, scale=1.0):
        return torch.nn.functional.dropout(torch.nn.functional.gelu(x * scale), 0.4)

    def outer(x, y):
        return checkpoint(inner, x, use_reentrant=False, scale=2.0, preserve_rng_state=True) + y.sin()

    def model(x):
        return checkpoint(outer, x, x.cos(), use_reentrant=False) + checkpoint(inner, x, use_reentrant=False)

    seen, found = [], []

    def backend(graph_module, inputs):
        seen.append(graph_module)
        return autograd_graphs.own_call(graph_module)

    for call in (torch.compile(model, backend=backend, dynamic=False), model):
        x = torch.randn(64, generator=torch.Generator().manual_seed(0)).requires_grad_()
        torch.manual_seed(1)
        result = call(x)
        with Calls(torch.ops.aten.gelu.default) as calls:
            result.square().sum().backward()
        found.append((result.detach(), x.grad))
        assert calls.count >= 2
    torch.compiler.reset()
    assert len(seen) == 1 and any("checkpoint" in str(node.target) for node in seen[0].graph.nodes)
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_graph_without_a_checkpoint_is_its_own_call():
    graph = torch.fx.symbolic_trace(lambda x: torch.relu(x) + 1)
    assert autograd_graphs.own_call(graph) == graph.forward


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


def test_a_checkpoint_that_writes_to_an_input_is_known_by_its_joint_graph():
    def add(x, count):
        count.add_(1)
        return x.sin()

    def forward_of(graph_module):
        return graph_module.forward

    def writes(function):
        found = []

        def note(joint):
            found.append(autograd_graphs.writes_in_checkpoint(joint))

        def backend(graph_module, inputs):
            return autograd_graphs.with_backward(graph_module, inputs, forward_of, forward_of, prepare=note)

        torch.compile(function, backend=backend, dynamic=False)(torch.ones(2, requires_grad=True), torch.zeros(2))
        torch.compiler.reset()
        return found

    assert writes(lambda x, count: checkpoint(add, x, count, use_reentrant=False)) == [True]
    assert writes(add) == [False]
    assert writes(lambda x, count: checkpoint(torch.sin, x, use_reentrant=False) + count.add_(1)) == [False]
