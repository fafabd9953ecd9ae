"""Two GPUs: every norm after a sum is as near to fp64 as NCCL and torch, and ranks time steps that they record together."""

from __future__ import annotations

import json

import pytest
import torch

from tests.ranks.test_torchrun import ROOT, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.fixture(scope="module")
def told():
    """What both ranks found, rank by rank."""
    done = run("tests.ranks.on_gpus", cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line.removeprefix("RESULT ")) for line in done.stdout.splitlines() if line.startswith("RESULT")]
    return [[one for one in lines if one["rank"] == rank] for rank in (0, 1)]


def test_norms_after_a_sum_are_as_near_to_fp64_as_nccl_and_torch(told):
    first, second = ([one for one in lines if "norm" in one] for lines in told)
    assert len(first) == len(second) == 20
    for one, other in zip(first, second, strict=True):
        assert one["bits"] == other["bits"], one
        ours, theirs = one["errors"]
        assert ours <= 1.5 * theirs + 1e-6, one


def test_ranks_time_steps_that_they_record_together_and_go_on_where_one_cannot(told):
    first, second = (lines[0]["steps"] for lines in told)
    assert first["change_ns"] == second["change_ns"] and first["change_ns"][0] > 0
    for rank, one in enumerate((first, second)):
        assert one["are_right"] == [True, True] and one["goes_on"]
        assert one["refusal"] and (rank == 1 or one["refusal"].startswith("rank 1: "))
