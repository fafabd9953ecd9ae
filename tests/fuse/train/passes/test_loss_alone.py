"""Steps that return logits beside their loss: no zeros for the logits' gradient, and right gradients whoever is given one."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from fusion_advisor.capture.graph.fx_nodes import storages
from fusion_advisor.fuse.train.passes.kept_values import keep_less
from fusion_advisor.fuse.train.passes.loss_alone import OTHER_GRADIENTS, for_loss_alone
from fusion_advisor.runtime.torch_internals import autograd_graphs
from tests.fuse.step_graph.fake_passes import FakePasses
from tests.fuse.train.kept_graphs import KeptGraphs
from tests.fuse.train.test_chunked_losses import ROWS, WORDS, Speaker, batch
from tests.fuse.train.test_trained_graph import OPTIONS, compare, gradients

WHOLE = replace(OPTIONS, skip=("linear-cross-entropy",))


@pytest.fixture(autouse=True)
def _forget():
    yield
    torch.compiler.reset()


def made(model=None, options=WHOLE):
    torch.manual_seed(0)
    model, backend = model or Speaker(returns_logits=True), KeptGraphs(options)
    return model, copy.deepcopy(model), torch.compile(model, backend=backend, dynamic=False), backend


class Zeros(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the sizes of tensors that are made of zeros."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **kwargs or {})
        if "zero" in str(func):
            self.sizes.append(found.numel())
        return found


def test_the_loss_alone_has_a_gradient_and_nobody_makes_zeros():
    model, plain, compiled, backend = made()
    compiled(*batch())[0].backward()  # verified
    (graph,) = backend.graphs
    inputs = [node for node in graph.halves[1].graph.graph.nodes if str(node.target).startswith("tangents")]
    assert graph.is_rewritten and [node.meta["val"].numel() for node in inputs] == [1]
    assert graph.halves[1].is_changed and graph.outcome.check.is_passed
    loss, logits = compiled(*batch())
    with Zeros() as zeros:
        loss.backward()
    assert ROWS * WORDS not in zeros.sizes
    for _ in range(2):
        plain(*batch())[0].backward()
    compare(gradients(model), gradients(plain))
    torch.testing.assert_close(logits, plain(*batch())[1], rtol=2e-5, atol=2e-6)


def test_views_lie_in_the_memory_of_what_they_show():
    """A view of the sum that was left out would count as a copy, and end the chain of the loss's gradient."""
    _, _, compiled, backend = made()
    compiled(*batch())[0].backward()
    nodes = list(backend.graphs[0].halves[1].graph.graph.nodes)
    views = [node for node in nodes if node.target is torch.ops.aten.view.default]
    assert views and all(storages(node) == storages(node.args[0]) for node in views)


@pytest.mark.parametrize("ends", [(1,), (0, 1), (0,)], ids=["logits", "both", "loss"])
def test_whichever_output_is_given_a_gradient(ends):
    """Of the logits alone the loss has none."""
    model, plain, compiled, _ = made()
    compiled(*batch())[0].backward()
    plain(*batch())[0].backward()
    weight = torch.randn(4, ROWS // 4, WORDS, generator=torch.Generator().manual_seed(2))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for call in (compiled, plain):
            for _ in range(2):
                outputs = call(*batch(2))
                values = (outputs[0], (outputs[1] * weight).mean())
                sum(values[end] for end in ends).backward(retain_graph=True)
                sum(values[end] for end in ends).backward()
    assert sum(OTHER_GRADIENTS in str(one.message) for one in said) == (1 in ends)
    compare(gradients(model), gradients(plain))


def test_hooks_on_gradients_of_either_kind_and_a_checkpoint_around_the_model():
    model, plain, compiled, _ = made()
    for one, call in ((model, compiled), (plain, plain)):
        handle = one.head.weight.register_hook(lambda gradient: 2 * gradient)
        torch.utils.checkpoint.checkpoint(call, *batch(), use_reentrant=False)[0].backward()
        call(*batch())[0].backward()
        handle.remove()
    compare(gradients(model), gradients(plain))


class ReadTwice(Speaker):
    """The logits that are returned are scaled: their gradient is multiplied before it is added."""

    def forward(self, words, labels):
        loss, logits = super().forward(words, labels)
        return loss, 0.5 * logits


class TwoStates(nn.Module):
    """A part of a model: both outputs go on, and both have gradients."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(24, 24)

    def forward(self, x):
        x = functional.gelu(self.layer(x))
        return x, x.square()


def test_where_a_gradient_is_more_than_added_or_no_output_is_one_number_all_are_asked_for():
    model, plain, compiled, backend = made(ReadTwice(returns_logits=True))
    compiled(*batch())[0].backward()
    plain(*batch())[0].backward()
    compare(gradients(model), gradients(plain))
    x = torch.randn(8, 24)
    other, own, call, more = made(TwoStates())
    for one in (call, own):
        sum(value.mean() for value in one(x)).backward()
    compare(gradients(other), gradients(own))
    for kept in (backend, more):
        backward = kept.graphs[0].halves[1].graph
        assert sum(str(node.target).startswith("tangents") for node in backward.graph.nodes) == 2


def test_small_gradients_are_left_alone_and_the_pass_itself_stays_as_it_is():
    seen = []

    def take(graph_module):
        seen.append(graph_module)
        return graph_module.forward

    def backend(graph_module, inputs):
        return autograd_graphs.with_backward(graph_module, inputs, take, take, prepare=keep_less)

    torch.compile(Speaker(returns_logits=True), backend=backend, dynamic=False)(*batch())
    before = str(seen[1].graph)
    assert for_loss_alone(seen[1]) is None
    found = for_loss_alone(seen[1], ROWS * WORDS * 4)
    assert found.outputs == {1} and len(found.places) == 1 and str(seen[1].graph) == before
    assert len(found.graph.graph.nodes) < len(seen[1].graph.nodes)


def test_a_graph_of_the_step_replays_it_and_logits_with_a_gradient_are_launched():
    from fusion_advisor.fuse.dynamo_backend import fuse_graph
    from fusion_advisor.fuse.train.trained_graph import TrainedGraph

    graphs = []

    def trained(*args, **more):
        graphs.append(TrainedGraph(*args, **more, make_recorder=FakePasses))
        return graphs[-1]

    def backend(graph_module, inputs):
        return fuse_graph(graph_module, inputs, replace(WHOLE, only=("no_kernel", "cuda-graph")), trained=trained)

    torch.manual_seed(0)
    model = Speaker(returns_logits=True)
    plain, compiled = copy.deepcopy(model), torch.compile(model, backend=backend, dynamic=False)
    for number in range(3):
        for call in (compiled, plain):
            call(*batch(number))[0].backward()
    before = list(graphs[0].step_graph.replays)
    assert min(before) > 2
    with pytest.warns(UserWarning, match="an output beside the loss"):
        compiled(*batch())[1].square().mean().backward()
    plain(*batch())[1].square().mean().backward()
    assert graphs[0].step_graph.replays == [before[0] + 1, before[1]]
    for call in (compiled, plain):
        call(*batch(5))[0].backward()
    assert graphs[0].step_graph.replays == [before[0] + 2, before[1] + 1]
    compare(gradients(model), gradients(plain))
