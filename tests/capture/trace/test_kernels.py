"""Kernels of foreign traces: the op call they belong to, what a chain may hold, and time that counts once."""

from __future__ import annotations

import gzip
import json

import pytest
import torch

from fusion_advisor.capture.trace.attribute import median_step
from fusion_advisor.capture.trace.chrome_trace import TraceFile
from fusion_advisor.capture.trace.events import read_events
from fusion_advisor.capture.trace.kernels import device_work, kernel_class, kernel_label, missing_kernels
from fusion_advisor.capture.trace.profiler import record
from fusion_advisor.records import OpClass, TensorMeta
from tests.traces import CAPTURES, Recorder, event

POINTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::tanh_kernel_cuda(at::TensorIteratorBase&)>(int)"
COPY = "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(Base&), LoadWithCast<1>>()"


def work_of(recorder):
    return device_work(read_events(recorder.events))


@pytest.mark.parametrize(
    ("op", "kernel", "expected"),
    [
        ("aten::tanh", POINTWISE, ("tanh", "pointwise", True)),
        ("aten::add_", POINTWISE, ("add", "pointwise", True)),
        ("aten::layer_norm>aten::native_layer_norm", "vectorized_layer_norm_kernel", ("layer_norm", "reduction", True)),
        ("aten::softmax>aten::_softmax", "softmax_warp_forward", ("softmax", "reduction", True)),
        ("aten::to>aten::_to_copy>aten::copy_", COPY, ("to", "memory", True)),
        ("aten::contiguous>aten::clone>aten::copy_", COPY, ("clone", "memory", False)),
        ("aten::reshape>aten::clone>aten::copy_", COPY, ("clone", "memory", False)),
        ("aten::cat", "CatArrayBatchedCopy", ("cat", "memory", True)),
        ("aten::embedding>aten::index_select", "indexSelectLargeIndex", ("embedding", "memory", True)),
        ("aten::linear>aten::addmm", "nvjet_sm90", ("linear", "gemm", False)),
        ("aten::scaled_dot_product_attention>aten::_scaled_dot_product_attention_math>aten::softmax>aten::_softmax",
         "softmax_warp_forward", ("attention", "attention", False)),
        ("aten::zero_>aten::fill_", "Memset (Device)", ("Memset", "memory", False)),
        ("aten::sort", "elementwise_kernel_with_index", ("sort", "pointwise", False)),
        ("my::op", "my_gelu_kernel", ("my_gelu", "pointwise", True)),
        ("my::op", "fa_gelu_tanh_1a2b", ("fa_gelu_tanh_1a2b", "fused", False)),
        ("", POINTWISE, ("tanh", "pointwise", True)),
        ("", "triton_poi_fused_add_gelu_3", ("fused_add_gelu", "pointwise", True)),
        ("", "triton_red_fused_mean_12", ("fused_mean", "reduction", True)),
        ("", "ncclDevKernel_AllReduce_Sum_bf16", ("ncclDevKernel_AllReduce_Sum_bf16", "collective", False)),
    ],
)  # fmt: skip
def test_what_a_kernel_is_called_and_whether_a_chain_may_hold_it(op, kernel, expected):
    (item,) = work_of(Recorder().op(op, kernel))
    assert (item.label, item.category, item.is_fusible) == expected


def test_kernels_of_one_call_are_one_op():
    first, second, third = work_of(Recorder().op("aten::rms_norm", POINTWISE, POINTWISE).op("aten::rms_norm", POINTWISE))
    assert first.call == second.call != third.call


def test_a_kernel_without_an_id_goes_to_the_op_around_its_launch():
    found = work_of(Recorder().op("aten::tanh", POINTWISE, linked=False).op("", POINTWISE))
    assert [item.call >= 0 for item in found] == [True, False]


def test_overlapping_kernels_count_once_and_queues_stay_apart():
    recorder = Recorder()
    recorder.events = [
        event("kernel", "a", 0.0, 10.0, correlation=1, stream=7),
        event("kernel", "b", 4.0, 10.0, correlation=2, stream=8),
        event("kernel", "c", 5.0, 2.0, correlation=3, stream=9),
        event("kernel", "d", 4.0, 10.0, correlation=4, stream=7, device=1),
    ]
    found = {item.kernel_name: item for item in work_of(recorder)}
    assert {name: item.busy_ns for name, item in found.items()} == {"a": 10_000, "b": 4_000, "c": 0, "d": 10_000}
    assert found["d"].queue == (1, 7)


def test_steps_of_a_schedule_are_told_and_what_is_between_them_stays():
    recorder = Recorder().op("aten::tanh", POINTWISE)
    for number in range(2):
        start = recorder.now
        recorder.op("aten::tanh", POINTWISE).step(number, start)
    assert [item.step for item in work_of(recorder)] == [-1, 0, 1]


def test_shapes_are_kept_and_shared():
    dims = ([[8, 512, 64], [64], [], [[2], [2]]], ["c10::BFloat16", "float", "Scalar", "TensorList"])
    first, second = work_of(Recorder().op("aten::add", POINTWISE, inputs=dims).op("aten::mul", POINTWISE, inputs=dims))
    assert first.inputs is second.inputs
    assert first.inputs == (
        TensorMeta(shape=(8, 512, 64), stride=(), dtype="bfloat16"), TensorMeta(shape=(64,), stride=(), dtype="float32"),
        None, None,
    )  # fmt: skip


def test_launches_without_a_kernel_are_counted():
    recorder = Recorder().op("aten::tanh", POINTWISE, POINTWISE)
    recorder.events += [
        event("cuda_runtime", "cudaLaunchKernel", 90.0, 1.0, correlation=900),
        event("cuda_driver", "cuLaunchKernelEx", 91.0, 1.0, correlation=901),
        event("cuda_runtime", "cudaMemcpyAsync", 92.0, 1.0, correlation=902),
        event("cuda_runtime", "cudaGraphLaunch", 93.0, 1.0, correlation=903),
    ]
    found = missing_kernels(read_events(recorder.events))
    assert (found.launches, found.missing) == (4, 2)


def test_times_are_exact_on_a_clock_that_counts_from_1970():
    (kernel,) = read_events([event("kernel", "k", "1759708626123456.789", "0.001")]).kernels
    assert (kernel.start_ns, kernel.duration_ns) == (1759708626123456789, 1)
    assert read_events([event("kernel", "k", "1.5e3", "2")]).kernels[0].start_ns == 1_500_000


@pytest.mark.parametrize(
    "change", [{"name": None}, {"ts": "soon"}, {"dur": -1.0}, {"ts": float("nan")}, {"args": 3}, {"cat": ["kernel"]}]
)
def test_events_without_a_name_or_time_are_counted_and_left_out(change):
    trace = read_events([{**event("kernel", "k", 1.0, 1.0), **change}, event("kernel", "k", 1.0, 1.0)])
    assert (len(trace.kernels), trace.unreadable) == (1, 1)


@pytest.mark.parametrize("name", ["gpt2-fp32-1x1024-h200", "qwen2.5-7b-bf16-1x512-h200"])
def test_names_alone_tell_the_class_of_most_device_time(name):
    """Against the class by op, of every kernel of a real step."""
    capture = json.loads(gzip.decompress((CAPTURES / f"{name}.json.gz").read_bytes()))
    right = total = 0
    for launch in capture["launches"]:
        total += launch["duration_ns"]
        told = kernel_class(launch["kernel_name"]).value
        # A cast is a copy to its op and arithmetic to its name; both may stand in a chain.
        right += launch["duration_ns"] * (told == launch["category"] or kernel_label(launch["kernel_name"]) == "to")
    assert right / total > 0.97


def test_our_own_trace_is_read_as_the_profile_read_it(tmp_path):
    """Same kernels, counts, classes and times, from the file that ``profile`` leaves."""
    x, weight = torch.randn(64, 64), torch.randn(64)

    def step():
        y = torch.nn.functional.layer_norm(x + 1, (64,), weight)
        return torch.nn.functional.gelu(y @ x).to(torch.bfloat16).contiguous()

    path = tmp_path / "trace.before.json.gz"
    told = median_step(record(step, steps=3, on_cuda=False, save_to=path, before=x.clone), on_cuda=False)
    found = device_work(read_events(TraceFile(path)))
    steps = [[w for w in found if w.step == number] for number in range(3)]
    middle = sorted(steps, key=lambda works: sum(work.duration_ns for work in works))[1]
    medians = [
        sorted(work.duration_ns for work in works)[1] for works in zip(*steps, strict=True)
    ]  # no launch takes longer: on a CPU
    expected = [
        (work.kernel_name, work.category, min(work.duration_ns, median)) for work, median in zip(middle, medians, strict=True)
    ]
    found_by_profile = [(launch.kernel_name, launch.category, launch.duration_ns) for launch in told.launches]
    assert found_by_profile == expected
    assert {w.step for w in found} == {0, 1, 2}
    assert {w.label for w in found if w.is_fusible} >= {"add", "layer_norm", "gelu", "to"}


def test_kernel_names_of_other_classes():
    names = {
        "ampere_sgemm_128x64_nn": OpClass.GEMM,
        "flash_fwd_kernel": OpClass.ATTENTION,
        "cudnn_infer_ampere_scudnn_128x64_relu_xregs": OpClass.OTHER,
        "triton_tem_fused_mm_4": OpClass.GEMM,
        "triton_poi_fused__scaled_dot_product_cudnn_attention_bmm_clone_5": OpClass.POINTWISE,
        "triton_poi_fused_addmm_gelu_view_3": OpClass.POINTWISE,
        "triton_red_fused__to_copy_embedding_mean_mul_9": OpClass.REDUCTION,
        "triton_per_fused_convolution_native_layer_norm_2": OpClass.REDUCTION,
        "triton_for_fused_0": OpClass.POINTWISE,
        "void at::native::reduce_kernel<512>": OpClass.REDUCTION,
        "who_knows": OpClass.OTHER,
    }
    assert {name: kernel_class(name) for name in names} == names
