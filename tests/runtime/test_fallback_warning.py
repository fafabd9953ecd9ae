"""Whatever calls the model, and however deep the reason is found out: the warning stands at the line which called it."""

from __future__ import annotations

import linecache

import pytest
import torch

from fusion_advisor.fuse.cuda_graph.replay import Graphs
from fusion_advisor.fuse.dynamo_backend import fusion_advisor
from tests.fuse.cuda_graph.fake_graph import FakeRecorder
from tests.tiny import Toy, fuse, toy


def line_of(caught):
    """Return the source line that the only warning points at."""
    (warning,) = caught
    assert warning.filename == __file__
    return linecache.getline(warning.filename, warning.lineno).strip()


def test_a_call_of_the_model_and_one_of_the_fused_model():
    model, (x,) = toy()
    with fuse(model, (x,)) as fused:
        with pytest.warns(UserWarning, match="gradients") as caught:
            model(x)
        assert line_of(caught) == "model(x)"
        with torch.no_grad(), pytest.warns(UserWarning, match="not verified") as caught:
            fused(x[:1])
        assert line_of(caught) == "fused(x[:1])"


def test_a_call_inside_of_torchs_modules_points_at_the_call_of_those():
    model, (x,) = toy()
    whole = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Sequential(model))
    with fuse(model, (x,)), pytest.warns(UserWarning, match="gradients") as caught:
        whole(x)
    assert line_of(caught) == "whole(x)"


def test_a_graph_that_dynamo_compiles_anew_behind_a_break_is_told_at_the_call_and_not_in_the_models_forward():
    class Broken(Toy):
        shift = 1.0

        def forward(self, x):
            y = super().forward(x)
            torch._dynamo.graph_break()
            return super().forward(y) + self.shift

    torch.manual_seed(0)
    model = Broken().eval()
    (x,) = toy()[1]
    with torch.no_grad(), fuse(model, (x,)):
        model(x)
        model.shift = 2.0
        with pytest.warns(UserWarning, match="captured a graph that was not verified") as caught:
            model(x)
    assert line_of(caught) == "model(x)"


def test_a_call_without_its_cuda_graph():
    model, (x,) = toy()
    fused = fuse(model, (x,))
    recorder = FakeRecorder()
    recorder.why_not = "stream is capturing"
    fused.graphs = Graphs(recorder)
    with fused, torch.no_grad(), pytest.warns(UserWarning, match="without its CUDA graph: stream is capturing") as caught:
        model(x)
    assert line_of(caught) == "model(x)"


def test_a_graph_that_our_backend_leaves_to_dynamo():
    model, (x,) = toy()
    compiled = torch.compile(model, backend=fusion_advisor, dynamic=True)
    with pytest.warns(UserWarning, match="gradients are enabled, and its sizes are open") as caught:
        compiled(x)
    assert line_of(caught) == "compiled(x)"
