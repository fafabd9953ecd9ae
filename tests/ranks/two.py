"""Two ranks as two threads of one process: a store, no collectives."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch.distributed as dist

from fusion_advisor.ranks.group import Ranks
from fusion_advisor.ranks.watchdog import Watchdog


def both(work):
    """Run ``work(ranks)`` on two ranks; return each one's result, or the error that it raised.

    A rank that waits for one which has raised, or is done, raises RankFailed.
    """
    store = dist.HashStore()
    store.set_timeout(timedelta(milliseconds=200))

    def one(rank):
        dog = Watchdog(store, rank, 2, end=lambda _: None)  # a thread cannot end by itself
        dog.start()
        ranks = Ranks(rank=rank, world_size=2, local_rank=rank, store=store, watchdog=dog, _told=[])
        try:
            with ranks.ending_together():
                return work(ranks)
        finally:
            dog.stop()

    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(one, rank) for rank in range(2)]
        return [end.exception() or end.result() for end in ends]
