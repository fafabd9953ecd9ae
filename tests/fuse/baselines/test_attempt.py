"""Ranks make a way to run the step ready together: what fails on one is given up on all, and nobody waits in a collective."""

from __future__ import annotations

import time

import pytest
import torch

from fusion_advisor.errors import RankFailed
from fusion_advisor.fuse.baselines.attempt import Attempt
from fusion_advisor.fuse.baselines.contenders import Contender
from fusion_advisor.fuse.baselines.liger import NotAvailable
from fusion_advisor.fuse.baselines.measure_contenders import measure_all
from fusion_advisor.fuse.decide.instruments import Instruments
from fusion_advisor.records import StepProfile
from fusion_advisor.runtime.torch_internals import dynamo
from fusion_advisor.timing.wall_timer import nothing
from tests.ranks.two import both

STEP = StepProfile(label="known", device_ns=7, launches=1, categories=(), kernels=())


def test_a_process_alone_asks_nobody():
    attempt = Attempt("a", None)
    attempt.passed("made the call")
    assert attempt.failed("no compiler") == "no compiler" and not attempt.is_shared and attempt.problem == ""


def test_what_fails_on_one_rank_is_given_up_on_all_and_the_next_way_is_tried():
    def work(ranks):
        found, ran = [], []
        for name, failing_rank in (("a", 1), ("b", None), ("c", 0)):
            attempt = Attempt(name, ranks.gather)
            try:
                if ranks.rank == failing_rank:
                    raise ValueError("out of registers")
                attempt.passed("made the call")
                ran.append(name)
                attempt.passed("ready")
            except (ValueError, NotAvailable) as error:
                found.append(attempt.failed(str(error)))
        return found, ran

    assert both(work) == [(["rank 1: out of registers", "rank 0: out of registers"], ["b"])] * 2


def test_a_reason_that_all_ranks_give_names_none():
    assert both(lambda ranks: Attempt("a", ranks.gather).failed("a CPU has none")) == ["a CPU has none"] * 2


def test_a_rank_that_compiled_waits_until_all_have():
    def work(ranks):
        attempt, ran = Attempt("a", ranks.gather), []

        def compiler(graph, inputs):
            if ranks.rank:
                raise ValueError("no such lowering")
            return lambda *_: ran.append(graph)

        try:
            attempt.compiling(compiler)("graph", [])()
        except (ValueError, NotAvailable) as error:
            return attempt.failed(str(error)), ran
        return "", ran

    assert both(work) == [("rank 1: no such lowering", [])] * 2


def test_ranks_that_compile_other_graphs_give_up():
    def work(ranks):
        attempt = Attempt("a", ranks.gather)
        with pytest.raises(NotAvailable, match="the ranks do not compile the same graphs"):
            attempt.passed("ready" if ranks.rank else "compiled a graph")
        return attempt.failed("it")

    assert both(work) == ["the ranks do not compile the same graphs"] * 2


def test_a_rank_that_ended_is_no_reason_of_a_way_to_run_the_step():
    def ended(*_):
        raise RankFailed(rank=1, reason="its process is gone")

    attempt = Attempt("a", ended)
    with pytest.raises(RankFailed):
        attempt.passed("made the call")
    with pytest.raises(RankFailed):
        attempt.failed("dynamo made another error of it")


def test_contenders_are_made_ready_by_all_ranks_or_by_none():
    """The other rank (planted) cannot make the second one; the third is made by a backend that waits for all."""
    told = []

    def exchange(what, value):
        told.append((what, value[0]))
        if value[0] == "failed":
            return [value, value]
        return [value, ("failed", "no memory") if "way 2" in what else value]

    model = torch.nn.Linear(4, 4)

    def compiled(attempt):
        call = dynamo.compiled_call(model, attempt.compiling(lambda graph, _: graph.forward))
        return lambda: call(torch.ones(2, 4))

    def endless():
        while True:
            time.sleep(0.01)

    rows = measure_all(
        [
            Contender(name="eager", make=lambda: nothing, step=STEP, is_required=True),
            Contender(name="way 1", make=lambda: nothing, step=STEP, limit_s=0.0),
            Contender(name="way 2", make=lambda: nothing, step=STEP),
            Contender(name="way 3", make=lambda: nothing, make_on_ranks=compiled, step=STEP),
            Contender(name="way 4", make=endless, step=STEP, limit_s=0.05, is_compiled=True),
        ],
        needed_bytes=0, on_cuda=False, runs=2, budget_s=0.01, instruments=Instruments(exchange=exchange),
    )  # fmt: skip
    assert [row.note for row in rows] == ["", "", "rank 1: no memory", "", "it was not ready after 0 s and was given up"]
    assert [row.step is None for row in rows] == [False, False, True, False, True]
    assert told == [
        ("making way 4 ready", "failed"),  # compilers come first
        ("making way 1 ready", "made the call"), ("making way 1 ready", "ready"),
        ("making way 2 ready", "made the call"),
        ("making way 3 ready", "made the call"), ("making way 3 ready", "compiled a graph"), ("making way 3 ready", "ready"),
    ]  # fmt: skip
