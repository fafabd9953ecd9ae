"""Which op owns which kernel: synthetic traces as a GPU gives them, and real ones of a CPU."""

from __future__ import annotations

import pytest
import torch

from fusion_advisor.capture.graph.op_classes import attention_backend
from fusion_advisor.capture.trace.attribute import median_step
from fusion_advisor.capture.trace.events import read_events
from fusion_advisor.capture.trace.profiler import record
from tests.capture.trace.test_events import event


def cuda_step(number, start_us, kernels, *, op_width_us=10.0, thread=1):
    """A step with one op range per kernel: (kernel name, duration µs, cpu op name) or None for a view that launches nothing."""
    events = [event("user_annotation", f"fa:step:{number}", start_us, 1000.0, tid=thread)]
    events.append(event("gpu_user_annotation", f"fa:step:{number}", start_us + 500, 1000.0, tid=7))
    device_us = start_us + 500
    for index, kernel in enumerate(kernels):
        at = start_us + 1 + index * op_width_us
        events.append(event("user_annotation", f"fa:op:{index}", at, op_width_us - 1, tid=thread))
        if kernel is None:
            continue
        name, duration_us, op_name = kernel
        correlation, external = number * 100 + index, number * 1000 + index
        category = "gpu_memcpy" if name.startswith("Memcpy") else "gpu_memset" if name.startswith("Memset") else "kernel"
        call = {"gpu_memcpy": "cudaMemcpyAsync", "gpu_memset": "cudaMemsetAsync"}.get(category, "cudaLaunchKernel")
        events += [
            event("cpu_op", op_name, at + 1, 5.0, tid=thread, **{"External id": external}),
            event("cuda_runtime", call, at + 2, 1.0, tid=thread, correlation=correlation),
            event("gpu_user_annotation", f"fa:op:{index}", device_us, duration_us, tid=7),
            event(category, name, device_us, duration_us, tid=7, correlation=correlation, stream=7, **{"External id": external}),
        ]
        device_us += duration_us + 1
    return events


KERNELS = [
    ("elementwise_kernel<mul>", 2.0, "aten::mul"),
    None,
    ("sm90_xmma_gemm", 7.0, "aten::addmm"),
    ("Memcpy DtoD (Device -> Device)", 1.0, "aten::copy_"),
    ("Memset (Device)", 0.5, "aten::zero_"),
    ("fa_gelu_tanh_1a2b3c", 1.5, ""),
    ("vectorized_layer_norm_kernel", 3.0, "aten::layer_norm"),
    ("direct_copy_kernel", 1.0, "aten::reshape"),
]


def test_a_kernel_belongs_to_the_op_whose_range_holds_its_launch():
    step = median_step(read_events(cuda_step(0, 0.0, KERNELS)), on_cuda=True)
    assert [launch.op_index for launch in step.launches] == [0, 2, 3, 4, 5, 6, 7]
    assert [launch.kernel_name for launch in step.launches] == [kernel[0] for kernel in KERNELS if kernel]
    assert step.launches[0].start_ns == 0
    assert all(launch.stream == 7 for launch in step.launches)


def test_the_launching_call_is_kept_on_the_kernels_clock():
    step = median_step(read_events(cuda_step(0, 0.0, KERNELS)), on_cuda=True)
    # the first kernel starts at 500 µs, its call at 3 µs and the next op's call two ranges later
    assert [launch.call_start_ns for launch in step.launches[:2]] == [-497_000, -477_000]
    assert all(launch.call_ns == 1_000 for launch in step.launches)


def test_annotations_mirrored_on_the_device_are_not_counted():
    step = median_step(read_events(cuda_step(0, 0.0, KERNELS)), on_cuda=True)
    assert step.device_ns == sum(round(kernel[1] * 1000) for kernel in KERNELS if kernel)
    assert step.calls == len(step.launches) == 7


def test_categories_come_from_the_op_and_never_from_the_kernel():
    step = median_step(read_events(cuda_step(0, 0.0, KERNELS)), on_cuda=True)
    assert [launch.category for launch in step.launches] == [
        "pointwise", "gemm", "memory", "memory", "fused", "reduction", "memory",
    ]  # fmt: skip


def test_a_dropped_kernel_shows_as_one_call_too_many():
    events = cuda_step(0, 0.0, KERNELS)
    events.remove(next(found for found in events if found["cat"] == "kernel" and found["name"] == "sm90_xmma_gemm"))
    step = median_step(read_events(events), on_cuda=True)
    assert step.calls == len(step.launches) + 1


def test_a_kernel_that_runs_after_its_step_still_counts_for_it():
    events = cuda_step(0, 0.0, KERNELS) + cuda_step(1, 2000.0, KERNELS) + cuda_step(2, 4000.0, KERNELS)
    for found in events:
        if found["cat"] in ("kernel", "gpu_memcpy", "gpu_memset"):
            found["ts"] += 1800.0
    step = median_step(read_events(events), on_cuda=True)
    assert [launch.op_index for launch in step.launches] == [0, 2, 3, 4, 5, 6, 7]


def test_the_median_step_is_taken():
    events = []
    for number, duration in enumerate([9.0, 1.0, 5.0]):
        events += cuda_step(number, number * 2000.0, [("k", duration, "aten::mul")])
    assert median_step(read_events(events), on_cuda=True).device_ns == 5000


def planted_cpu_step(number, durations_us, names=("aten::mul", "aten::add", "aten::exp")):
    start_us, at = number * 2000.0, number * 2000.0 + 1
    events = [event("user_annotation", f"fa:step:{number}", start_us, 1000.0, tid=1)]
    for name, duration_us in zip(names, durations_us, strict=True):
        events.append(event("cpu_op", name, at, duration_us, tid=1))
        at += duration_us + 1
    return events


def test_on_a_cpu_an_op_that_another_program_interrupted_takes_what_it_takes_in_the_other_steps():
    steps = [
        planted_cpu_step(0, (90.0, 20.0, 30.0)),
        planted_cpu_step(1, (10.0, 95.0, 30.0)),
        planted_cpu_step(2, (10.0, 20.0, 99.0)),
    ]
    step = median_step(read_events([one for each in steps for one in each]), on_cuda=False)
    assert [launch.duration_ns for launch in step.launches] == [10_000, 20_000, 30_000]


def test_on_a_cpu_steps_that_launch_different_ops_are_not_mixed():
    others = planted_cpu_step(1, (10.0, 95.0, 30.0), ("aten::mul", "aten::exp", "aten::add"))
    events = [*planted_cpu_step(0, (90.0, 20.0, 30.0)), *others, *planted_cpu_step(2, (10.0, 20.0, 99.0))]
    step = median_step(read_events(events), on_cuda=False)
    assert sorted(launch.duration_ns for launch in step.launches) == [10_000, 30_000, 95_000]


def test_a_launch_of_another_thread_or_outside_every_range_has_no_op():
    events = cuda_step(0, 0.0, KERNELS[:1])
    for tid, at, correlation in ((2, 3.0, 900), (1, 800.0, 901)):
        events.append(event("cuda_runtime", "cudaLaunchKernel", at, 1.0, tid=tid, correlation=correlation))
        events.append(event("kernel", "stray", 700.0, 4.0, tid=7, correlation=correlation))
    step = median_step(read_events(events), on_cuda=True)
    assert [(launch.kernel_name, launch.op_index) for launch in step.launches] == [
        ("elementwise_kernel<mul>", 0), ("stray", None), ("stray", None),
    ]  # fmt: skip
    assert step.launches[-1].category == "other"


def cpu_step(function):
    return median_step(record(function, steps=3, on_cuda=False), on_cuda=False)


def test_on_a_cpu_the_ops_that_compute_are_the_launches():
    x = torch.randn(16, 16)
    step = cpu_step(lambda: torch.nn.functional.linear(x.t().unsqueeze(0), x).softmax(-1).view(-1))
    assert [launch.category for launch in step.launches] in (["gemm", "reduction"], ["memory", "gemm", "reduction"])
    assert step.calls == len(step.launches)


def test_on_a_cpu_a_composite_passes_its_time_on():
    x = torch.randn(64, 64)
    step = cpu_step(lambda: (x.to(torch.float64), x.t().contiguous(), x.to(torch.float32)))
    assert [launch.category for launch in step.launches] == ["pointwise", "memory"]


def test_on_a_cpu_a_fused_kernel_is_its_own_range():
    def step():
        with torch.profiler.record_function("fa:kernel:fa_swiglu_123456"):
            pass

    found = cpu_step(step)
    assert [(launch.kernel_name, launch.category) for launch in found.launches] == [("fa_swiglu_123456", "fused")]


@pytest.mark.parametrize("name", ["gpt2", "qwen2"])
def test_nearly_all_time_is_joined_to_op_module_and_line(name):
    from tests.tiny import profiled

    _, capture, _ = profiled(name)
    total = sum(launch.duration_ns for launch in capture.launches)
    joined = sum(
        launch.duration_ns
        for launch in capture.launches
        if launch.op_index is not None
        and capture.ops[launch.op_index].source_line
        and (capture.ops[launch.op_index].module_path or "mask" in capture.ops[launch.op_index].source_file)
    )
    assert joined >= 0.99 * total
    # An op without a module path is one of the model's own forward.
    assert all(
        launch.category == capture.ops[launch.op_index].op_class.value or capture.ops[launch.op_index].op_class == "view"
        for launch in capture.launches
        if launch.category in ("gemm", "attention")
    )


def test_kernels_of_attention_in_separate_ops_are_attention():
    kernels = [("gemm", 2.0, "aten::bmm"), ("softmax", 3.0, "aten::_softmax"), ("gemm", 5.0, "aten::linear")]
    events = cuda_step(0, 0.0, kernels)
    events.append(event("cpu_op", "aten::_scaled_dot_product_attention_math", 1.0, 19.0, tid=1, **{"External id": 77}))
    step = median_step(read_events(events), on_cuda=True)
    assert [launch.category for launch in step.launches] == ["attention", "attention", "gemm"]


@pytest.mark.parametrize(("has_gradient_mask", "backend"), [(False, "flash"), (True, "math")])
def test_a_cpu_trace_names_the_backend_of_attention(has_gradient_mask, backend):
    q = torch.randn(1, 2, 16, 8)
    mask = torch.zeros(16, 16, requires_grad=True) if has_gradient_mask else None

    def call():
        return torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    step = median_step(record(call, steps=1, on_cuda=False), on_cuda=False)
    names = [attention_backend(launch.kernel_name) for launch in step.launches if launch.category == "attention"]
    assert set(names) == {backend}


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"])
def test_a_gpu_trace_names_the_backend_that_torch_was_told_to_use(backend):
    q = torch.randn(2, 8, 256, 64, device="cuda", dtype=torch.bfloat16)

    def call():
        with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, backend)):
            return torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)

    call()
    step = median_step(record(call, steps=1, on_cuda=True), on_cuda=True)
    names = {attention_backend(launch.kernel_name) for launch in step.launches if launch.category == "attention"}
    assert names == {backend.split("_")[0].lower()}
