"""Padded GEMMs: the model's own numbers and strides, its own weights, and what is left alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from fusion_advisor.capture.graph.op_records import describe
from fusion_advisor.capture.graph.tracer import capture_regions
from fusion_advisor.fuse.decide.predict import price_passes
from fusion_advisor.fuse.decide.session import Bench
from fusion_advisor.fuse.passes.pad_gemm import pad_linears
from fusion_advisor.fuse.passes.registry import PASSES
from fusion_advisor.fuse.rewrite.graph_rewriter import LayoutChanged, rewrite_region
from fusion_advisor.records import GraphRewrite, Launch, Status
from fusion_advisor.workload.weight_packing import leave_room
from tests.tiny import profile_live

X = torch.randn(2, 5, 16, dtype=torch.bfloat16)


class Head(nn.Module):
    """A hidden layer and a head of an odd vocabulary."""

    def __init__(self, *, bias=True, rows=13, columns=16, dtype=torch.bfloat16):
        super().__init__()
        torch.manual_seed(0)
        self.hidden = nn.Linear(16, columns, dtype=dtype)
        self.head = nn.Linear(columns, rows, bias=bias, dtype=dtype)

    def forward(self, x):
        return self.head(torch.tanh(self.hidden(x)))


def padded(model, x=X):
    """Return the rewritten module, its region and how many linears were padded, after comparing it with the model."""
    with torch.no_grad():
        (region,) = capture_regions(model.eval(), (x,), {}).regions
        _, index_of = describe(region, first_index=0)
        module, (count,) = rewrite_region(region, index_of, [], [pad_linears])
        ours, theirs = module(*region.example_args), region.graph(*region.example_args)
    for mine, own in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, own, rtol=1e-2, atol=1e-2)
        assert mine.stride() == own.stride() and mine.shape == own.shape
    return module, region, count


@pytest.mark.parametrize("bias", [True, False])
def test_an_odd_head_runs_padded_and_gives_the_models_tensor(bias):
    model = Head(bias=bias)
    leave_room(model)
    module, _, count = padded(model)
    assert count == 1
    widths = [node.meta["val"].shape[-1] for node in module.graph.nodes if node.target is torch.ops.aten.linear.default]
    assert widths == [16, 16]


def test_what_is_written_to_a_weight_is_seen():
    model = Head()
    leave_room(model)
    module, region, _ = padded(model)
    with torch.no_grad():
        model.head.weight.mul_(-3)
        torch.testing.assert_close(module(*region.example_args)[0], model(X), rtol=1e-2, atol=1e-2)


def test_a_weight_that_was_exchanged_for_one_without_room_ends_it():
    model = Head()
    leave_room(model)
    module, region, _ = padded(model)
    arguments = [value.clone() if value is model.head.weight else value for value in region.example_args]
    with pytest.raises(LayoutChanged, match="room"):
        module(*arguments)


@pytest.mark.parametrize(
    ("model", "has_space"),
    [(Head(), False), (Head(dtype=torch.float32), True), (Head(rows=16), True)],
    ids=["no room", "fp32", "even"],
)
def test_what_is_left_alone(model, has_space):
    if has_space:
        leave_room(model)
    assert padded(model, X.to(model.head.weight.dtype))[2] == 0


def test_an_odd_inner_width_is_no_better_padded():
    model = Head(columns=12)
    leave_room(model)
    module, _, count = padded(model)
    widths = [node.meta["val"].shape[-1] for node in module.graph.nodes if node.target is torch.ops.aten.linear.default]
    assert (count, widths) == (1, [16, 13])  # the hidden layer's own output is odd too


@pytest.mark.parametrize(
    ("took_ns", "bytes_per_s", "product_ns", "copy_ns"),
    [
        (9_000, 10**9, 1_600, 520),  # as long as the shortest GEMM that stays; 2 x 260 bytes at a byte per ns
        (90_000, 10**8, 10_220, 5_200),  # 1,022 bytes of operands and result are what takes longest
    ],
)
def test_it_is_expected_to_take_as_long_as_the_best_of_the_others_and_a_copy(took_ns, bytes_per_s, product_ns, copy_ns):
    model = Head()
    leave_room(model)
    capture, live = profile_live(model, (X,))
    bench = Bench(live, on_cuda=False)
    first, head = (op for op in bench.ops if op.target == "aten.linear.default")
    launches = tuple(Launch(kernel_name="k", op_index=op.index, duration_ns=ns) for op, ns in ((first, 1600), (head, took_ns)))
    capture = replace(
        capture, launches=launches, ops=tuple(bench.ops), bandwidth=replace(capture.bandwidth, copy_bytes_per_s=bytes_per_s)
    )
    row = GraphRewrite(id="pad-gemm", name=PASSES["pad-gemm"].title, status=Status.KEPT, reason="", sites=1, step_delta_ns=-1)
    (priced,) = price_passes([row], bench, capture, 100)
    assert priced.predicted_saving_ns == took_ns + 100 - product_ns - copy_ns - 200  # two launches for one
