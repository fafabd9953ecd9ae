"""Decodes many steps on several ranks: torchrun --nproc-per-node N -m tools.rank_steps MODEL_ID --to FILE.json.

The model is split by its own plan, and what pays is applied as ``apply --tp auto --phase decode --quick --no-compile`` does.
Then all ranks run the same step over and over, with the cache's counters put back ahead of each. A graph that one rank launched
and another one did not would leave both waiting: a collective that waits for 25 s ends the run. Now and then a result is compared
with the first step's, bit by bit, on each rank. At last the model is reverted, applied again and run once more.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fusion_advisor.capture.graph.side_effects import written_by
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.fuse.plan.progress import Progress
from fusion_advisor.ranks.group import join
from fusion_advisor.ranks.run import apply_on_ranks, check_start, placed
from fusion_advisor.runtime.call_tensors import tensors_in
from fusion_advisor.workload.load import load_workload
from fusion_advisor.workload.request import WorkloadRequest
from tools.machine import here


@dataclass(frozen=True, slots=True)
class Steps:
    """What one rank saw of many steps.

    Attributes:
        rank: whose steps they are.
        machine: that ran them.
        model_id: of the model, with random weights.
        layers: of it.
        context: tokens in the cache.
        steps: that were run.
        step_ns: of one, on average.
        launched_ahead: steps whose graph was launched ahead of the guards.
        compared: results that were compared with the first one's.
        equal: of these, that had its bits.
        fallbacks: calls to the original ops, by reason.
        freed_bytes: that ``revert()`` gave back.
        is_equal_again: the model applied again, and it launch by launch, had the same bits.
        rewrites: that were kept.
    """

    rank: int
    machine: dict[str, str]
    model_id: str
    layers: int
    context: int
    steps: int
    step_ns: int
    launched_ahead: int
    compared: int
    equal: int
    fallbacks: dict[str, int]
    freed_bytes: int
    is_equal_again: bool
    rewrites: tuple[str, ...]


def run_steps(ranks: Any, request: WorkloadRequest, *, steps: int, every: int) -> Steps:
    """Apply what pays, and run the step many times.

    Args:
        ranks: of the run.
        request: of this rank, the same on all.
        steps: to run.
        every: so many steps a result is compared.
    """
    on_gpu = torch.cuda.is_available()
    synchronize = torch.cuda.synchronize if on_gpu else time.perf_counter_ns
    loaded = placed(load_workload(request), ranks)
    options = replace(ApplyOptions(), effort="quick", compile=False)
    applied = apply_on_ranks(ranks, loaded, options, Progress(), lambda _: None)
    fused = applied.fused

    def call() -> torch.Tensor:
        with torch.no_grad():
            result = loaded.model(*loaded.args, **loaded.kwargs)
        return next(tensor for _, tensor in tensors_in("", result))

    written = written_by(call, loaded.model, loaded.args, loaded.kwargs)

    def again() -> torch.Tensor:
        written.rewind()
        return call()

    for _ in range(4):
        first = again().clone()
    graphs = fused.graphs
    before = 0 if graphs is None else graphs.ahead
    equal = compared = 0
    start_ns = time.perf_counter_ns()
    for number in range(1, steps + 1):
        result = again()
        if not number % every:
            compared += 1
            equal += int(torch.equal(result, first))
            ranks.watchdog.reached(f"step {number}")
    synchronize()
    step_ns = (time.perf_counter_ns() - start_ns) // steps
    ahead = 0 if graphs is None else graphs.ahead - before
    fallbacks = dict(fused.fallbacks)

    held = torch.cuda.memory_allocated()
    ranks.agree("the end of the steps", "")
    fused.revert()
    freed = held - torch.cuda.memory_allocated()
    fused.apply()
    is_equal = torch.equal(again(), first)
    if graphs is not None:
        graphs.is_on = False
        is_equal = is_equal and torch.equal(again(), first)
    ranks.agree("the last step", "")
    return Steps(
        rank=ranks.rank, machine=here(is_on_gpu=on_gpu), model_id=request.model_id, layers=request.layers or 0,
        context=request.context or 512, steps=steps, step_ns=step_ns, launched_ahead=ahead, compared=compared, equal=equal,
        fallbacks=fallbacks, freed_bytes=freed, is_equal_again=is_equal,
        rewrites=tuple(one.id for one in applied.report.rewrites if one.status == "kept"),
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Run the steps on this rank; rank 0 writes what all saw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_id")
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=500)
    parser.add_argument("--limit-s", type=float, default=300.0)
    given = parser.parse_args(argv)
    faulthandler.dump_traceback_later(given.limit_s, exit=True)
    request = WorkloadRequest(
        model_id=given.model_id, dtype=given.dtype, phase="decode", context=given.context, layers=given.layers, weights="random",
        tp="auto", offline=True,
    )  # fmt: skip
    ranks = join()
    with ranks.ending_together():
        check_start(ranks, request)
        found = run_steps(ranks, request, steps=given.steps, every=given.every)
        rows = ranks.gather("what the ranks saw", asdict(found))
        if ranks.is_first:
            given.to.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
            print(json.dumps(rows))
        ranks.leave()
    os._exit(0)  # NCCL's communicators wait for each other at a usual exit


if __name__ == "__main__":
    main()
