"""Memory that runs out on one rank: all go on without what it was for, or all end with that rank's reason."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from fusion_advisor.autotune.tune import Tuned
from fusion_advisor.errors import RankFailed
from fusion_advisor.fuse.decide.graph_diff_cost import change_alone
from fusion_advisor.fuse.decide.instruments import Instruments
from fusion_advisor.fuse.decide.session import step_of
from fusion_advisor.fuse.decide.try_fusions import _trials
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.fuse.plan.progress import Progress
from fusion_advisor.fuse.stages import gemm_sites as places
from fusion_advisor.fuse.stages.linear_kernels import header_of, install
from fusion_advisor.fuse.stages.linear_kinds import find_kinds
from fusion_advisor.ranks.group import worst_problem
from fusion_advisor.ranks.instruments import agreed_choice, instruments_of
from fusion_advisor.ranks.recording import TimedRecorder
from fusion_advisor.records import Status, Tuning
from tests.fuse.stages.test_try_linear_kernels import made_of_torch, place, qwen2_bench
from tests.ranks.two import both
from tests.tiny import bench_of, planned, profiled

GONE = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


def raising_on(ranks, rank, call=lambda *_, **__: None):
    """Return what raises on one rank, and calls on the other."""

    def run(*args, **kwargs):
        if ranks.rank == rank:
            raise GONE
        return call(*args, **kwargs)

    return run


def agreeing(ranks):
    """Instruments of ranks that measure nothing."""
    return Instruments(worst=functools.partial(worst_problem, ranks), exchange=ranks.gather)


@pytest.mark.parametrize("rank", [0, 1])
def test_launch_parameters_are_rank_0s_where_rank_1_has_no_memory_and_nobodys_where_rank_0_has_none(rank):
    def work(ranks):
        try:
            return agreed_choice(ranks, raising_on(ranks, rank, lambda: f"rank {ranks.rank}'s"))
        except MemoryError as error:
            return str(error)

    assert both(work) == ([str(GONE)] * 2 if rank == 0 else ["rank 0's"] * 2)


def test_chains_that_cannot_be_recorded_to_be_timed_are_left_out_on_all_ranks():
    def work(ranks):
        record = TimedRecorder(ranks, raising_on(ranks, 1, lambda call: call), meets=False)
        try:
            record(lambda: None)
        except MemoryError as error:
            return str(error)

    assert both(work) == [f"rank 1: {GONE}", str(GONE)]


def test_a_step_in_which_ranks_meet_ends_on_all():
    first, second = both(lambda ranks: TimedRecorder(ranks, raising_on(ranks, 1, lambda call: call))(lambda: None))
    assert isinstance(second, torch.OutOfMemoryError)
    assert isinstance(first, RankFailed) and "rank 1 ended the run: OutOfMemoryError" in str(first)


@pytest.mark.parametrize("is_alone", [True, False])
def test_what_a_step_reads_is_kept_on_all_ranks_or_none(is_alone):
    def work(ranks):
        bench = SimpleNamespace(is_alone=is_alone, observe_values=raising_on(ranks, 1))
        return places.observe_together(bench, [], agreeing(ranks))

    first, second = both(work)
    if is_alone:
        assert first == f"rank 1: {second}" and "memory ran out" in second
    else:
        assert isinstance(second, torch.OutOfMemoryError) and isinstance(first, RankFailed)


def test_ops_by_themselves_are_timed_on_all_ranks_or_none():
    class Unmade:
        """A step of which rank 1 cannot make the ops that differ."""

        def __init__(self, ranks):
            self.variant = SimpleNamespace(modules=())
            self.bench = SimpleNamespace(live=SimpleNamespace(in_order=raising_on(ranks, 1, lambda: ())))

    def work(ranks):
        runner = SimpleNamespace(method="cuda_graph", forget=lambda: None)
        return change_alone(runner, Unmade(ranks), Unmade(ranks), worst=functools.partial(worst_problem, ranks))

    assert both(work) == [None, None]


def test_ops_that_are_under_way_on_the_other_rank_end_the_run():
    def work(ranks):
        runner = SimpleNamespace(
            method="cuda_graph", forget=lambda: None, recorded=raising_on(ranks, 1, lambda _: ranks.gather("timed run", 1)),
            on_cuda=False, timer=None, rest=lambda _: 0,
        )  # fmt: skip
        bench = qwen2_bench()
        (kind, *_) = find_kinds(bench)
        built = install(bench, kind, made_of_torch(kind.problem, header_of(kind.title), ""), name="G1")
        before, after = step_of(bench, [], []), step_of(bench, [], [], [built])
        return change_alone(runner, before, after, worst=functools.partial(worst_problem, ranks))

    first, second = both(work)
    assert isinstance(second, torch.OutOfMemoryError) and isinstance(first, RankFailed)


def test_a_kernel_of_a_chain_is_left_out_on_all_ranks(tmp_path):
    _, _, live = profiled("toy")
    plan = planned("toy")
    bench, _ = bench_of(live, plan)

    def work(ranks):
        tune = raising_on(ranks, 1, lambda *_, **__: Tuned(tuning=Tuning(), source="planted"))
        instruments = replace(agreeing(ranks), tune=tune)
        options, folder = ApplyOptions(keep="verified"), tmp_path / str(ranks.rank)
        (one,) = _trials(bench, plan.fusions[0], ("cpp",), options, folder, 0, Progress(), instruments, None, None)
        return ranks.gather("the next kernel", (one.fusion.status, one.fusion.reason))

    no_memory = "no memory is left to check its numbers against fp64"
    assert both(work) == [[(Status.WRONG_NUMBERS, f"rank 1: {no_memory}"), (Status.NOT_REPLACED, no_memory)]] * 2


def test_a_kernel_of_linears_is_left_out_on_all_ranks():
    def work(ranks):
        rows = place(
            make=raising_on(ranks, 1, made_of_torch), worst=functools.partial(worst_problem, ranks), bench=qwen2_bench()
        ).fusions
        return ranks.gather("the rows", [row.status for row in rows]), {row.reason.partition(":")[0] for row in rows}

    (first, reasons), (second, own) = both(work)
    assert first == second and {status for rank in first for status in rank} <= {Status.NOT_REPLACED, Status.BUILD_FAILED}
    assert reasons == {"rank 1"} and own == {"memory ran out while it was checked"}


def test_instruments_of_ranks_agree_on_what_is_timed_alone():
    def work(ranks):
        asked = []
        measured = Instruments(compare_alone=lambda **how: asked.append(how), change_alone=lambda **how: asked.append(how))
        made = instruments_of(ranks, on_cuda=False, on_capture=lambda _: None, measured=measured)
        made.compare_alone()
        made.change_alone()
        return isinstance(asked[0]["record"], TimedRecorder), asked[1]["worst"]("wrong" if ranks.rank else "")

    assert both(work) == [(True, "rank 1: wrong"), (True, "wrong")]
