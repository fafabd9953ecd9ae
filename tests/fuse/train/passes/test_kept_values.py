"""What torch's partitioner would keep without need is computed again, and gradients are eager's."""

from __future__ import annotations

import pytest
import torch

from fusion_advisor.fuse.train.passes.both_passes import BothPasses
from fusion_advisor.fuse.train.passes.kept_values import keep_less
from tests.runtime.torch_internals.test_autograd_graphs import halves_of


def graphs_and_gradients(function, *args):
    """Both graphs of a function's sum, and the gradients of its operands beside eager's own."""
    result, graphs = halves_of(function, *args, prepare=keep_less)
    sum(one.float().sum() for one in result).backward()
    own = [arg.detach().clone().requires_grad_(arg.requires_grad) for arg in args]
    sum(one.float().sum() for one in function(*own)).backward()
    for arg, other in zip(args, own, strict=True):
        assert (arg.grad is None) == (other.grad is None)
        if arg.grad is not None:
            torch.testing.assert_close(arg.grad, other.grad)
    return graphs


def kept_of(backward):
    """Shapes and dtypes of what a backward graph is given, without the gradients of the outputs."""
    values = [
        node.meta["val"] for node in backward.graph.nodes if node.op == "placeholder" and "tangents" not in str(node.target)
    ]
    return [(tuple(value.shape), value.dtype) for value in values]


def test_a_result_that_its_own_gradient_reads_is_computed_again():
    """Autograd reads a tanh detached; kept is what GELU's formula starts from, and what the next product reads."""
    torch.manual_seed(0)
    rows, up, down = (torch.randn(*shape, requires_grad=True) for shape in ((6, 4), (4, 8), (8, 4)))

    def gelu(rows, up, down):
        hidden = rows @ up
        return ((0.5 * hidden * (1 + torch.tanh(0.8 * (hidden + 0.04 * hidden.pow(3))))) @ down,)

    _, backward = graphs_and_gradients(gelu, rows, up, down)
    assert any("aten.tanh.default" in str(node.target) for node in backward.graph.nodes)
    assert sum(sorted(shape) == [6, 8] for shape, _ in kept_of(backward)) == 2


def loss_and_logits(logits, labels):
    return torch.nn.functional.cross_entropy(logits.float(), labels), logits


@pytest.mark.parametrize(
    ("dtype", "returns_logits", "is_again"),
    [(torch.bfloat16, True, True), (torch.bfloat16, False, True), (torch.float32, True, True), (torch.float32, False, False)],
)
def test_a_log_softmax_is_computed_again_where_that_keeps_fewer_bytes(dtype, returns_logits, is_again):
    torch.manual_seed(0)
    rows, weight = (torch.randn(*shape, dtype=dtype, requires_grad=True) for shape in ((6, 4), (4, 20)))
    labels = torch.arange(6)

    def loss(rows, weight, labels):
        return loss_and_logits(rows @ weight, labels)[: 1 + returns_logits]

    _, backward = graphs_and_gradients(loss, rows, weight, labels)
    assert any("_log_softmax.default" in str(node.target) for node in backward.graph.nodes) is is_again
    assert [kept for shape, kept in kept_of(backward) if shape == (6, 20)] == [dtype]


class Half:
    """A pass as it was traced."""

    instead = around = None

    def __init__(self, graph, _):
        self.graph = self.module = graph

    def __call__(self, *args):
        return self.graph(*args)

    def take(self, args):
        return self.graph(*args)


def test_the_passes_of_a_step_are_parted_so():
    rows, weight = (torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True) for shape in ((6, 4), (4, 20)))
    made = []

    def backend(graph_module, inputs):
        made.append(BothPasses(graph_module, inputs, Half))
        return made[-1].call

    loss = torch.compile(lambda rows, weight: loss_and_logits(rows @ weight, torch.arange(6))[0], backend=backend, dynamic=False)
    loss(rows, weight).backward()
    torch.compiler.reset()
    (both,) = made
    assert [kept for shape, kept in kept_of(both.graphs["backward"]) if shape == (6, 20)] == [torch.bfloat16]
