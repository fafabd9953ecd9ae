"""Data parallel training: two gloo processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("how", ["compile", "apply", "unused"])
def test_gradients_of_two_processes_are_those_of_plain_ddp(how):
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tests.fuse.train.ddp_step", how]
    command = [sys.executable, *launch]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False, timeout=540)
    assert done.returncode == 0, done.stderr[-3000:]
    results = sorted(line.split()[1:] for line in done.stdout.splitlines() if line.startswith("RESULT"))
    assert [rank for rank, *_ in results] == ["0", "1"], done.stdout
    for _, is_changed, error, are_equal in results:
        assert is_changed == "True" and float(error) < 2e-5 and are_equal == "True"
