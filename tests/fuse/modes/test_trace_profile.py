"""``profile --trace`` from file to record."""

from __future__ import annotations

import pytest
import torch

from fusion_advisor.capture.trace import profiler
from fusion_advisor.errors import MissingKernels, UnreadableTrace
from fusion_advisor.fuse.modes import trace_profile
from fusion_advisor.fuse.modes.trace_profile import profile_trace
from fusion_advisor.records import TraceReport
from fusion_advisor.records.serialize import TRACE_SCHEMA, dump_record, load_record
from tests.traces import Recorder, event, of_capture, write

KNOWN = {
    ("to", "pow", "mean", "add", "rsqrt", "mul", "to", "mul"): "rmsnorm",
    ("add", "to", "pow", "mean", "add", "rsqrt", "mul", "to", "mul"): "add_rmsnorm",
    ("mul", "neg", "cat", "mul", "add"): "rope",
    ("silu", "mul"): "swiglu",
    ("mul", "pow", "mul", "add", "mul", "tanh", "add", "mul"): "gelu_tanh",
    ("add", "layer_norm"): "add_layernorm",
}


@pytest.fixture(autouse=True)
def known(monkeypatch):
    """The library's names are looked at in their own test; here they would take two seconds each time."""
    monkeypatch.setattr(trace_profile, "library_sequences", lambda kernel_dirs: KNOWN)


def profiled(path, **options):
    return profile_trace(path, **{"min_share": 0.005, "top": 20, **options})


@pytest.mark.parametrize(
    ("name", "chains"),
    [
        # per step: 56 norms after a residual add (the first has none), 28 layers with two rotations and one gated activation
        ("qwen2.5-7b-bf16-1x512-h200", {"add_rmsnorm": 56, "rope": 56, "swiglu": 28}),
        ("gpt2-fp32-1x1024-h200", {"gelu_tanh": 12, "add_layernorm": 24}),
    ],
)
def test_chains_of_a_real_step_by_kernel_names_and_order_alone(tmp_path, name, chains):
    document, capture = of_capture(name, steps=2)
    report = profiled(write(tmp_path / "trace.json.gz", document))
    assert {chain.kernel: chain.sites for chain in report.chains if chain.is_whole and chain.kernel} == {
        kernel: 2 * sites for kernel, sites in chains.items()
    }
    assert (report.steps, report.kernels) == (2, 2 * len(capture["launches"]))
    assert report.busy_ns == pytest.approx(2 * sum(launch["duration_ns"] for launch in capture["launches"]), rel=1e-3)
    assert report.device_names == ("NVIDIA H200",)
    assert all(chain.saving_bound_ns is None for chain in report.chains)  # no shapes in the trace
    assert any("record_shapes" in sentence for sentence in report.unknown)
    by_category = {category: count for category, count, _ in report.categories}
    assert by_category["gemm"] == 2 * sum(launch["category"] == "gemm" for launch in capture["launches"])
    assert load_record(TraceReport, dump_record(report, TRACE_SCHEMA), schema=TRACE_SCHEMA, name="x") == report


def layered(inputs=None, layers=5):
    recorder = Recorder()
    for _ in range(layers):
        recorder.op("aten::linear>aten::addmm", ("nvjet", 20.0))
        recorder.op("aten::mul", ("mul_kernel", 4.0), inputs=inputs).op("aten::tanh", ("tanh_kernel", 4.0), inputs=inputs)
        recorder.op("aten::add", ("add_kernel", 5.0), inputs=inputs)
    return recorder


def test_shares_are_of_busy_time_and_kernels_are_ranked(tmp_path):
    recorder = layered()
    # another stream, wholly under the first GEMM: it adds a kernel and no time
    first = next(one for one in recorder.events if one["name"] == "nvjet")
    recorder.events.append(event("kernel", "copy_kernel", first["ts"] + 1, 3.0, pid=0, tid=8, stream=8, correlation=9999))
    report = profiled(write(tmp_path / "t.json", recorder.document()))
    assert report.busy_ns == 5 * 33_000
    assert [(row.name, row.count, row.device_ns) for row in report.ranked] == [
        ("nvjet", 5, 100_000), ("add_kernel", 5, 25_000), ("mul_kernel", 5, 20_000), ("tanh_kernel", 5, 20_000),
        ("copy_kernel", 1, 0),
    ]  # fmt: skip
    assert sum(row.share for row in report.ranked) == pytest.approx(1)
    (chain,) = report.chains
    assert (chain.id, chain.ops, chain.sites, chain.launches, chain.device_ns) == ("C1", ("mul", "tanh", "add"), 5, 15, 65_000)
    assert chain.share == pytest.approx(65 / 165)
    assert any("none are marked" in sentence for sentence in report.unknown)
    shorter = profiled(write(tmp_path / "t.json", recorder.document()), top=2, min_share=0.5)
    assert (len(shorter.ranked), shorter.ranked_left_out, shorter.chains) == (2, 3, ())


def test_a_bound_needs_shapes_and_stands_on_the_fastest_kernel(tmp_path):
    x = [[1000, 1000], []], ["float", "Scalar"]
    report = profiled(write(tmp_path / "t.json", layered(inputs=x).document()))
    (chain,) = report.chains
    assert report.has_shapes
    assert report.bytes_per_s == 8_000_000 * 10**9 // 4_000  # 4 MB read and 4 MB written in 4 µs
    assert chain.floor_bytes == 5 * 8_000_000
    assert chain.saving_bound_ns == chain.device_ns - 5 * 4_000
    assert not any("record_shapes" in sentence for sentence in report.unknown)


def test_a_gated_activation_around_a_gemm_is_one_chain_only_if_the_library_knows_it(tmp_path):
    recorder = Recorder()
    for _ in range(4):
        recorder.op("aten::linear", "gemm").op("aten::silu", "silu_kernel").op("aten::linear", "gemm").op(
            "aten::mul", "mul_kernel"
        )
        recorder.op("aten::linear", "gemm").op("aten::exp", "exp_kernel").op("aten::linear", "gemm").op("aten::neg", "neg_kernel")
    (chain,) = profiled(write(tmp_path / "t.json", recorder.document())).chains
    assert (chain.ops, chain.sites, chain.launches, chain.kernel) == (("silu", "[gemm]", "mul"), 4, 8, "swiglu")


def test_without_ops_kernels_go_by_their_own_names(tmp_path):
    """As under a CUDA graph: one launch, no ops."""
    recorder = Recorder()
    for _ in range(6):
        for name in ("nvjet_gemm", "at::native::tanh_kernel_cuda(int)", "at::native::CUDAFunctor_add<float>"):
            recorder.op("", name if "gemm" in name else f"void at::native::vectorized_elementwise_kernel<4, {name}>()")
    recorder.events = [one for one in recorder.events if one["cat"] != "cuda_runtime"]
    report = profiled(write(tmp_path / "t.json", recorder.document()))
    assert [(chain.ops, chain.sites) for chain in report.chains] == [(("tanh", "add"), 6)]
    assert report.joined_share == 0
    assert any("CUDA graphs" in sentence for sentence in report.unknown)


@pytest.mark.parametrize(("lost", "is_error"), [(1, False), (3, True)])
def test_missing_kernels(tmp_path, lost, is_error):
    recorder = layered(layers=50)
    kernels = [one for one in recorder.events if one["cat"] == "kernel"]
    document = {"traceEvents": [one for one in recorder.events if one not in kernels[:lost]]}
    path = write(tmp_path / "t.json", document)
    if is_error:
        with pytest.raises(MissingKernels, match="197 of 200 launched kernels") as error:
            profiled(path)
        assert (error.value.code, error.value.exit_code) == ("FA502", 6)
    else:
        assert profiled(path).warnings == ("1 of 200 launches have no kernel in the trace",)


def test_launches_alone_are_no_cpu_trace(tmp_path):
    events = [one for one in layered().events if one["cat"] != "kernel"]
    with pytest.raises(MissingKernels, match="0 of 20") as error:
        profiled(write(tmp_path / "t.json", {"traceEvents": events}))
    assert "another profiler" in error.value.note_text


@pytest.mark.parametrize("events", [[], [{"ph": "M", "name": "process_name"}], [event("python_function", "f", 0.0, 1.0)]])
def test_a_trace_of_something_else_is_refused(tmp_path, events):
    with pytest.raises(UnreadableTrace, match="no kernels and no CPU ops"):
        profiled(write(tmp_path / "t.json", {"traceEvents": events}))


def test_a_cpu_trace_ranks_op_calls(tmp_path):
    """Our own trace, as a CPU run leaves it."""
    x = torch.randn(128, 128)

    def step():
        y = x
        for _ in range(4):
            y = torch.tanh(y @ x * 2 + 1)
        return y

    path = tmp_path / "trace.before.json.gz"
    step()  # a process's first product sets its library up: beside it no chain would have a share
    profiler.record(step, steps=2, on_cuda=False, save_to=path)
    report = profiled(path)
    assert (report.device_kind, report.steps, report.launches, report.device_names) == ("cpu", 2, 0, ())
    (chain,) = report.chains
    assert (chain.ops, chain.sites) == (("mul", "add", "tanh"), 8)
    assert {row.op: row.count for row in report.ranked} == {"matmul": 8, "mul": 8, "add": 8, "tanh": 8}
