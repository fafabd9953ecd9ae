"""Values that ranks exchange, and runs that end when they differ."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch.distributed as dist

from fusion_advisor.errors import CannotCapture, NotUnderTorchrun, RankFailed, RanksDiffer
from fusion_advisor.ranks.group import TAKING_APART, Ranks, failed, join
from fusion_advisor.ranks.watchdog import Watchdog
from tests.ranks.two import both


def test_every_rank_gets_the_values_of_all_in_their_order():
    found = both(lambda ranks: [ranks.gather("a", (ranks.rank, number)) for number in range(5)])
    assert found[0] == found[1] == [[(0, number), (1, number)] for number in range(5)]


def test_rank_0_decides_alone_where_it_is_asked_to():
    assert both(lambda ranks: ranks.first("a", ranks.rank + 7)) == [7, 7]


def test_texts_must_be_equal():
    assert both(lambda ranks: ranks.agree("versions", "torch 2")) == [None, None]
    found = both(lambda ranks: ranks.agree("versions", f"torch {ranks.rank}"))
    assert all(isinstance(one, RanksDiffer) for one in found)
    assert "rank 1 differs from rank 0 in versions: `torch 1`, not `torch 0`" in str(found[0])
    assert isinstance(both(lambda ranks: ranks.agree("the graph", f"{ranks.rank}" * 500))[0], RanksDiffer)


def test_ranks_that_do_different_things_are_found_out():
    found = both(lambda ranks: ranks.gather("timed run" if ranks.rank else "memory", 1))
    assert all(isinstance(one, RanksDiffer) for one in found)


def test_an_error_of_one_rank_ends_the_other_with_its_reason():
    def work(ranks):
        if ranks.rank:
            raise ValueError("no such head")
        ranks.gather("a", 1)

    first, second = both(work)
    assert isinstance(second, ValueError)
    assert isinstance(first, RankFailed) and "rank 1 ended the run: ValueError: no such head" in str(first)


def test_a_broken_collective_is_blamed_on_the_rank_that_broke_it():
    def work(ranks):
        if ranks.rank:
            raise ValueError("no such head")
        raise RuntimeError("[gloo/transport/tcp/pair.cc:538] Connection closed by peer")

    first, second = both(work)
    assert isinstance(second, ValueError) and isinstance(first, RankFailed) and "no such head" in str(first)


@pytest.mark.parametrize("is_made_of_it", [True, False])
def test_a_failed_capture_that_another_ranks_end_caused_names_that_rank(is_made_of_it):
    """The launcher's signal may arrive while dynamo runs, which makes an error of its own of whatever is raised there."""

    def work(ranks):
        if ranks.rank:
            raise ValueError("no such head")
        while ranks.watchdog.look() is None:
            pass
        dynamo = RuntimeError("while it traced")
        dynamo.__context__ = failed(ranks.watchdog.failure) if is_made_of_it else KeyError("x")
        raise CannotCapture(model_id="tiny", detail="it ended") from dynamo

    first, _ = both(work)
    assert type(first) is (RankFailed if is_made_of_it else CannotCapture)


def test_a_group_is_taken_apart_after_an_error():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def work(ranks):
        ranks.abandon()
        return dist.is_initialized()

    first, _ = both(lambda ranks: work(ranks) if ranks.is_first else None)
    assert first is False
    assert both(lambda ranks: ranks.abandon()) == [None, None]  # where it is gone already


_STUCK = """
import os
import subprocess
import sys
import threading
from fusion_advisor.cli.common.ranks import ended
from fusion_advisor.ranks.group import TAKING_APART
if {is_stuck}:
    threading.Thread(target=threading.Event().wait, name=TAKING_APART).start()
print("done")
raise SystemExit(ended(3) + 1)
"""


@pytest.mark.parametrize(("is_stuck", "code"), [(True, 3), (False, 4)])
def test_a_process_whose_group_waits_for_ever_ends_with_its_exit_code(is_stuck, code):
    environ = {**os.environ, "TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2"}
    script = _STUCK.format(is_stuck=is_stuck)
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (code, "done\n"), done.stderr


def test_ranks_leave_a_group_that_waits_for_ever():
    may_end = threading.Event()
    assert both(lambda ranks: ranks.leave(may_end.wait, 0.05)) == [None, None]
    assert sum(thread.name == TAKING_APART for thread in threading.enumerate()) == 2
    may_end.set()


def test_a_group_that_cannot_be_taken_apart_is_left():
    """NCCL waits for the other end of a collective, which is gone."""
    may_end = threading.Event()
    assert both(lambda ranks: ranks.abandon(may_end.wait, 0.05)) == [None, None]
    may_end.set()


def test_graphs_go_before_their_group_is_taken_apart_after_an_error():
    def work(ranks):
        order = []
        ranks.holds(lambda: order.append("graph"))
        ranks.abandon(lambda: order.append("group"))
        return order

    assert both(work) == [["graph", "group"]] * 2


class GoneStore:
    """A store whose process is gone."""

    def __getattr__(self, name):
        def fail(*_):
            raise dist.DistNetworkError("Connection reset by peer")

        return fail


def test_a_ranks_own_error_is_told_where_the_store_is_gone():
    def ended_by(error):
        dog = Watchdog(GoneStore(), 1, 2, end=lambda _: None)
        ranks = Ranks(rank=1, world_size=2, local_rank=1, store=GoneStore(), watchdog=dog, _told=[])
        if isinstance(error, dist.DistNetworkError):
            dog.start()  # which finds out that the store is gone
        try:
            with ranks.ending_together():
                raise error
        finally:
            dog.stop()

    with pytest.raises(ValueError, match="no such head"):
        ended_by(ValueError("no such head"))
    with pytest.raises(RankFailed, match="rank 0 ended the run: the store is gone"):
        ended_by(dist.DistNetworkError("Connection reset by peer"))


def test_an_environment_without_ranks_is_a_usage_error():
    with pytest.raises(NotUnderTorchrun, match="no RANK"):
        join({})
    with pytest.raises(NotUnderTorchrun, match="no MASTER_PORT"):
        join({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"})


ENDS_BY_AN_ERROR = """
from tests.ranks.two import both

def work(ranks):
    ranks.holds(lambda: print("released", ranks.rank, flush=True))
    if ranks.is_first:
        ranks.release()

both(work)
print("all there", flush=True)
raise ValueError("the program's own")
"""


def test_what_ranks_hold_goes_when_a_program_ends_by_an_error():
    ended = subprocess.run([sys.executable, "-c", ENDS_BY_AN_ERROR], check=False, capture_output=True, text=True, timeout=120)
    assert ended.stdout.splitlines() == ["released 0", "all there", "released 1"]
    assert "the program's own" in ended.stderr
