"""Whole runs with both engines, twice, and interrupted: nothing lost, nothing counted twice."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

from fusion_advisor.errors import UsageError
from fusion_advisor.fleet.run import FleetOptions, run_fleet


def test_every_trace_is_ranked_or_has_a_reason(once):
    _, report, states = once
    assert report.traces + len(report.failed) == 40
    assert len(report.failed) == 9 and report.jobs >= 8
    assert [state.done for state in states] == list(range(1, 41)) and states[-1].failed == 9
    assert states[-1].done_bytes == states[-1].all_bytes and states[-1].peak_bytes < 1_000_000_000


def test_the_ranking_is_that_of_the_traces_themselves(once, traces):
    """Every chain's time again, trace by trace, as ``profile --trace`` ranks it."""
    from fusion_advisor.capture.trace.chrome_trace import TraceFile
    from fusion_advisor.capture.trace.events import read_events
    from fusion_advisor.fleet.reduce import LEAST_SHARE
    from fusion_advisor.fuse.modes.trace_profile import join_trace, rank_trace
    from fusion_advisor.library.trace_hints import library_sequences

    _, report, _ = once
    sequences = library_sequences()
    failed = {row.url for row in report.failed}
    sums = {}
    for path in sorted(traces.rglob("*.json.gz")):
        if str(path) not in failed:
            file = TraceFile(path)
            found = join_trace(file, read_events(file))
            for chain in rank_trace(found, sequences, min_share=LEAST_SHARE, top=10_000).chains:
                name = " → ".join(chain.ops)
                sums[name] = sums.get(name, 0) + chain.device_ns
    best = sorted(sums.items(), key=lambda row: -row[1])[: len(report.chains)]
    assert [(row.ops, round(row.gpu_hours * 3.6e12)) for row in report.chains][:10] == best[:10]


def test_a_pattern_of_jobs_that_is_none_is_refused_before_a_trace_is_read(tmp_path):
    (tmp_path / "a.json").touch()
    with pytest.raises(UsageError, match="no regular expression"):
        run_fleet(FleetOptions(patterns=(str(tmp_path / "*.json"),), output=tmp_path / "out", job_pattern="("))
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
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


@pytest.mark.slow
def test_ray_gives_the_same_table(once, tmp_path):
    pytest.importorskip("ray")
    options, report, _ = once
    assert run_fleet(replace(options, output=tmp_path, engine="ray")) == report


@pytest.mark.slow
def test_an_interrupted_run_goes_on(once, tmp_path):
    options, report, _ = once
    cut = replace(options, output=tmp_path)
    seen = []

    def stop(state):
        seen.append(state)
        if len(seen) == 30:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_fleet(cut, stop)
    assert len(list((tmp_path / "parts").glob("*.parquet"))) >= 30
    states = []
    assert run_fleet(cut, states.append) == report
    assert 0 < len(states) <= 10  # workers end the traces that they had begun
    assert not list((tmp_path / "parts").glob(".*.tmp"))
