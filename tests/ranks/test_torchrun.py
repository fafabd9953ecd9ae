"""Two gloo processes on a CPU run the command: applied to both, one report, and an end on both when one of them ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def command(*words, count=2):
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count), "-m"]
    return [sys.executable, *launch, *words]


def run(*words, cwd, **environ):
    """Run a module in two processes; returns the finished process."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        command(*words), cwd=cwd, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environ},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip


QUICK = ("--device", "cpu", "--quick", "--runs", "5", "--keep", "verified")


@pytest.mark.slow
def test_a_split_model_is_applied_by_the_command_with_one_report(tmp_path):
    done = run("fusion_advisor", "apply", "tests.ranks.models:tiny_qwen2", "--tp", "auto", *QUICK, "-o", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("report: ") == 1
    reports = [json.loads((tmp_path / "out" / folder / "report.json").read_text()) for folder in ("", "rank1")]
    first, second = reports
    kept = [
        [(one["kernel"], one["rendered"][0]["source"]) for one in each["fusions"] if one["status"] == "kept"] for each in reports
    ]
    assert len(kept[0]) >= 3 and kept[0] == kept[1]
    assert [one["status"] for one in first["rewrites"]] == [one["status"] for one in second["rewrites"]]
    assert first["ranks"] == second["ranks"] and [row["rank"] for row in first["ranks"]["rows"]] == [0, 1]
    assert first["ranks"]["way"] == "tensor parallel"
    assert all(row["communication_ns"] > 0 and row["compute_ns"] > 0 for row in first["ranks"]["rows"])
    assert first["model_check"]["is_passed"] and first["model_check"]["fused_rel_l2"] < 2e-6
    assert "2 ranks" in done.stdout and "Ranks" in (tmp_path / "out" / "report.md").read_text()
    assert 'id="ranks"' in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.slow
def test_split_and_fused_outputs_are_those_of_one_process(tmp_path):
    done = run("tests.ranks.outputs", cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = sorted(line.split()[1:] for line in done.stdout.splitlines() if line.startswith("RESULT"))
    assert [line[:2] for line in lines] == [
        [name, rank] for name in ("ddp", "decode", "llama", "qwen2") for rank in ("0", "1")
    ], done.stdout
    for _, _, launches, error in lines:
        assert int(launches) > 0 and float(error) < 2e-6


@pytest.mark.slow
def test_ranks_whose_clocks_differ_come_to_one_plan():
    done = run("tests.ranks.skewed", cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    told = [json.loads(line.removeprefix("RESULT ")) for line in done.stdout.splitlines() if line.startswith("RESULT")]
    runs = {(one["keep"], one["rank"]): one for one in told}
    assert sorted(runs) == [("paying", 0), ("paying", 1), ("verified", 0), ("verified", 1)], done.stdout
    for keep in ("paying", "verified"):
        assert runs[keep, 0]["plan"] == runs[keep, 1]["plan"] and runs[keep, 0]["reasons"] == runs[keep, 1]["reasons"]
    plan = runs["verified", 0]["plan"]
    assert plan["merge-gemms"] == "kept, 4 sites"
    parameters = [text for name, text in plan.items() if name.startswith("launch parameters")]
    # Two kernels are built anew on the layouts of merged GEMMs; theirs are rank 0's choice, too.
    assert len(parameters) >= 5 and {json.loads(text)["block_cols"] for text in parameters} == {64}


@pytest.mark.slow
def test_other_ways_to_run_a_split_model_are_timed_by_all_ranks_together():
    done = run("tests.ranks.ways", cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.removeprefix("RESULT ").split(" | ") for line in done.stdout.splitlines() if line.startswith("RESULT")]
    first, second = ([line[1:] for line in lines if line[0] == rank] for rank in ("0", "1"))
    assert first == second  # the slowest rank's times, and one reason
    rows = {name: (int(wall_ns), note) for name, wall_ns, note in first}
    assert rows["eager"][0] > 0 and rows["compiled"] == (rows["compiled"][0], "") and rows["compiled"][0] > 0
    failed_ns, why = rows["fails on rank 1"]
    assert failed_ns == 0 and why.startswith("rank 1: ") and "no such lowering" in why
    assert rows["eager + CUDA graph"] == (0, "a CPU has no CUDA graphs")


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["load", "profile", "fusions"])
def test_a_rank_that_is_killed_ends_the_run_on_all(phase, tmp_path):
    done = run("tests.ranks.killed", phase, cwd=ROOT, RUN_FOLDER=str(tmp_path / "out"))
    assert done.returncode != 0
    said = [line for line in done.stdout.splitlines() if line.startswith("ENDED")]
    assert len(said) == 1, (done.stdout, done.stderr[-3000:])
    _, rank, seconds, state, *reason = said[0].split(maxsplit=4)
    assert rank == "0" and float(seconds) < 30 and state == "as-before"
    assert "rank 1 ended the run: its process is gone" in reason[0]
