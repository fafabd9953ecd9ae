"""Findings appear exactly when they are so: on real captures of an H200, with one thing changed at a time, and on tiny models."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from fusion_advisor.capture.graph.tracer import capture_regions
from fusion_advisor.fuse.advice import TorchSettings, evaluated_masks, find_findings, torch_settings
from fusion_advisor.fuse.plan.plan import make_plan
from fusion_advisor.records import OpClass
from fusion_advisor.records.serialize import read_capture
from tests.tiny import patterns, profile_live, profiled, qwen2

DATA = Path(__file__).parent.parent / "data" / "captures"
ALL_ON = TorchSettings(allows_tf32=True, has_cudnn_benchmark=True)
ALL_OFF = TorchSettings(allows_tf32=False, has_cudnn_benchmark=False)


@functools.cache
def h200(name):
    capture = read_capture(DATA / f"{name}-h200.json.gz")
    return capture, make_plan(capture, patterns())


def gpt2_h200():
    return h200("gpt2-fp32-1x1024")


def qwen_h200():
    return h200("qwen2.5-7b-bf16-1x512")


def titled(found, word):
    return [one for one in found if word in one.title]


def test_fp32_gemms_without_tf32_are_bounded_by_their_time_above_the_bytes():
    capture, plan = gpt2_h200()
    (found,) = titled(find_findings(capture, plan, ALL_OFF, {}), "TF32")
    gemms = {op.index for op in capture.ops if op.op_class is OpClass.GEMM}
    taken = sum(launch.duration_ns for launch in capture.launches if launch.op_index in gemms)
    assert 0.8 * taken < found.gain_ns < taken
    assert not found.is_measured
    assert found.share == pytest.approx(found.gain_ns / sum(launch.duration_ns for launch in capture.launches))
    assert "tf32" in found.change


def test_a_gemm_of_an_odd_width_is_told_once_its_width_is_odd():
    capture, plan = qwen_h200()
    assert titled(find_findings(capture, plan, ALL_ON, {}), "odd width") == []
    linears = [op for op in capture.ops if op.op_class is OpClass.GEMM and op.target == "aten.linear.default"]
    head, (out,) = linears[-1], linears[-1].outputs
    odd = replace(head, outputs=(replace(out, shape=(*out.shape[:-1], out.shape[-1] - 7)),))
    changed = replace(capture, ops=tuple(odd if op is head else op for op in capture.ops))
    (found,) = titled(find_findings(changed, plan, ALL_ON, {}), "odd width")
    taken = sum(launch.duration_ns for launch in capture.launches if launch.op_index == head.index)
    assert 0 < found.gain_ns < taken
    assert f"{out.shape[-1] - 7:,} columns" in found.reason
    on_cpu = replace(changed, environment=replace(capture.environment, device_kind="cpu"))
    assert titled(find_findings(on_cpu, plan, ALL_ON, {}), "odd width") == []


def test_tf32_is_not_advised_where_it_is_on_or_impossible_or_nothing_is_fp32():
    capture, plan = gpt2_h200()
    assert titled(find_findings(capture, plan, ALL_ON, {}), "TF32") == []
    for changes in ({"capability": "7.5"}, {"device_kind": "cpu", "capability": ""}):
        old = replace(capture, environment=replace(capture.environment, **changes))
        assert titled(find_findings(old, plan, ALL_OFF, {}), "TF32") == []
    assert titled(find_findings(*qwen_h200(), ALL_OFF, {}), "TF32") == []


def test_a_written_out_activation_names_its_twin_and_its_line():
    (found,) = titled(find_findings(*gpt2_h200(), ALL_ON, {}), "written out")
    assert found.change == 'torch.nn.functional.gelu(x, approximate="tanh")'
    assert "12 sites" in found.reason
    assert "activations.py:" in found.reason
    assert titled(find_findings(*qwen_h200(), ALL_ON, {}), "gelu") == []


def test_casts_up_and_down_are_summed():
    capture, plan = qwen_h200()
    (found,) = titled(find_findings(capture, plan, ALL_ON, {}), "fp32")
    assert "57 casts up and 57 down" in found.reason
    assert titled(find_findings(*gpt2_h200(), ALL_ON, {}), "16-bit") == []


def test_a_traced_mask_is_measured_against_eager():
    capture, plan = qwen_h200()
    (found,) = titled(find_findings(capture, plan, ALL_ON, {"causal": 28}), "when traced")
    assert found.title == "transformers 5.17.0 builds a causal mask when traced"
    assert found.is_measured
    eager = sum(launch.duration_ns for launch in capture.eager_launches if launch.category == "attention")
    calls = {op.index for op in capture.ops if op.op_class is OpClass.ATTENTION}
    assert found.gain_ns == sum(launch.duration_ns for launch in capture.launches if launch.op_index in calls) - eager
    assert titled(find_findings(capture, plan, ALL_ON, {}), "when traced") == []


def with_attention(launches, kernel, factor=1):
    return tuple(
        replace(launch, kernel_name=kernel, duration_ns=launch.duration_ns * factor) if launch.category == "attention" else launch
        for launch in launches
    )


def test_an_all_true_mask_that_loses_fused_attention_is_said_so():
    capture, plan = qwen_h200()
    lost = replace(capture, launches=with_attention(capture.launches, "softmax_warp_forward", 10))
    (found,) = titled(find_findings(lost, plan, ALL_ON, {"all true": 28}), "when traced")
    assert found.title == "transformers 5.17.0 builds an all-true mask when traced, fused attention is lost"
    assert "(cudnn)" in found.reason and "(math)" in found.reason


@pytest.mark.parametrize(
    ("kernel", "is_slow"),
    [("softmax_warp_forward", True), ("fmha_cutlassF_bf16_aligned", True), ("pytorch_flash::flash_fwd_kernel", False)],
)
def test_a_slow_attention_backend_of_eager_is_named(kernel, is_slow):
    capture, plan = qwen_h200()
    changed = replace(capture, eager_launches=with_attention(capture.eager_launches, kernel, 10))
    assert bool(titled(find_findings(changed, plan, ALL_ON, {}), "slow backend")) is is_slow


def test_the_memory_efficient_kernel_is_not_slow_in_fp32():
    capture, plan = gpt2_h200()
    assert any("fmha" in launch.kernel_name for launch in capture.eager_launches)
    assert titled(find_findings(capture, plan, ALL_ON, {}), "slow backend") == []


def test_findings_are_numbered_by_gain_and_small_ones_left_out():
    found = find_findings(*gpt2_h200(), ALL_OFF, {"causal": 12})
    assert [one.id for one in found] == [f"N{number}" for number in range(1, len(found) + 1)]
    assert [one.gain_ns for one in found] == sorted((one.gain_ns for one in found), reverse=True)
    assert all(one.share >= 0.005 for one in found)


def found_in(model, *inputs, settings=ALL_ON, **environment):
    capture, live = profile_live(model.eval(), inputs)
    capture = replace(capture, environment=replace(capture.environment, **environment))
    plan = make_plan(capture, patterns(), min_share=0.0)
    return find_findings(capture, plan, settings, evaluated_masks(live))


def scan_of(steps):
    class Scan(torch.nn.Module):
        def forward(self, decay, x):
            state, rows = torch.zeros_like(x[:, 0]), []
            for step in range(steps):
                state = decay[:, step] * state + x[:, step]
                rows.append(state.sum(-1))
            return torch.stack(rows, 1)

    return Scan()


def test_an_unrolled_recurrence_is_named_with_its_steps_and_its_share():
    inputs = [torch.rand(2, 48, 512, 16) for _ in range(2)]
    (found,) = titled(found_in(scan_of(48), *inputs), "recurrence")
    assert "48 steps" in found.title and "at 1 site" in found.reason and "test_advice.py:" in found.reason
    assert 0 < found.share <= 1 and not found.is_measured
    assert not titled(found_in(scan_of(47), *(one[:, :47] for one in inputs)), "recurrence")


class Convolution(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 64, 5)

    def forward(self, x):
        return self.conv(x)


def test_cudnn_benchmark_is_advised_for_convolutions_on_a_gpu_only():
    x, word = torch.randn(8, 3, 40, 40), "cuDNN"
    assert titled(found_in(Convolution(), x, settings=ALL_OFF, device_kind="cuda"), word)
    assert not titled(found_in(Convolution(), x, settings=ALL_ON, device_kind="cuda"), word)
    assert not titled(found_in(Convolution(), x, settings=ALL_OFF), word)


class Attention(torch.nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how, self.router = how, torch.nn.Linear(16, 64)

    def forward(self, q):
        if self.how == "sdpa":
            return F.scaled_dot_product_attention(q, q, q)
        if self.how == "router":
            return torch.softmax(self.router(q), -1) @ q
        scores = (q @ q.transpose(-2, -1)) * 0.25
        return torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype) @ q


@pytest.mark.parametrize("how", ["written", "sdpa", "router"])
def test_attention_that_is_written_out_is_found(how):
    found = found_in(Attention(how), torch.randn(2, 4, 64, 16))
    assert bool(titled(found, "attention is written out")) is (how == "written")


def test_the_masks_of_a_model_are_evaluated():
    assert evaluated_masks(profiled("qwen2")[2]) == {"causal": 2}
    assert evaluated_masks(profiled("toy")[2]) == {}


@pytest.mark.parametrize(("hidden", "masks"), [(0, {"causal, of a mask of ones": 2}), (1, {})])
def test_a_mask_of_ones_that_the_call_passes_is_told_apart(hidden, masks):
    torch.compiler.reset()
    model, kwargs = qwen2()
    kwargs["attention_mask"] = torch.ones_like(kwargs["input_ids"])
    kwargs["attention_mask"][0, :hidden] = 0
    with torch.no_grad():
        live = capture_regions(model, (), kwargs)
    assert evaluated_masks(live) == masks


def test_a_mask_of_ones_can_be_left_out():
    capture, plan = qwen_h200()
    (found,) = titled(find_findings(capture, plan, ALL_ON, {"causal, of a mask of ones": 28}), "when traced")
    assert found.title == "transformers 5.17.0 builds a causal mask of a mask of ones when traced"
    assert found.change.startswith("leave the mask out of the inputs")


def test_the_switches_are_read_as_they_are():
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        for precision in ("ieee", "tf32"):
            torch.backends.cuda.matmul.fp32_precision = precision
            assert torch_settings().allows_tf32 is (precision == "tf32")
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert torch_settings().has_cudnn_benchmark is torch.backends.cudnn.benchmark
