"""Workers that die, disks that fill, clusters that go away."""

from __future__ import annotations

import os

import pytest

from fusion_advisor.errors import CannotWrite, EngineLost
from fusion_advisor.fleet import local_engine, ray_engine
from fusion_advisor.fleet.task import WORKER_DIED, Task
from fusion_advisor.records.trace import TraceSource
from tests.fleet.reducers import FillsDisk, KillsWorker, mark


@pytest.fixture
def tasks(tmp_path):
    parts = tmp_path / "parts"
    parts.mkdir()
    (tmp_path / "marks").mkdir()
    sources = [TraceSource(url=f"trace-{number}", size_bytes=1000, version="1") for number in range(8)]
    return [Task(source=source, parts=parts, sequences={}) for source in sources]


@pytest.fixture(scope="module")
def cluster():
    """One Ray for all tests here: it takes seconds to start."""
    ray = pytest.importorskip("ray")
    os.environ.setdefault("RAY_TQDM_PATCH_PRINT", "0")  # as the engine does, or Ray would replace print for the tests to come
    ray.init(address="local", log_to_driver=False, include_dashboard=False, logging_level="ERROR", num_cpus=2)
    yield ray
    ray.shutdown()


def run_local(tasks, reduce):
    return local_engine.run(tasks, reduce, processes=2)


ENGINES = {"local": run_local, "ray": ray_engine.run}


@pytest.mark.parametrize("engine", ENGINES)
def test_each_trace_is_read_once(tasks, engine, request):
    request.getfixturevalue("cluster")
    results = list(ENGINES[engine](tasks, mark))
    assert sorted(result.source.url for result in results) == [task.source.url for task in tasks]
    assert {path.read_text() for path in tasks[0].parts.iterdir()} == {"x"}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("times", "lost"), [(1, 0), (99, 1)])
def test_a_killed_worker_costs_its_own_trace_at_most(tasks, tmp_path, engine, times, lost, request):
    request.getfixturevalue("cluster")
    victim = tasks[2].source.url
    results = list(ENGINES[engine](tasks, KillsWorker(victim, tmp_path / "marks", times)))
    assert sorted(result.source.url for result in results) == [task.source.url for task in tasks]
    assert [result.source.url for result in results if result.error_code == WORKER_DIED] == [victim] * lost
    assert len(list(tasks[0].parts.iterdir())) == len(tasks) - lost


@pytest.mark.parametrize("engine", ENGINES)
def test_a_full_disk_ends_the_run_and_keeps_the_parts(tasks, engine, request):
    request.getfixturevalue("cluster")
    found = []
    with pytest.raises(CannotWrite, match="No space left"):
        for result in ENGINES[engine](tasks, FillsDisk(3)):
            found.append(result)
    assert len(list(tasks[0].parts.iterdir())) >= 3


def test_a_cluster_that_is_gone_is_said(tasks, cluster, monkeypatch):
    def lost(_, tasks, reduce):
        yield reduce(tasks[0])
        raise cluster.exceptions.RaySystemError("the head is gone")

    monkeypatch.setattr(ray_engine, "_results", lost)
    with pytest.raises(EngineLost, match="1 of 8"):
        list(ray_engine.run(tasks, mark))
    assert len(list(tasks[0].parts.iterdir())) == 1


def test_without_ray_the_extra_is_named(tasks, monkeypatch):
    import sys

    from fusion_advisor.errors import MissingExtra

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match="ray"):
        list(ray_engine.run(tasks, mark))


def test_print_stays_pythons_own(tasks):
    pytest.importorskip("ray")
    own = print
    list(ray_engine.run(tasks[:1], mark))
    assert print is own
