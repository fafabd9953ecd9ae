"""Convolutions over patches as GEMMs: the model's own numbers and strides, in every layout, and what is left alone."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch
from torch import nn

from fusion_advisor.capture.graph.op_records import describe
from fusion_advisor.capture.graph.split_bias import split_bias
from fusion_advisor.capture.graph.tracer import capture_regions
from fusion_advisor.capture.sizes.open_capture import capture_open
from fusion_advisor.fuse import receipts
from fusion_advisor.fuse.decide.predict import price_passes
from fusion_advisor.fuse.decide.session import Bench
from fusion_advisor.fuse.passes.patch_conv_to_gemm import CONVOLUTIONS, patches_as_gemm
from fusion_advisor.fuse.passes.registry import PASSES
from fusion_advisor.fuse.rewrite import layout_copy
from fusion_advisor.fuse.rewrite.graph_rewriter import rewrite_region
from fusion_advisor.fuse.rewrite.layout_copy import PlainCopy, build, is_permuted
from fusion_advisor.records import GraphRewrite, Launch, Status
from fusion_advisor.runtime.torch_internals import aten_ops
from fusion_advisor.runtime.torch_internals.symbolic_sizes import guards_of, ones_among_the_sizes
from tests.tiny import profile_live


def rewritten(model, x, *, bias_apart=False):
    """Return the rewritten module and how many convolutions it replaced, after comparing its results with the model's."""
    with torch.no_grad():
        (region,) = capture_regions(model.eval(), (x,), {}).regions
        if bias_apart:
            assert split_bias(region.graph, lambda *_: True, lambda _: False) == 1
        _, index_of = describe(region, first_index=0)
        module, (count,) = rewrite_region(region, index_of, [], [patches_as_gemm])
        module.graph.lint()
        (ours,), expected = module(*region.example_args), model(x)
        truth = model.double()(x.double())
        model.to(x.dtype)
    assert ours.stride() == expected.stride() and ours.shape == expected.shape
    own_error = (expected.double() - truth).abs().max()
    assert (ours.double() - truth).abs().max() <= 2 * own_error + torch.finfo(x.dtype).eps
    return module, count


def convolutions_of(module):
    return [node for node in module.graph.nodes if node.target in CONVOLUTIONS]


CASES = {
    "pictures": (lambda: nn.Conv2d(3, 8, 4, stride=4), (2, 3, 16, 8)),
    "no bias": (lambda: nn.Conv2d(3, 8, (2, 4), stride=(2, 4), bias=False), (2, 3, 6, 8)),
    "sound": (lambda: nn.Conv1d(2, 6, 5, stride=5), (3, 2, 20)),
    "video": (lambda: nn.Conv3d(3, 4, (2, 4, 4), stride=(2, 4, 4)), (1, 3, 4, 8, 8)),
    "one patch": (lambda: nn.Conv2d(3, 8, 4, stride=4), (2, 3, 4, 4)),
}


@pytest.mark.parametrize("name", CASES)
def test_an_open_batch_stays_open(name):
    """A linear in C++ asks for the number of elements (torch 2.11), and the graph would be for that batch alone."""
    make, shape = CASES[name]
    torch.manual_seed(0)
    model = make().eval()
    with torch.no_grad():
        sizes = (3, *shape[1:])
        opened = capture_open(model, (), {"input": torch.randn(sizes)}, {"input": ("batch", *[""] * (len(sizes) - 1))})
        taken = set(guards_of(opened.environment))
        index_of = {node: index for index, node in enumerate(opened.region.graph.graph.nodes)}
        with ones_among_the_sizes():
            _, (count,) = rewrite_region(opened.region, index_of, [], [patches_as_gemm])
    assert count == 1 and set(guards_of(opened.environment)) == taken and not opened.environment.replacements


@pytest.mark.parametrize("bias_apart", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_windows_side_by_side_are_multiplied_by_a_linear(name, bias_apart):
    torch.manual_seed(0)
    made, shape = CASES[name]
    model = made()
    module, count = rewritten(model, torch.randn(shape), bias_apart=bias_apart and model.bias is not None)
    assert count == 1 and not convolutions_of(module)
    assert not any(node.target is torch.ops.aten.add.Tensor for node in module.graph.nodes)  # the linear takes the bias


def test_16_bits():
    torch.manual_seed(0)
    _, count = rewritten(nn.Conv2d(3, 8, 4, stride=4, dtype=torch.bfloat16), torch.randn(2, 3, 16, 8, dtype=torch.bfloat16))
    assert count == 1


def test_channels_last_needs_no_second_copy():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 16, 8).to(memory_format=torch.channels_last)
    module, count = rewritten(nn.Conv2d(3, 8, 4, stride=4), x)
    assert count == 1
    assert sum(node.target is torch.ops.aten.clone.default for node in module.graph.nodes) == 1  # what the GEMM reads


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiles kernels for the host, and there is no g++")
@pytest.mark.parametrize("is_channels_last", [False, True])
def test_the_copies_are_kernels_where_those_are_faster(monkeypatch, is_channels_last):
    asked = []

    def found(layout):
        asked.append(layout)
        return build(layout, "cpp")

    monkeypatch.setattr(layout_copy, "copy_for", found)
    torch.manual_seed(0)
    x = torch.randn(2, 3, 16, 8)
    module, count = rewritten(nn.Conv2d(3, 8, 4, stride=4), x.to(memory_format=torch.channels_last) if is_channels_last else x)
    copies = [node for node in module.graph.nodes if isinstance(node.target, PlainCopy)]
    assert count == 1 and len(copies) == len(asked) == (1 if is_channels_last else 2)
    assert all(is_permuted(layout) for layout in asked)
    assert not any(node.target is torch.ops.aten.clone.default for node in module.graph.nodes)


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiles kernels for the host, and there is no g++")
def test_the_kept_rewrite_names_its_kernels(monkeypatch):
    monkeypatch.setattr(layout_copy, "copy_for", lambda layout: build(layout, "cpp"))
    _, live = profile_live(Patches(True), (torch.randn(2, 3, 16, 8),))
    variant = Bench(live, on_cuda=False).build((), ("patch-gemm",))
    rows = [
        GraphRewrite(id=name, name=PASSES[name].title, status=status, reason="", sites=1)
        for name, status in (("pad-gemm", Status.KEPT), ("patch-gemm", Status.KEPT), ("patch-gemm", Status.SLOWER))
    ]
    padded, kept, removed = (receipts.with_kernels(row, variant) for row in rows)
    assert padded.rendered == removed.rendered == ()
    assert 1 <= len(kept.rendered) <= 2 and len({kernel.path for kernel in kept.rendered}) == len(kept.rendered)
    for kernel in kept.rendered:
        assert kernel.path == f"kernels/patch-gemm_permuted_copy_{kernel.name.rpartition('_')[2]}.cpp"
        assert f"{kernel.name}(" in kernel.source and "GEMM over patches" in kernel.origin


LEFT = {
    "overlap": (lambda: nn.Conv2d(3, 8, 4, stride=2), (2, 3, 16, 8)),
    "gaps": (lambda: nn.Conv2d(3, 8, 2, stride=4), (2, 3, 16, 8)),
    "padding": (lambda: nn.Conv2d(3, 8, 4, stride=4, padding=2), (2, 3, 16, 8)),
    "dilation": (lambda: nn.Conv2d(3, 8, 4, stride=4, dilation=2), (2, 3, 16, 8)),
    "a rest": (lambda: nn.Conv2d(3, 8, 4, stride=4), (2, 3, 17, 8)),
    "depthwise": (lambda: nn.Conv2d(4, 4, 4, stride=4, groups=4), (2, 4, 16, 8)),
    "one pixel": (lambda: nn.Conv2d(3, 8, 1), (2, 3, 16, 8)),
    "no batch": (lambda: nn.Conv2d(3, 8, 4, stride=4), (3, 16, 8)),
    "weight in channels last": (
        lambda: nn.Conv2d(3, 8, 4, stride=4).to(memory_format=torch.channels_last),
        (2, 3, 16, 8),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_alone(name):
    torch.manual_seed(0)
    made, shape = LEFT[name]
    module, count = rewritten(made(), torch.randn(shape))
    assert count == 0 and len(convolutions_of(module)) == 1


def test_a_weight_that_is_written_to_is_seen():
    torch.manual_seed(0)
    model, x = nn.Conv2d(3, 8, 4, stride=4).eval(), torch.randn(2, 3, 16, 8)
    with torch.no_grad():
        (region,) = capture_regions(model, (x,), {}).regions
        module, _ = rewrite_region(region, describe(region, first_index=0)[1], [], [patches_as_gemm])
        model.weight.mul_(-3)
        torch.testing.assert_close(module(*region.example_args)[0], model(x))


class Patches(nn.Module):
    """Patches, and a linear after them."""

    def __init__(self, has_bias):
        super().__init__()
        self.cut = nn.Conv2d(3, 8, 4, stride=4, bias=has_bias)
        self.head = nn.Linear(8, 16)

    def forward(self, x):
        return self.head(self.cut(x).flatten(2).transpose(1, 2))


@pytest.mark.parametrize("has_bias", [False, True])
def test_it_is_expected_to_take_as_long_as_the_best_linear_and_two_copies(monkeypatch, has_bias):
    monkeypatch.setattr(aten_ops, "adds_bias_after_convolution", lambda *_: True)  # as ATen does on a GPU
    capture, live = profile_live(Patches(has_bias).eval(), (torch.randn(2, 3, 16, 8),))
    bench = Bench(live, on_cuda=False)
    (cut,) = (op for op in bench.ops if op.target == "aten.conv2d.default")
    (head,) = (op for op in bench.ops if op.target == "aten.linear.default")
    took = [(cut, 99_000), (head, 2_048), *((op, 4_000) for op in bench.ops if op.target == "aten.add.Tensor")]
    assert len(took) == 2 + has_bias
    launches = tuple(Launch(kernel_name="k", op_index=op.index, duration_ns=ns) for op, ns in took)
    capture = replace(
        capture, launches=launches, ops=tuple(bench.ops), bandwidth=replace(capture.bandwidth, copy_bytes_per_s=10**9)
    )
    row = GraphRewrite(id="patch-gemm", name=PASSES["patch-gemm"].title, status=Status.KEPT, reason="", sites=1, step_delta_ns=-1)
    (priced,) = price_passes([row], bench, capture, 100)
    # 2 x 8 windows: 16 x 8 x 16 products of the linear in 2048 ns, 16 x 8 x 48 here; 3072 and 512 bytes, read and written.
    assert priced.predicted_saving_ns == 99_100 + has_bias * 4_100 - 3 * 2_048 - 2 * (3_072 + 512) - 300
