"""Run by ``test_torchrun.py`` in each of two processes: what each rank measures by itself is another one's, the plan is not."""

from __future__ import annotations

import json
import os
import random
import sys
from dataclasses import replace

import torch.distributed as dist

from fusion_advisor.autotune.tune import Tuned
from fusion_advisor.fuse.decide.instruments import Instruments
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.fuse.plan.progress import Progress
from fusion_advisor.ranks.group import join
from fusion_advisor.ranks.run import apply_on_ranks, placed, plan_entries
from fusion_advisor.records import Tuning
from fusion_advisor.timing.host_timer import BusiestThreadTimer
from fusion_advisor.workload.device import memory_bytes
from fusion_advisor.workload.load import describe_live
from fusion_advisor.workload.request import WorkloadRequest
from tests.ranks import models

VERIFIED = ApplyOptions(effort="quick", keep="verified", runs=3, steps=1, warmup=1, compile=False)
TIMED = replace(VERIFIED, keep="paying", min_gain=0.0)


class SkewedTimer(BusiestThreadTimer):
    """A clock that goes up to four times too fast or too slow, on each rank otherwise."""

    def __init__(self, rank):
        self._factors = random.Random(rank)
        self._rank = rank

    def time_ns(self, call):
        """Run a call once and return some nanoseconds."""
        return round(super().time_ns(call) * 4 ** self._factors.uniform(-1, 1))

    def seconds(self):
        """Return seconds that go by faster on rank 1."""
        return super().seconds() * (1 + self._rank)


def measured_by(rank):
    """What a rank measures: a clock, memory, a trace and launch parameters of its own."""
    factors = random.Random(10 + rank)

    def skewed(launches):
        return tuple(replace(one, duration_ns=round(one.duration_ns * 4 ** factors.uniform(-1, 1))) for one in launches)

    return Instruments(
        timer=SkewedTimer(rank),
        memory_bytes=lambda device: tuple(one if rank else 1 + one // 4 for one in memory_bytes(device)),
        settled_capture=lambda one: replace(one, launches=skewed(one.launches), eager_launches=skewed(one.eager_launches)),
        settled_step=lambda one: replace(one, launches=skewed(one.launches)),
        tune=lambda *_, **__: Tuned(tuning=Tuning(block_cols=64 << rank), source="measured"),
    )


def main():
    """Print the plan of each run, rank by rank."""
    ranks = join()
    for options in (VERIFIED, TIMED):
        model, kwargs = models.tiny_qwen2()
        request = WorkloadRequest(model_id="tiny", device="cpu", tp="auto")
        loaded = placed(replace(describe_live(model, (), kwargs), request=request), ranks)
        run = apply_on_ranks(ranks, loaded, options, Progress(), lambda _: None, measured=measured_by(ranks.rank))
        reasons = {one.id: one.reason for one in (*run.report.fusions, *run.report.rewrites)}
        told = {"keep": options.keep, "rank": ranks.rank, "plan": plan_entries(run.report), "reasons": reasons}
        sys.stdout.write(f"RESULT {json.dumps(told)}\n")
        sys.stdout.flush()
        run.revert()
    dist.barrier()
    ranks.leave()


if __name__ == "__main__":
    main()
    os._exit(0)
