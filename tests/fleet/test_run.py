"""Whole runs: both engines, workers that die, interruptions; nothing lost, nothing counted twice."""

from __future__ import annotations

import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from fusion_advisor.errors import CannotWrite, EngineLost
from fusion_advisor.fleet.engines import local, on_ray
from fusion_advisor.fleet.find import find_traces
from fusion_advisor.fleet.reduce import Task, reduce_trace
from fusion_advisor.fleet.run import FleetOptions, run_fleet


@pytest.fixture(scope="module")
def once(traces, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    states = []
    options = FleetOptions(patterns=(f"{traces}/**/*.json.gz",), output=folder, processes=2)
    return options, run_fleet(options, states.append), states


def test_every_trace_is_ranked_or_has_a_reason(once):
    _, report, states = once
    assert report.traces + len(report.failed) == 40
    assert len(report.failed) == 9 and report.jobs >= 8
    assert [state.done for state in states] == list(range(1, 41)) and states[-1].failed == 9
    assert states[-1].done_bytes == states[-1].all_bytes and states[-1].peak_bytes < 1_000_000_000


def test_the_ranking_is_that_of_the_traces_themselves(once, traces):
    """Every chain's time again, trace by trace, through ``profile --trace``."""
    from fusion_advisor.fleet.reduce import LEAST_SHARE
    from fusion_advisor.fuse.modes.trace_profile import profile_trace

    _, report, _ = once
    failed = {row.url for row in report.failed}
    sums = {}
    for path in sorted(traces.rglob("*.json.gz")):
        if str(path) not in failed:
            for chain in profile_trace(path, min_share=LEAST_SHARE, top=10_000).chains:
                name = " → ".join(chain.ops)
                sums[name] = sums.get(name, 0) + chain.device_ns
    best = sorted(sums.items(), key=lambda row: -row[1])[: len(report.chains)]
    assert [(row.ops, round(row.gpu_hours * 3.6e12)) for row in report.chains][:10] == best[:10]


def test_a_second_run_reads_only_what_is_new(once, traces, tmp_path):
    options, report, _ = once
    shutil.copytree(options.output, tmp_path / "run")
    states = []
    again = replace(options, output=tmp_path / "run")
    assert run_fleet(again, states.append) == report and states == []
    removed = sorted((tmp_path / "run" / "parts").iterdir())[:3]
    for path in removed:
        path.unlink()
    assert run_fleet(again, states.append) == report
    assert len(states) == 3


def test_ray_gives_the_same_table(once, tmp_path):
    pytest.importorskip("ray")
    options, report, _ = once
    assert run_fleet(replace(options, output=tmp_path, engine="ray")) == report


class _Kills:
    """A reducer whose worker dies on the traces of one name, as many times as it may."""

    def __init__(self, name, marks, times):
        self.name, self.marks, self.times = name, marks, times

    def __call__(self, task):
        if self.name in task.source.url:
            marks = list(self.marks.glob("*.mark"))
            if len(marks) < self.times:
                (self.marks / f"{len(marks)}.mark").touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return reduce_trace(task)


def tasks_of(traces, parts, count=6):
    sources = [source for source in find_traces([f"{traces}/**/*.json.gz"]) if "bad" not in source.url]
    return [Task(source=source, parts=parts) for source in sources[:count]]


@pytest.mark.parametrize(("times", "lost"), [(1, 0), (9, 1)])
def test_a_killed_worker_costs_its_own_trace_at_most(traces, tmp_path, times, lost):
    tasks = tasks_of(traces, tmp_path)
    victim = tasks[2].source.url
    results = list(local.run(tasks, processes=2, reduce=_Kills(victim, tmp_path, times)))
    assert sorted(result.source.url for result in results) == sorted(task.source.url for task in tasks)
    died = [result.source.url for result in results if result.error_code == local.WORKER_DIED]
    assert died == [victim] * lost
    assert len(list(tmp_path.glob("*.parquet"))) == len(tasks) - lost


@pytest.mark.parametrize(("times", "lost"), [(1, 0), (99, 1)])
def test_ray_repeats_the_task_of_a_killed_worker(traces, tmp_path, times, lost):
    pytest.importorskip("ray")
    tasks = tasks_of(traces, tmp_path, count=3)
    results = list(on_ray.run(tasks, reduce=_Kills(tasks[1].source.url, tmp_path, times)))
    assert len(results) == 3
    assert sum(result.error_code == local.WORKER_DIED for result in results) == lost
    assert len(list(tmp_path.glob("*.parquet"))) == 3 - lost


def test_a_full_disk_ends_the_run_and_keeps_the_parts(traces, tmp_path):
    tasks = tasks_of(traces, tmp_path)
    found = []
    with pytest.raises(CannotWrite):
        for result in local.run(tasks, processes=1, reduce=_Full(tmp_path, 2)):
            found.append(result)
    assert len(found) == len(list(tmp_path.glob("*.parquet"))) == 2


class _Full:
    def __init__(self, folder, most):
        self.folder, self.most = folder, most

    def __call__(self, task):
        if len(list(self.folder.glob("*.parquet"))) >= self.most:
            raise CannotWrite(path=self.folder, detail="No space left on device")
        return reduce_trace(task)


def test_an_interrupted_run_goes_on(once, tmp_path):
    options, report, _ = once
    cut = replace(options, output=tmp_path)
    seen = []

    def stop(state):
        seen.append(state)
        if len(seen) == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_fleet(cut, stop)
    kept = len(list((tmp_path / "parts").glob("*.parquet")))
    assert kept >= 7 and not list(Path(tmp_path / "parts").glob(".*.tmp"))
    states = []
    assert run_fleet(cut, states.append) == report
    assert len(states) == 40 - kept


def test_a_cluster_that_is_gone_is_said(traces, tmp_path, monkeypatch):
    ray = pytest.importorskip("ray")

    def lost(_, tasks, reduce):
        yield reduce(tasks[0])
        raise ray.exceptions.RaySystemError("the head is gone")

    monkeypatch.setattr(on_ray, "_results", lost)
    tasks = tasks_of(traces, tmp_path, count=2)
    with pytest.raises(EngineLost, match="1 of 2"):
        list(on_ray.run(tasks))
    assert len(list(tmp_path.glob("*.parquet"))) == 1
