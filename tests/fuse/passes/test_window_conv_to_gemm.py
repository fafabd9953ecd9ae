"""Long windows as batched products: the convolution's numbers and strides, and what is left to cuDNN."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fusion_advisor.capture.graph.op_records import describe
from fusion_advisor.capture.graph.split_bias import split_bias
from fusion_advisor.capture.graph.tracer import capture_regions
from fusion_advisor.fuse.decide.predict import price_passes
from fusion_advisor.fuse.decide.session import Bench
from fusion_advisor.fuse.passes.window_conv_to_gemm import windows_as_gemm
from fusion_advisor.fuse.rewrite.graph_rewriter import rewrite_region
from fusion_advisor.records import GraphRewrite, Status
from tests.tiny import profile_live


def rewritten(model, x, *, bias_apart=False):
    """Return the rewritten module and how many convolutions it replaced, after comparing its results with fp64."""
    with torch.no_grad():
        (region,) = capture_regions(model.eval(), (x,), {}).regions
        if bias_apart:
            assert split_bias(region.graph, lambda *_: True, lambda _: False) == 1
        module, (count,) = rewrite_region(region, describe(region, first_index=0)[1], [], [windows_as_gemm])
        module.graph.lint()
        (ours,), expected = module(*region.example_args), model(x)
        truth = model.double()(x.double())
        model.to(x.dtype)
    assert ours.stride() == expected.stride() and ours.shape == expected.shape
    own_error = (expected.double() - truth).norm()
    # A CPU's convolution rounds once, with its bias. Ours rounds before the bias and after it, as cuDNN's does.
    assert (ours.double() - truth).norm() <= 1.5 * own_error + 1e-6 * truth.norm()
    return module, count


@pytest.mark.parametrize("bias_apart", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("given", [{"padding": 16}, {"stride": 3}, {"stride": 2, "padding": 5, "bias": False}])
def test_a_grouped_convolution_over_long_windows_is_a_product(given, dtype, bias_apart):
    torch.manual_seed(0)
    model = nn.Conv1d(32, 64, 16, groups=4, dtype=dtype, **given)
    module, count = rewritten(model, torch.randn(3, 32, 50, dtype=dtype), bias_apart=bias_apart and model.bias is not None)
    targets = [node.target for node in module.graph.nodes]
    assert count == 1 and torch.ops.aten.bmm.default in targets and torch.ops.aten.conv1d.default not in targets


@pytest.mark.parametrize("padding", [0, 8])
def test_a_series_may_lie_step_by_step(padding):
    """As wav2vec2's does: channels are next to each other in its hidden states."""
    torch.manual_seed(0)
    _, count = rewritten(nn.Conv1d(32, 32, 16, groups=4, padding=padding), torch.randn(3, 50, 32).transpose(1, 2))
    assert count == 1


LEFT = {
    "one group": (lambda: nn.Conv1d(32, 32, 16), (2, 32, 50)),
    "short windows": (lambda: nn.Conv1d(32, 32, 8, groups=4), (2, 32, 50)),
    "few channels": (lambda: nn.Conv1d(32, 32, 16, groups=8), (2, 32, 50)),
    "depthwise": (lambda: nn.Conv1d(32, 32, 16, groups=32), (2, 32, 50)),
    "dilation": (lambda: nn.Conv1d(32, 32, 16, groups=4, dilation=2), (2, 32, 50)),
    "pictures": (lambda: nn.Conv2d(32, 32, 16, groups=4), (2, 32, 20, 20)),
    "too many windows": (lambda: nn.Conv1d(32, 32, 512, groups=4, stride=1), (1, 32, 20_000)),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_alone(name):
    torch.manual_seed(0)
    made, shape = LEFT[name]
    with torch.no_grad():
        (region,) = capture_regions(made().eval(), (torch.randn(shape),), {}).regions
    assert rewrite_region(region, describe(region, first_index=0)[1], [], [windows_as_gemm])[1] == [0]


def test_what_it_saves_is_predicted_from_the_trace():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(32, 32, 16, groups=4, padding=8), nn.GELU())
    capture, live = profile_live(model, (torch.randn(2, 32, 50),))
    row = GraphRewrite(id="window-gemm", name="", status=Status.KEPT, reason="", sites=1, step_delta_ns=0)
    took = sum(launch.duration_ns for launch in capture.launches if capture.ops[launch.op_index].target == "aten.conv1d.default")
    (priced,) = price_passes([row], Bench(live, on_cuda=False), capture, 0)
    assert 0 <= priced.predicted_saving_ns < took
