"""Run by ``test_torchrun.py`` in each of two processes: ways to run a split model, one of which rank 1 cannot compile."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import torch
import torch.distributed as dist

from fusion_advisor.fuse.baselines.contenders import Contender, peers
from fusion_advisor.fuse.baselines.measure_contenders import measure_all
from fusion_advisor.ranks.group import join
from fusion_advisor.ranks.instruments import instruments_of
from fusion_advisor.ranks.run import placed
from fusion_advisor.records import EAGER
from fusion_advisor.runtime.torch_internals import dynamo
from fusion_advisor.workload.load import describe_live
from fusion_advisor.workload.request import WorkloadRequest
from tests.ranks import models


def main():
    """Print a line for each way."""
    ranks = join()
    model, kwargs = models.tiny_qwen2()
    loaded = placed(
        replace(describe_live(model, (), kwargs), request=WorkloadRequest(model_id="tiny", device="cpu", tp="auto")), ranks
    )

    def eager():
        return loaded.model(**loaded.kwargs)

    def compiled(attempt, failing_rank):
        def compiler(graph, _):
            if ranks.rank == failing_rank:
                raise ValueError("no such lowering")
            return graph.forward

        call = dynamo.compiled_call(loaded.model, attempt.compiling(compiler))
        return lambda: call(**loaded.kwargs)

    without_compilers = [
        one for one in peers(loaded, eager, on_cuda=False, max_autotune=False, rewind=lambda: None) if not one.is_compiled
    ]
    ways = [
        Contender(name=EAGER, make=lambda: eager, is_required=True),
        *without_compilers,
        Contender(name="fails on rank 1", make=lambda: eager, make_on_ranks=lambda attempt: compiled(attempt, 1)),
        Contender(name="compiled", make=lambda: eager, make_on_ranks=lambda attempt: compiled(attempt, None)),
    ]
    instruments = instruments_of(ranks, on_cuda=False, on_capture=lambda _: None)
    rows = measure_all(ways, needed_bytes=0, on_cuda=False, runs=3, budget_s=0.2, traced_steps=1, instruments=instruments)
    for row in rows:
        wall_ns = 0 if row.step is None else row.step.wall.median_ns
        sys.stdout.write(f"RESULT {ranks.rank} | {row.name} | {wall_ns} | {row.note}\n")
    sys.stdout.flush()
    dist.barrier()
    ranks.leave()


if __name__ == "__main__":
    with torch.no_grad():
        main()
    os._exit(0)
