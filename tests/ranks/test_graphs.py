"""CUDA graphs of several ranks: all record or none does, the decision's times are agreed, and only NCCL is recorded."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fusion_advisor.errors import RanksDiffer
from fusion_advisor.fuse.installed import LastStage
from fusion_advisor.ranks.graphs import AgreedRecorder, with_graphs
from fusion_advisor.timing.interleaving import CannotRecord
from tests.fuse.cuda_graph.fake_graph import FakeRecorder
from tests.ranks.two import both


def recorded(ranks, failing):
    own = FakeRecorder()
    if ranks.rank in failing:
        own.fails = CannotRecord(f"operation not permitted on rank {ranks.rank}")
    agreed = AgreedRecorder(own, ranks)
    try:
        agreed.record(lambda: 5)
    except CannotRecord as error:
        return str(error)
    return own.recorded


def test_a_recording_that_fails_on_one_rank_is_kept_on_none():
    assert both(lambda ranks: recorded(ranks, {1})) == [
        "rank 1: operation not permitted on rank 1", "operation not permitted on rank 1",
    ]  # fmt: skip
    assert both(lambda ranks: recorded(ranks, ())) == [1, 1]


def test_a_graph_is_gone_when_the_ranks_part():
    def work(ranks):
        own = FakeRecorder()
        replay, _ = AgreedRecorder(own, ranks).record(lambda: 5)
        replay()
        ranks.release()
        with pytest.raises(RuntimeError, match="parted"):
            replay()
        return own.replayed

    assert both(work) == [1, 1]


def test_a_rank_that_records_while_another_goes_on_ends_the_run():
    def work(ranks):
        return ranks.gather("timed run", 1) if ranks.rank else recorded(ranks, ())

    assert all(isinstance(one, RanksDiffer) for one in both(work))


def test_the_choice_is_made_by_agreed_times_and_looks_at_no_power_limit():
    timer = object()

    def work(ranks):
        asked = {}
        stage = with_graphs(
            LastStage(), ranks, timer, recorder=lambda bench: FakeRecorder() if bench.on_cuda else None,
            choose=lambda fused, **kwargs: asked.update(kwargs) or fused,
        )  # fmt: skip
        assert stage.graph_recorder(SimpleNamespace(on_cuda=False)) is None
        assert isinstance(stage.graph_recorder(SimpleNamespace(on_cuda=True)), AgreedRecorder)
        assert stage.choose_graph("model", on_cuda=True, rounds=4, rest=2.0) == "model"
        stage.meet()
        return stage.meet is not None, asked == {"on_cuda": False, "rest": None, "timer": timer, "rounds": 4}

    assert both(work) == [(True, True), (True, True)]
    assert LastStage().meet is None


def test_a_rank_that_launched_in_vain_alone_ends_the_run():
    def work(ranks):
        return ranks.gather("timed run", 1) if ranks.rank else with_graphs(LastStage(), ranks, None).meet()

    told = both(work)
    assert all(isinstance(one, RanksDiffer) for one in told)
    assert "after a CUDA graph that did not fit the call" in str(told[1])
