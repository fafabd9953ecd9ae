"""A backward pass frees what the forward pass kept as soon as it has read it, and may run twice where it is asked to."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from torch import nn

from fusion_advisor.capture.step_memory import record_step_memory
from fusion_advisor.fuse.train.passes.freed_arguments import FreeingCall, taking_a_list
from tests.fuse.train.test_trained_graph import WIDTH, Block, Counted, compare, gradients, step


class Deep(nn.Module):
    """Blocks one after the other: the first one's activations are read last."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(6)))

    def forward(self, x):
        return self.blocks(x)


@pytest.fixture(scope="module")
def deep():
    torch.manual_seed(0)
    model, backend = Deep(), Counted()
    plain = copy.deepcopy(model)
    compiled = torch.compile(model, backend=backend, dynamic=False)
    step(compiled, torch.randn(64, 8, WIDTH))  # it rewrites both passes
    assert any(backend.changed)
    yield model, plain, compiled
    torch.compiler.reset()


def test_a_list_is_emptied_and_each_argument_is_freed_after_its_last_use():
    alive = []

    def note(value):
        alive.append(first() is not None)
        return value * 2

    graph = torch.fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    twice = graph.call_function(torch.add, (a, a))
    graph.output((graph.call_function(note, (graph.call_function(torch.mul, (twice, b)),)), b))
    module = torch.fx.GraphModule(nn.Module(), graph)
    args = [torch.ones(3), torch.full((3,), 2.0)]
    first = weakref.ref(args[0])
    expected = module(*args)
    assert alive == [True]
    found = taking_a_list(module)(args)
    assert args == [] and alive == [True, False]
    assert all(map(torch.equal, found, expected))


def test_other_strides_are_not_served():
    module = torch.fx.symbolic_trace(nn.GELU())
    call = FreeingCall.of(module.forward, [torch.ones(3, 4)])
    assert call is not None and call.serves([torch.ones(3, 4)])
    assert not call.serves([torch.ones(4, 3).t()])
    assert FreeingCall.of(torch.exp, [torch.ones(3)]) is None


def test_activations_go_while_gradients_come(deep):
    """When half of the gradients are there, a good part of what the forward pass kept is no longer held."""
    model, _, compiled = deep
    x = torch.randn(64, 8, WIDTH)

    def run():
        model.zero_grad(set_to_none=True)
        step(compiled, x)

    run()
    held = record_step_memory(run, label="fused", on_cuda=False)
    half = max(held.gradient_bytes) / 2
    late = next(at for at, size in enumerate(held.gradient_bytes) if size >= half)
    assert held.backward_share < held.at_share[late] < 1
    assert held.activation_bytes[late] < 0.8 * max(held.activation_bytes)


def test_gradients_are_eagers_and_a_backward_pass_may_run_twice(deep):
    model, plain, compiled = deep
    x = torch.randn(64, 8, WIDTH)
    for one, call in ((model, compiled), (plain, plain)):
        one.zero_grad(set_to_none=True)
        loss = call(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
    compare(gradients(model), gradients(plain))


def test_a_gradient_in_other_strides_is_served(deep):
    model, plain, compiled = deep
    x, gradient = torch.randn(64, 8, WIDTH), torch.randn(WIDTH, 8, 64).permute(2, 1, 0) / 1000
    for one, call in ((model, compiled), (plain, plain)):
        one.zero_grad(set_to_none=True)
        call(x).backward(gradient)
    compare(gradients(model), gradients(plain))
