"""On a GPU both peaks are measured before recompute options are tried, with what CUDA graphs will hold."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from fusion_advisor.fuse.dynamo_backend import fuse_graph
from fusion_advisor.fuse.loss.recompute_options import GELU_CHECKPOINT
from fusion_advisor.fuse.rewrite.device_memory import transient_bytes
from fusion_advisor.fuse.train.trained_graph import TrainedGraph
from fusion_advisor.records import Status
from tests.fuse.train.test_trained_graph import OPTIONS

pytestmark = pytest.mark.gpu
LAYERS, ROWS, WIDTH = 8, 8192, 1024


class Wide(nn.Module):
    """Layers of GELU whose weights' gradients are a tenth of what they keep."""

    def __init__(self):
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(LAYERS))
        self.down = nn.ModuleList(nn.Linear(4 * WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x):
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(functional.gelu(up(x)))
        return x.float().square().mean()


class Watched(TrainedGraph):
    """Keeps what its options were chosen by."""

    choice = None

    def _choice(self, *args, **kwargs):
        self.choice = super()._choice(*args, **kwargs)
        return self.choice


def test_the_peak_that_options_are_chosen_by_is_that_of_the_step_in_graphs():
    graphs = []
    options = replace(OPTIONS, keep="paying", effort="quick", only=("no_kernel", "cuda-graph", GELU_CHECKPOINT.id))

    def backend(graph_module, inputs):
        graphs.append(fuse_graph(graph_module, inputs, options, trained=Watched))
        return graphs[-1]

    torch.manual_seed(0)
    model = Wide().cuda().bfloat16()
    plain, x = copy.deepcopy(model), torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(model, backend=backend, dynamic=False)

    def step(one):
        one.zero_grad(set_to_none=True)
        one(x).backward()

    for _ in range(4):
        step(compiled)
    step(plain)
    for name, parameter in plain.named_parameters():
        ours = model.get_parameter(name).grad
        assert (ours - parameter.grad).float().norm() <= 0.02 * parameter.grad.float().norm(), name
    (graph,) = graphs
    rows = {row.id: row for row in graph.outcome.step_rows}
    peaks, row = graph.choice.peaks, rows[GELU_CHECKPOINT.id]
    model.zero_grad(set_to_none=True)
    plain.zero_grad(set_to_none=True)
    assert peaks.eager_bytes == pytest.approx(transient_bytes(torch.enable_grad()(lambda: step(plain)), on_cuda=True), rel=0.1)
    assert "eager's" in row.reason and (not peaks.is_above or row.status in (Status.KEPT, Status.SLOWER))
    if graph.step_graph.is_on:
        held = graph.step_graph.pool_bytes
        model.zero_grad(set_to_none=True)
        taken = held + transient_bytes(torch.enable_grad()(lambda: step(compiled)), on_cuda=True)
        spared = row.saved_bytes if row.status is Status.KEPT else 0
        assert taken == pytest.approx(peaks.ours_bytes - spared, rel=0.15)
    torch.compiler.reset()
