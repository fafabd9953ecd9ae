"""Traces with more events than a worker may hold."""

from __future__ import annotations

import json

import pytest

from fusion_advisor.capture.trace.chrome_trace import TraceFile
from fusion_advisor.errors import TraceTooLarge
from fusion_advisor.fleet.window import read_window
from fusion_advisor.fuse.modes.trace_profile import join_trace, rank_trace
from tools.make_fleet import Plan, events


def written(path, *, steps, is_marked=True):
    plan = Plan(job="j", model="gpt2", rank=0, world=1, steps=steps, scale=1.0, day=0, has_shapes=True, launches=60)
    made = [event for event in events(plan) if is_marked or event["cat"] != "user_annotation"]
    path.write_text(json.dumps({"traceEvents": made}))
    return TraceFile(path)


def test_a_trace_that_fits_is_read_whole(tmp_path):
    window = read_window(written(tmp_path / "t.json", steps=4), most_events=10_000)
    assert window.read_share == 1 and len(window.trace.kernels) == 240


def test_of_a_large_trace_whole_steps_are_read(tmp_path):
    whole = join_trace(file := written(tmp_path / "t.json", steps=8), read_window(file).trace)
    window = read_window(written(tmp_path / "t.json", steps=8), most_events=3 * 181 + 20)
    part = join_trace(TraceFile(tmp_path / "t.json"), window.trace)
    assert window.read_share == pytest.approx(3 / 8, rel=0.02)
    assert {item.step for item in part.work} == {0, 1, 2}
    all_chains = rank_trace(whole, {}, min_share=0.0, top=100).chains
    found = rank_trace(part, {}, min_share=0.0, top=100).chains
    assert [chain.ops for chain in found] == [chain.ops for chain in all_chains]
    for one, every in zip(found, all_chains, strict=True):
        assert one.device_ns / window.read_share == pytest.approx(every.device_ns, rel=0.02)


def test_without_steps_the_beginning_is_read(tmp_path):
    window = read_window(written(tmp_path / "t.json", steps=8, is_marked=False), most_events=500)
    assert 0.2 < window.read_share < 0.5
    assert len(window.trace.kernels) == pytest.approx(480 * window.read_share, rel=0.15)


def test_a_step_that_does_not_fit_is_refused(tmp_path):
    with pytest.raises(TraceTooLarge, match="not one of its steps"):
        read_window(written(tmp_path / "t.json", steps=4), most_events=50)
