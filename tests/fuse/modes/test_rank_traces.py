"""A folder of traces, one for each rank, becomes one report."""

from __future__ import annotations

import pytest

from fusion_advisor.errors import UnreadableTrace
from fusion_advisor.fuse.modes.rank_traces import profile_rank_traces
from fusion_advisor.fuse.modes.trace_profile import profile_trace
from fusion_advisor.records import TraceReport
from fusion_advisor.records.serialize import TRACE_SCHEMA, dump_record, load_record
from tests.traces import Recorder, event, write

LAYERS = 5
REDUCE_US = 6.0
LATE_US = 9.0
"""So much longer rank 0 sits in each all-reduce: rank 1 comes later."""


def of_rank(rank, *, world_size=2, reduces=LAYERS, **facts):
    """Five layers, each with an all-reduce that NCCL runs on a stream of its own while a copy runs on another."""
    recorder = Recorder()
    for layer in range(LAYERS):
        recorder.op("aten::linear", ("nvjet", 20.0 if rank == 0 else 20.0 + LATE_US))
        for name in ("mul", "tanh", "add"):
            recorder.op(f"aten::{name}", (f"{name}_kernel", 4.0))
        recorder.now = recorder.device_now
        if layer < reduces:
            us = REDUCE_US + (LATE_US if rank == 0 else 0.0)
            recorder.op("", ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", us), stream=8)
            recorder.now = recorder.device_now
    told = {"rank": rank, "world_size": world_size, "backend": "nccl"}
    return recorder.document(distributedInfo=told, **facts)


def profiled(folder, **options):
    return profile_rank_traces(folder, **{"min_share": 0.005, "top": 20, **options})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("ranks")
    write(place / "b.json", of_rank(0))
    write(place / "a.json.gz", of_rank(1))
    return place


def test_a_row_for_each_rank_that_adds_up_to_its_span(folder):
    report = profiled(folder)
    assert [(one.rank, one.trace, one.device, one.collectives) for one in report.ranks] == [
        (0, "b.json", "NVIDIA H200", LAYERS), (1, "a.json.gz", "NVIDIA H200", LAYERS),
    ]  # fmt: skip
    for one in report.ranks:
        assert one.compute_ns + one.communication_ns + one.waiting_ns + one.idle_ns == one.span_ns
        assert one.communication_ns == pytest.approx(LAYERS * REDUCE_US * 1000)
    assert [one.waiting_ns for one in report.ranks] == [pytest.approx(LAYERS * LATE_US * 1000), 0]
    assert report.ranks[1].compute_ns - report.ranks[0].compute_ns == pytest.approx(LAYERS * LATE_US * 1000)
    assert report.warnings == ()
    assert load_record(TraceReport, dump_record(report, TRACE_SCHEMA), schema=TRACE_SCHEMA, name="x") == report


def test_counts_and_times_are_sums_over_the_ranks(folder):
    alone = [profile_trace(folder / name, min_share=0.005, top=20) for name in ("b.json", "a.json.gz")]
    report = profiled(folder)
    assert report.busy_ns == sum(one.busy_ns for one in alone)
    assert report.kernels == sum(one.kernels for one in alone)
    (chain,), (first,) = report.chains, alone[0].chains
    assert (chain.ops, chain.sites, chain.device_ns) == (first.ops, 2 * LAYERS, 2 * first.device_ns)
    assert chain.share == pytest.approx(chain.device_ns / report.busy_ns)
    assert {row.name: row.count for row in report.ranked}["nvjet"] == 2 * LAYERS
    assert sum(row.share for row in report.ranked) == pytest.approx(1)
    assert {name: count for name, count, _ in report.categories}["collective"] == 2 * LAYERS
    assert (len(profiled(folder, top=2).ranked), profiled(folder, top=2).ranked_left_out) == (2, 3)


def test_what_does_not_fit_together_is_said(tmp_path):
    write(tmp_path / "a.json", of_rank(0, world_size=4))
    write(tmp_path / "b.json", of_rank(3, world_size=4, reduces=LAYERS - 1))
    report = profiled(tmp_path)
    assert [one.rank for one in report.ranks] == [0, 3]
    assert all(one.waiting_ns == 0 for one in report.ranks)
    first, second = report.warnings
    assert first.startswith("2 of 4 ranks have a trace here") and "differ in number or order" in second


def test_a_file_name_tells_the_rank_where_the_trace_does_not(tmp_path):
    for rank in (1, 0):
        write(tmp_path / f"host_{1 - rank}.rank{rank}.json", {**of_rank(rank), "distributedInfo": None})
    assert [(one.rank, one.trace) for one in profiled(tmp_path).ranks] == [(0, "host_1.rank0.json"), (1, "host_0.rank1.json")]


def test_mistakes(tmp_path):
    with pytest.raises(UnreadableTrace, match=r"holds no \.json"):
        profiled(tmp_path)
    for name in ("a.json", "b.json"):
        write(tmp_path / name, of_rank(0))
    with pytest.raises(UnreadableTrace, match=r"a\.json and b\.json are both of rank 0"):
        profiled(tmp_path)
    (tmp_path / "c.json").write_text("{}")
    with pytest.raises(UnreadableTrace, match=r"c\.json"):
        profiled(tmp_path)


def test_gloo_runs_on_threads_of_its_own(tmp_path):
    """The op that asks for a collective returns at once; the range of the process group's thread lasts until its end."""
    for rank, us in ((0, 50.0), (1, 20.0)):
        events = [
            event("cpu_op", "aten::mm", 0.0, 70.0 - us),
            event("cpu_op", "c10d::allreduce_", 70.0 - us, 2.0),
            event("user_annotation", "gloo:all_reduce", 71.0 - us, us, tid=2),
            event("cpu_op", "aten::mm", 75.0, 25.0),
        ]
        write(tmp_path / f"rank{rank}.json", {"traceEvents": events})
    first, second = profiled(tmp_path).ranks
    assert [one.collectives for one in (first, second)] == [1, 1]
    assert (first.waiting_ns, first.communication_ns) == (30_000, 20_000)
    assert (second.waiting_ns, second.communication_ns) == (0, 20_000)
