"""Two gloo processes let one kernel sum over ranks, add residuals and normalise: verdicts, numbers, saved plans, revert."""

from __future__ import annotations

import json

import pytest

from tests.ranks.test_torchrun import ROOT, run


@pytest.fixture(scope="module")
def told():
    """What both ranks came to, by run and rank."""
    done = run("tests.ranks.summed", cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line.removeprefix("RESULT ")) for line in done.stdout.splitlines() if line.startswith("RESULT")]
    found = {(one.pop("name"), one.pop("rank")): one for one in lines}
    assert len(found) == 12, done.stdout
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2", "decode", "starcoder2"])
def test_sums_are_replaced_alike_on_both_ranks_and_outputs_are_those_of_one_process(told, name):
    first, second = told[name, 0], told[name, 1]
    assert first["plan"] == second["plan"] and first["reasons"] == second["reasons"]
    for one in (first, second):
        assert one["status"] == ["kept"] and one["replaced"] == [4] and one["numerics"] == [True] and one["launched"]
        # all_reduce, wait and seven ops of the norm at each site; Starcoder2's norm is one op after the bias and the residual
        assert one["before"] == [20 if name == "starcoder2" else 36] and one["bytes"][0] > 0
        assert one["kernels"] == [f"all_reduce_add_{'layer' if name == 'starcoder2' else 'rms'}norm"]
        assert set(one["add_norm"].values()) <= {"absorbed"} and (one["add_norm"] or name == "starcoder2")
        assert one["tuning"][0].startswith("one-shot over 2 ranks") and "on each rank" in one["reasons"][0]
        assert one["error"] < 1.5 * one["unfused"] + 1e-7 and one["fallbacks"] == [] and one["warnings"] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2", "decode", "starcoder2"])
def test_a_saved_plan_restores_the_kernel_on_as_many_ranks_and_names_the_difference_elsewhere(told, name):
    for rank in (0, 1):
        one = told[name, rank]
        assert one["restored"] < 1.5 * one["unfused"] + 1e-7 and one["restored_launches"] and one["restored_freed"]
        assert "sum over 4 ranks, and 2 run this" in one["refused"]
        assert "no symmetric memory: the ranks run on CPUs" in one["no_memory"]


@pytest.mark.slow
def test_buffers_are_freed_by_revert_and_made_again_by_apply(told):
    for rank in (0, 1):
        one = told["qwen2", rank]
        assert one["there"] == [True, False]  # of the run; of the plan that was put in again to be timed
        assert one["freed"] and one["acquired"] == 2 and one["again"] < 1.5 * one["unfused"] + 1e-7


@pytest.mark.slow
def test_ranks_without_shared_memory_say_so_and_keep_what_they_had(told):
    for rank in (0, 1):
        one = told["cpu", rank]
        assert one["status"] == ["not replaced"] and one["reasons"] == ["no symmetric memory: the ranks run on CPUs"]
        assert one["error"] < 2e-6


@pytest.mark.slow
def test_wrong_numbers_on_one_rank_leave_it_out_on_both(told):
    for rank in (0, 1):
        one = told["wrong", rank]
        assert one["status"] == ["wrong numbers"] and one["error"] < 2e-6
        assert one["reasons"][0].startswith("relative error" if rank == 1 else "rank 1: relative error")


@pytest.mark.slow
def test_ranks_whose_clocks_differ_judge_both_ways_to_sum_alike(told):
    first, second = told["timed", 0], told["timed", 1]
    assert first["plan"] == second["plan"] and first["reasons"] == second["reasons"] and first["deltas"] == second["deltas"]
    assert first["deltas"][0] is not None and "-shot: " in first["reasons"][0]
    # The first buffer was of wrong numbers. The second is there only where the kernel stayed, and is gone after revert().
    assert first["there"] == second["there"] == [False, False]
