"""Chrome traces: what is kept of them, and one recorded for real."""

from __future__ import annotations

import gzip
import json
import os
import time

import pytest
import torch

from fusion_advisor.capture.trace import profiler as timeline
from fusion_advisor.capture.trace.profiler import module_ranges, plain_name, read_events, record


def event(cat, name, ts, dur, *, tid=1, ph="X", **args):
    return {"ph": ph, "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": tid, "args": args}


def test_events_are_sorted_by_kind_and_time():
    trace = read_events(
        [
            event(
                "kernel", "second", 20.0, 2.5, correlation=2, stream=7, grid=[4, 1, 1], block=[128, 1, 1], **{"External id": 11}
            ),
            event("kernel", "first", 10.0, 1.0, correlation=1),
            event("gpu_memcpy", "Memcpy HtoD", 5.0, 1.0, correlation=3),
            event("gpu_memset", "Memset", 6.0, 1.0, correlation=4),
            event("cuda_runtime", "cudaLaunchKernel", 1.0, 0.5, correlation=1),
            event("cuda_runtime", "cudaLaunchKernelExC", 1.2, 0.5, correlation=5),
            event("cuda_driver", "cuLaunchKernelEx", 1.5, 0.5, correlation=2),
            event("cuda_runtime", "cudaMemcpyAsync", 1.7, 0.5, correlation=3),
            event("cuda_runtime", "cudaDeviceSynchronize", 2.0, 50.0, correlation=9),
            event("cpu_op", "aten::mul", 0.5, 3.0, **{"External id": 11}),
            event("user_annotation", "fa:step:0", 0.0, 100.0),
            event("user_annotation", "the user's own", 0.0, 100.0),
        ]
    )
    assert [kernel.name for kernel in trace.kernels] == ["Memcpy HtoD", "Memset", "first", "second"]
    assert [call.correlation for call in trace.launches] == [1, 5, 2, 3]
    assert [span.name for span in trace.ranges] == ["fa:step:0"]
    assert [op.external for op in trace.cpu_ops] == [11]
    last = trace.kernels[-1]
    assert (last.start_ns, last.duration_ns, last.end_ns) == (20_000, 2_500, 22_500)
    assert (last.stream, last.grid, last.block, last.external) == (7, (4, 1, 1), (128, 1, 1), 11)


def test_annotations_mirrored_onto_the_device_are_left_out():
    trace = read_events(
        [event("gpu_user_annotation", "fa:op:3", 0.0, 50.0, tid=7), event("gpu_user_annotation", "fa:step:0", 0.0, 90.0, tid=7)]
    )
    assert trace.kernels == trace.ranges == ()


def test_flows_instants_and_metadata_are_left_out():
    trace = read_events(
        [
            event("ac2g", "ac2g", 0.0, 1.0, ph="s"),
            event("kernel", "k", 0.0, 1.0, ph="f"),
            {"ph": "M", "name": "process_name", "args": {"name": "python"}},
            {"ph": "i", "name": "Iteration Start", "ts": 1.0},
        ]
    )
    assert trace.kernels == trace.launches == trace.cpu_ops == ()


def test_an_outer_event_comes_before_the_one_inside_it():
    trace = read_events([event("cpu_op", "inner", 1.0, 2.0), event("cpu_op", "outer", 1.0, 5.0)])
    assert [op.name for op in trace.cpu_ops] == ["outer", "inner"]


def test_a_stream_that_is_no_number_is_zero():
    assert read_events([event("kernel", "k", 0.0, 1.0, stream="default")]).kernels[0].stream == 0


def test_recording_keeps_every_step_and_the_raw_trace(tmp_path):
    saved = tmp_path / "trace.json.gz"
    x = torch.randn(8, 8)
    trace = record(lambda: torch.tanh(x @ x), steps=3, on_cuda=False, save_to=saved)
    assert [span.name for span in trace.ranges] == ["fa:step:0", "fa:step:1", "fa:step:2"]
    assert [op.name for op in trace.cpu_ops].count("aten::tanh") == 3
    assert trace.kernels == ()
    raw = json.loads(gzip.decompress(saved.read_bytes()))
    assert any(found.get("name") == "aten::tanh" for found in raw["traceEvents"])


def test_recording_does_without_the_profiler_that_imports_inductor(monkeypatch):
    def start(_):
        pytest.fail("torch.profiler.profile.start() imports torch._inductor, which takes longer than most recordings")

    monkeypatch.setattr(torch.profiler.profile, "start", start)
    assert record(lambda: torch.ones(3).tanh(), steps=1, on_cuda=False).cpu_ops


def named_ranges(found):
    return [span.name for span in found.ranges if "module" in span.name]


def test_a_saved_trace_is_strict_ascii_with_the_modules_in_it_and_no_host(tmp_path):
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.add_module('naïve "\\\n', torch.nn.Linear(4, 4))
            self.act = torch.nn.Tanh()

        def forward(self, x):
            for child in self.children():
                x = child(x)
            return x

    model = torch.nn.Sequential(Layer(), Layer())
    saved = tmp_path / "trace.json.gz"
    with module_ranges(model, torch.profiler.record_function):
        trace = record(lambda: model(torch.ones(2, 4)), steps=1, on_cuda=False, save_to=saved)
    own = ["", ".na?ve ???", ".act"]
    assert named_ranges(trace) == [f"fa:module:{layer}{name}" for layer in "01" for name in own]
    text = gzip.decompress(saved.read_bytes())
    document = json.loads(text)  # strict: a control character would be refused
    assert text.isascii() and "host_name" not in document
    ranges = {event["name"]: event for event in document["traceEvents"] if event.get("cat") == "user_annotation"}
    outer, inner = ranges["fa:module:0"], ranges["fa:module:0.act"]
    assert outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_ranges_are_closed_and_hooks_gone_when_a_module_raises():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(3, 3))
    opened = []

    class Range:
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            opened.append(self.name)

        def __exit__(self, *_):
            opened.remove(self.name)

    with pytest.raises(RuntimeError), module_ranges(model, Range):
        model(torch.ones(2, 4))
    assert opened == []
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_model_that_runs_otherwise_with_hooks_gets_no_ranges():
    model = torch.nn.Sequential(torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)).eval()
    with torch.no_grad(), module_ranges(model, torch.profiler.record_function):
        trace = record(lambda: model(torch.ones(1, 3, 8)), steps=1, on_cuda=False)
    assert named_ranges(trace) == []
    assert any("_transformer_encoder_layer_fwd" in op.name for op in trace.cpu_ops)


def test_plain_names():
    assert plain_name("model.layers.3.mlp") == "model.layers.3.mlp"
    assert plain_name('a"b\\c\n\u202e') == "a?b?c??"


class Stopping:
    """A profiler that notes the variable that Kineto goes by when it is stopped."""

    seen: str | None = None

    def stop(self):
        self.seen = os.environ.get("TEARDOWN_CUPTI")


@pytest.mark.parametrize(
    ("cuda", "own", "seen"),
    [("13.0", None, "1"), ("12.6", None, "1"), ("12.4", None, None), ("13.0", "0", "0"), (None, None, None)],
)
def test_cupti_lets_go_of_the_process_behind_a_trace(monkeypatch, cuda, own, seen):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.delenv("TEARDOWN_CUPTI", raising=False)
    if own is not None:
        monkeypatch.setenv("TEARDOWN_CUPTI", own)
    profiler = Stopping()
    timeline._stop_and_let_go(profiler)
    assert profiler.seen == seen and os.environ.get("TEARDOWN_CUPTI") == own


@pytest.mark.gpu
def test_on_a_gpu_traces_are_whole_again_and_again_and_launches_stay_quick():
    """A coarse ratio within one run: with CUPTI attached a launch takes 1.4 times as long."""
    x = torch.randn(64, 64, device="cuda")

    def step():
        y = x
        for _ in range(300):
            y = y + 1
        return y

    def fastest_s():
        times = []
        for _ in range(60):
            torch.cuda.synchronize()
            started = time.perf_counter()
            step()
            times.append(time.perf_counter() - started)
        return min(times)

    step()
    before_s = fastest_s()
    for _ in range(3):
        traced = timeline.record(step, steps=2, on_cuda=True)
        assert len(traced.kernels) == 600
    fastest_s()
    assert fastest_s() < 1.25 * before_s
