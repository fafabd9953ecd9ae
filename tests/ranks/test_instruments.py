"""Every rank sees the same numbers: the slowest rank's times, rank 0's launch parameters, a failed kernel's reason."""

from __future__ import annotations

from dataclasses import replace

from fusion_advisor.capture.trace.attribute import Step
from fusion_advisor.codegen.common.interface import KernelBuildFailed
from fusion_advisor.errors import RanksDiffer
from fusion_advisor.ranks.group import worst_problem
from fusion_advisor.ranks.instruments import (
    AgreedTimer,
    agreed_capture,
    agreed_choice,
    agreed_step,
    instruments_of,
)
from fusion_advisor.ranks.run import plan_entries
from fusion_advisor.records import Launch
from tests.ranks.two import both
from tests.report.fixtures import applied
from tests.timing.planted import PlantedTimer
from tests.tiny import profiled


def test_a_time_is_the_slowest_ranks_and_the_budget_is_rank_0s():
    def work(ranks):
        own = PlantedTimer()
        timer = AgreedTimer(own, ranks)

        def call():
            own.now_ns += 1000 * (ranks.rank + 1)

        return [timer.time_ns(call), timer.seconds(), timer.agreed_ns(5 - ranks.rank)]

    first, second = both(work)
    assert first == second == [2000, 1e-6, 5]


def test_a_kernel_that_fails_on_one_rank_is_out_on_all():
    found = both(lambda ranks: worst_problem(ranks, "error 3e-2" if ranks.rank else ""))
    assert found == ["rank 1: error 3e-2", "error 3e-2"]
    assert both(lambda ranks: worst_problem(ranks, "")) == ["", ""]


def test_plans_follow_from_rank_0s_trace():
    _, capture, _ = profiled("toy")
    seen = []

    def work(ranks):
        slower = replace(capture, launches=tuple(replace(one, duration_ns=one.duration_ns * 3) for one in capture.launches))
        instruments = instruments_of(ranks, on_cuda=False, on_capture=seen.append)
        return instruments.settled_capture(slower if ranks.rank else capture)

    first, second = both(work)
    assert first == second == capture
    assert sorted(sum(one.duration_ns for one in own.launches) for own in seen)[1] == 3 * sum(
        one.duration_ns for one in capture.launches
    )


def test_ranks_with_other_graphs_are_refused():
    _, capture, _ = profiled("toy")
    other = replace(capture, ops=(*capture.ops[:-1], replace(capture.ops[-1], target="aten.other")))
    found = both(lambda ranks: agreed_capture(ranks, other if ranks.rank else capture))
    assert all(isinstance(one, RanksDiffer) and one.facts["what"] == "the captured graph" for one in found)


def test_a_plan_is_its_rewrites_verdicts_and_kernels():
    report = applied()
    fusion = next(one for one in report.fusions if one.rendered)
    kernel = replace(fusion.rendered[0], source=fusion.rendered[0].source + "\n")
    changed = replace(report, fusions=tuple(replace(one, rendered=(kernel,)) if one is fusion else one for one in report.fusions))
    assert plan_entries(report) == plan_entries(replace(report, run_id="other"))
    one, other = plan_entries(report), plan_entries(changed)
    assert [name for name in one if one[name] != other[name]] == [f"source of {fusion.id} {fusion.kernel}, kernel 1"]


def test_a_plan_that_differs_is_refused_by_the_name_of_what_differs():
    def work(ranks):
        ranks.agree_entries("the plan", {"F1": "kept", "merge-gemms": "kept, 2 sites"})
        ranks.agree_entries("the plan", {"F1": "kept"} | ({} if ranks.rank else {"merge-gemms": "kept, 2 sites"}))

    found = both(work)
    assert all(isinstance(one, RanksDiffer) for one in found)
    assert str(found[0]) == "rank 1 differs from rank 0 in the plan: merge-gemms: `nothing`, not `kept, 2 sites`"


def test_the_rewritten_step_is_rank_0s_without_its_waiting():
    """Rank 1 came last to each all-reduce: rank 0 waited 9 of 10 µs there, and both ranks judge by the same step."""

    def step(compute_ns, between_ns):
        return Step(
            launches=(
                Launch(kernel_name="gemm", op_index=None, duration_ns=compute_ns, start_ns=0, category="gemm"),
                Launch(kernel_name="nccl", op_index=None, duration_ns=between_ns, start_ns=compute_ns, category="collective"),
            ),
            calls=2,
        )  # fmt: skip

    found = both(lambda ranks: agreed_step(ranks, step(5_000, 10_000) if ranks.is_first else step(13_000, 1_000)))
    assert found == [step(5_000, 1_000)] * 2


def test_ranks_take_the_first_ones_choice_or_its_failure():
    def own(ranks):
        return f"rank {ranks.rank}'s"

    assert both(lambda ranks: agreed_choice(ranks, own, ranks)) == ["rank 0's"] * 2

    def failing(ranks):
        if ranks.is_first:
            raise KernelBuildFailed(kernel="rms", target="cuda", cause="no registers are left")
        return own(ranks)

    found = both(lambda ranks: agreed_choice(ranks, failing, ranks))
    assert [str(one) for one in found] == ["rms did not compile for cuda: no registers are left"] * 2
