"""Each kind of chain under ``torch.autograd.gradcheck`` in fp64, both passes by kernels of the C++ backend.

``gradcheck`` compares the gradients with differences of outputs, and with themselves from run to run, bit by bit.
"""

from __future__ import annotations

import functools
import shutil
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from fusion_advisor.fuse.dynamo_backend import fuse_graph
from fusion_advisor.fuse.train.judge.gradients import check_gradients
from fusion_advisor.fuse.train.trained_graph import TrainedGraph
from tests.fuse.train.test_trained_graph import OPTIONS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler"),
]
ROWS, WIDTH = 6, 8


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gate(x, y):
    return functional.silu(x) * y + functional.gelu(x, approximate="tanh") * torch.sigmoid(y)


def activations(x, y):
    return functional.gelu(x) + functional.softplus(y) * torch.tanh(x) + functional.elu(x * y) + functional.leaky_relu(y + 0.1)


def rms_norm(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def layer_norm(x, weight, bias):
    return functional.layer_norm(x * 2, (WIDTH,), weight, bias) + x


def attention(q, k, v):
    scores = (q @ k.transpose(-1, -2) * 0.3).masked_fill(torch.ones(4, 4).triu(1).bool(), float("-inf"))
    return torch.softmax(scores, -1) @ v


def log_softmax(x, y):
    return functional.log_softmax(x * y, -1).square()


def cross_entropy(x, y):
    return functional.cross_entropy(x * 2 + y, torch.tensor([0, 3, 7, -100, 2, 5]))


def rotated_and_repeated(x, table):
    """A rotary embedding of two heads, each of which is read by three of queries."""
    keys = x.view(3, 2, 2, 4).transpose(1, 2)
    turned = keys * torch.cos(table) + torch.cat((-keys[..., 2:], keys[..., :2]), -1) * torch.sin(table)
    return torch.tanh(turned[:, :, None].expand(3, 2, 3, 2, 4).reshape(3, 6, 2, 4))


def sliced_and_padded(x, y):
    return functional.pad(x[1:4] * y[2:5, None, 0], (1, 2, 0, 1)).exp() * functional.pad(torch.softmax(y[:4], -1), (1, 2))


def bias_of_columns(x, bias):
    return torch.tanh(x + bias) * (x - bias.exp())


def masked(x, y):
    """What a dropout does once its mask is drawn."""
    return functional.gelu(x * 1.25 * (y.detach() > 0)) + y


def variance(x, y):
    return (x - y.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-3)


def clamped(x, y):
    return functional.hardtanh(x, -0.5, 1.5) * y + functional.relu(y) * functional.hardsigmoid(x)


def recomputed(x, y):
    return functional.relu(y) * functional.relu(x)


W = (WIDTH,)
KINDS = {
    "gate": (gate, [(ROWS, WIDTH), (ROWS, WIDTH)]),
    "activations": (activations, [(ROWS, WIDTH), (ROWS, WIDTH)]),
    "clamped": (clamped, [(ROWS, WIDTH), (ROWS, WIDTH)]),
    "recomputed": (recomputed, [(ROWS, WIDTH), (ROWS, WIDTH)]),
    "rms norm": (rms_norm, [(ROWS, WIDTH), W]),
    "layer norm": (layer_norm, [(ROWS, WIDTH), W, W]),
    "variance": (variance, [(ROWS, WIDTH), (ROWS, WIDTH)]),
    "attention": (attention, [(2, 4, 3), (2, 4, 3), (2, 4, 3)]),
    "log_softmax": (log_softmax, [(ROWS, WIDTH), (ROWS, WIDTH)]),
    "cross entropy": (cross_entropy, [(ROWS, WIDTH), (ROWS, WIDTH)]),
    "rotated and repeated": (rotated_and_repeated, [(ROWS, WIDTH), (2, 4)]),
    "sliced and padded": (sliced_and_padded, [(ROWS, WIDTH), (ROWS, WIDTH)]),
    "bias of columns": (bias_of_columns, [(ROWS, WIDTH), W]),
    "masked": (masked, [(ROWS, WIDTH), (ROWS, WIDTH)]),
}
"""What is called, and the shapes of its arguments."""


def near(*rows):
    """In fp64 eager is the truth, and has no error of its own: ours may be a few last places off."""
    found = check_gradients(*rows)
    return replace(found, is_passed=found.fused_rel_l2 < 1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_the_slopes_of_what_the_kernels_compute(kind):
    function, shapes = KINDS[kind]
    given = [drawn(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]
    graphs = []

    def backend(graph_module, inputs):
        graphs.append(fuse_graph(graph_module, inputs, OPTIONS, trained=functools.partial(TrainedGraph, check=near)))
        return graphs[-1]

    compiled = torch.compile(function, backend=backend, dynamic=False)
    assert torch.autograd.gradcheck(compiled, given)
    torch.compiler.reset()
    (graph,) = graphs
    assert graph.is_rewritten, graph.outcome
    forward, backward = graph.halves
    # One chain is the whole pass. Torch's hardtanh has two gradients at NaN, by an element's place in a vector; a kernel has one.
    assert backward.is_changed or kind == "clamped"
    assert forward.is_changed or kind == "layer norm"  # in fp64 torch's own norm is the truth, and the kernel one place off
