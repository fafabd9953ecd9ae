"""A whole profile: eager beside captured, what is joined, and what explains the difference."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace

import pytest
import torch

from fusion_advisor.capture import unchanged_step
from fusion_advisor.capture.graph.tracer import capture_regions
from fusion_advisor.capture.profile import _quality, profile_as_it_is, profile_model, reconcile
from fusion_advisor.capture.trace.attribute import Step
from fusion_advisor.capture.unchanged_step import Measurement
from fusion_advisor.errors import MissingKernels, ProfilerAttached
from fusion_advisor.records import Launch
from fusion_advisor.workload.load import describe_live
from tests.tiny import BANDWIDTH, ENVIRONMENT, profile_live, profiled, toy


@pytest.mark.parametrize("name", ["gpt2", "qwen2"])
def test_shares_are_of_the_captured_step_and_nearly_all_of_it_is_joined(name):
    _, capture, live = profiled(name)
    quality = capture.quality
    assert quality.joined_share >= 0.99
    assert quality.kernels == quality.launches == len(capture.eager_launches)
    assert quality.captured_device_ns == sum(launch.duration_ns for launch in capture.launches)
    assert quality.eager_device_ns == sum(launch.duration_ns for launch in capture.eager_launches)
    assert quality.graph_breaks == quality.warnings == ()
    assert len(live.regions) == 1
    assert "attention mask" in quality.reconciliation


def test_every_op_of_the_records_is_where_its_index_says():
    _, capture, _ = profiled("qwen2")
    assert [op.index for op in capture.ops] == list(range(len(capture.ops)))


def called(model):
    """Paths of the submodules that are called; a list of modules is not."""
    return [path for path, module in model.named_modules() if path and not isinstance(module, torch.nn.ModuleList)]


def test_the_model_runs_as_before(tmp_path):
    model, args = toy()
    expected = model(*args)
    loaded = describe_live(model, args)
    notes = []
    capture, live = profile_model(
        model,
        args,
        {},
        workload=loaded.record,
        environment=ENVIRONMENT,
        bandwidth=BANDWIDTH,
        how=Measurement(warmup=1, runs=6, budget_s=0.01, trace_to=tmp_path / "trace.before.json.gz", with_nvtx=True),
        note=notes.append,
    )
    assert torch.equal(model(*args), expected)
    assert torch.equal(live.output, expected)
    assert 5 <= len(capture.eager_step.times_ns) <= 6
    assert capture.eager_step.method == "cpu_time"
    trace = json.loads(gzip.decompress((tmp_path / "trace.before.json.gz").read_bytes()))
    names = {event["name"] for event in trace["traceEvents"]}
    assert {f"fa:module:{path}" for path in called(model)} | {"fa:step:0", "fa:step:2"} <= names
    assert len(notes) == 3


def test_steps_are_traced_and_timed_as_asked(tmp_path):
    model, args = toy()
    capture, _ = profile_model(
        model,
        args,
        {},
        workload=describe_live(model, args).record,
        environment=ENVIRONMENT,
        bandwidth=BANDWIDTH,
        how=Measurement(warmup=1, runs=5, budget_s=0.01, least_s=0.05, traced_steps=1, trace_to=tmp_path / "trace.json.gz"),
    )
    assert sum(capture.eager_step.times_ns) >= 50_000_000
    trace = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))
    assert {event["name"] for event in trace["traceEvents"] if event["name"].startswith("fa:step:")} == {"fa:step:0"}


def test_nvtx_names_phases_steps_and_modules(monkeypatch):
    seen, opened = [], []

    class Range:
        def __init__(self, name, domain=None, payload=None):
            self.name = name if payload is None else f"{name}={payload}"
            assert domain == "fusion_advisor"

        def __enter__(self):
            opened.append(self.name)
            seen.append("/".join(opened))

        def __exit__(self, *_):
            assert opened.pop() == self.name

    monkeypatch.setattr(unchanged_step.nvtx, "annotate", Range)
    model, args = toy()
    profile_model(
        model,
        args,
        {},
        workload=describe_live(model, args).record,
        environment=ENVIRONMENT,
        bandwidth=BANDWIDTH,
        how=Measurement(warmup=1, runs=6, budget_s=0.01, with_nvtx=True),
    )
    assert seen[0] == "fa:warmup"
    assert "fa:trace" in seen and "fa:baseline/fa:step=3" in seen
    assert f"fa:baseline/fa:step=3/fa:module:{called(model)[0]}" in seen
    assert opened == []


@pytest.mark.parametrize("with_nvtx", [False, True])
def test_under_nsys_the_timed_step_is_marked_and_torchs_profiler_is_not_started(monkeypatch, with_nvtx):
    seen = []
    model, args = toy()

    def start():
        model.register_forward_pre_hook(lambda *_: seen.append("step"))
        seen.append("start")

    monkeypatch.setattr(torch.cuda.profiler, "start", start)
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: seen.append("stop"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(unchanged_step.profiler, "record", lambda *_, **__: pytest.fail("torch.profiler was started"))
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1")
    with pytest.raises(ProfilerAttached, match="nsys is attached") as error:
        profile_model(
            model,
            args,
            {},
            workload=describe_live(model, args).record,
            environment=replace(ENVIRONMENT, device_kind="cuda"),
            bandwidth=BANDWIDTH,
            how=Measurement(warmup=1, runs=6, budget_s=0.01, with_nvtx=with_nvtx),
        )
    runs = seen.count("step")
    assert seen[0] == "start" and seen[-1] == "stop" and 5 <= runs == len(seen) - 2
    assert f"the {runs} timed runs of the eager step, between cudaProfilerStart and" in error.value.note_text


def test_nsys_is_no_obstacle_on_a_cpu(monkeypatch):
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1")
    model, args = toy()
    profile_live(model, args)


def test_launches_without_any_kernel_are_an_error(monkeypatch):
    """As where another profiler holds the device's counters."""
    model, args = toy()
    monkeypatch.setattr(unchanged_step, "median_step", lambda trace, on_cuda: Step(launches=(), calls=12))
    with pytest.raises(MissingKernels, match="0 of 12"):
        profile_model(
            model,
            args,
            {},
            workload=describe_live(model, args).record,
            environment=ENVIRONMENT,
            bandwidth=BANDWIDTH,
            how=Measurement(warmup=1, runs=5, budget_s=0.01),
        )


def step(*launches, calls=None):
    made = tuple(Launch(kernel_name="k", op_index=index, duration_ns=ns, category=category) for index, ns, category in launches)
    return Step(launches=made, calls=len(made) if calls is None else calls)


def test_dropped_kernels_are_a_warning():
    _, capture, live = profiled("toy")
    computing = next(op.index for op in capture.ops if op.target == "aten.tanh.default")
    whole = step((computing, 100, "pointwise"))
    assert _quality(whole, whole, list(capture.ops), live).warnings == ()
    dropped = step((computing, 100, "pointwise"), calls=2)
    assert "dropped" in _quality(dropped, whole, list(capture.ops), live).warnings[0]
    assert "captured trace" in _quality(whole, dropped, list(capture.ops), live).warnings[0]


def test_only_time_with_an_op_and_a_line_is_joined():
    _, capture, live = profiled("toy")
    computing = next(op.index for op in capture.ops if op.target == "aten.tanh.default")
    mixed = step((computing, 300, "pointwise"), (None, 100, "other"))
    assert _quality(mixed, mixed, list(capture.ops), live).joined_share == pytest.approx(0.75)


def test_reconciliation_names_the_categories_that_changed_largest_first():
    text = reconcile(
        step((None, 1000_000, "gemm"), (None, 500_000, "attention")),
        step((None, 1000_000, "gemm"), (None, 1500_000, "attention"), (None, 100_000, "pointwise")),
        [],
    )
    assert "+73.3%" in text
    assert text.index("attention +1000 µs") < text.index("pointwise +100 µs")
    assert "gemm" not in text
    assert reconcile(step((None, 10, "gemm")), step((None, 10, "gemm")), []).count(":") == 0


def test_regions_of_somebody_else_are_profiled_without_an_eager_step():
    model, args = toy()
    live = capture_regions(model, args, {})
    capture = profile_as_it_is(live, BANDWIDTH, torch.device("cpu"))
    assert capture.eager_launches == ()
    assert capture.quality.joined_share >= 0.99
    assert len(capture.launches) > 10


class TwoPasses(torch.nn.Module):
    def forward(self, x):
        y = torch.tanh(x) * 2
        torch._dynamo.graph_break()
        return torch.tanh(y) * 3


def test_regions_are_numbered_through():
    loaded = describe_live(TwoPasses(), (torch.randn(8, 8),))
    capture, _ = profile_model(
        loaded.model,
        loaded.args,
        {},
        workload=loaded.record,
        environment=ENVIRONMENT,
        bandwidth=BANDWIDTH,
        how=Measurement(warmup=0, runs=5, budget_s=0.01),
    )
    assert {op.region for op in capture.ops} == {0, 1}
    assert [op.index for op in capture.ops] == list(range(len(capture.ops)))
    tanh = [op.index for op in capture.ops if op.target == "aten.tanh.default"]
    assert [launch.op_index for launch in capture.launches if launch.kernel_name == "aten::tanh"] == tanh
    assert len(capture.quality.graph_breaks) == 1
