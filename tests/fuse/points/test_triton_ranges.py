"""Ranges go through Triton's files and kernels on a CPU too: what is made for a GPU alone was once seen by no test."""

from __future__ import annotations

import json
import os
import subprocess
import sys


def test_ranges_of_decode_steps_have_their_kernels_in_triton():
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.kernel_cases.interpret_ranges"], env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    points = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert {point["call"] for point in points} >= {"decode", "static decode"}
    assert [point["reason"] for point in points] == [""] * len(points)
    for point in points:
        names = {name.removeprefix("fa_").rpartition("_")[0] for name in point["kernels"]}
        assert {"embedding_rmsnorm", "add_rmsnorm", "swiglu"} < names
        assert ("rope_qk_cache" in names) is (point["call"] == "static decode")
