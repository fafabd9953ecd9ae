"""A trace that is recorded for real: every step, modules as ranges, a profiler that lets go."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import time

import pytest
import torch

from fusion_advisor.capture.trace import profiler as timeline
from fusion_advisor.capture.trace.profiler import module_ranges, plain_name, record


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
@pytest.mark.serial
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


def test_a_scripted_part_which_takes_no_hook_has_no_range():
    scripted = torch.jit.script(torch.nn.Sequential(torch.nn.Tanh()))
    model = torch.nn.Sequential(torch.nn.ReLU(), scripted)
    opened = []

    def opening(name):
        opened.append(name)
        return contextlib.nullcontext()

    with module_ranges(model, opening):
        model(torch.zeros(2))
    assert len(opened) == 1 and opened[0].endswith("0")
