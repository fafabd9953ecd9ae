"""Run by ``test_torchrun.py`` in each of two processes: outputs of split and fused models beside one process's in fp64."""

from __future__ import annotations

import copy
import os
import sys
from dataclasses import replace

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.fuse.plan.progress import Progress
from fusion_advisor.ranks.group import join
from fusion_advisor.ranks.run import apply_on_ranks, placed
from fusion_advisor.workload.load import describe_live
from fusion_advisor.workload.request import WorkloadRequest
from tests.ranks import models
from tests.ranks.calls import DECODE, decode_inputs, error_of

OPTIONS = ApplyOptions(effort="quick", keep="verified", runs=3, steps=1, warmup=1)


def applied(ranks, model, kwargs, request):
    """Apply to this rank's part of a model; returns it with the arguments of a call: a split model has a cache of its own."""
    loaded = placed(replace(describe_live(model, (), kwargs), request=request), ranks)
    run = apply_on_ranks(ranks, loaded, OPTIONS, Progress(), lambda _: None)
    return run.fused, loaded.kwargs


def main():
    """Print a line for each model."""
    ranks = join()
    for name, tp in (("llama", "auto"), ("qwen2", "auto"), ("decode", "auto"), ("ddp", None)):
        model, kwargs = models.tiny_qwen2() if name == "qwen2" else models.tiny_llama()
        whole = copy.deepcopy(model).double()
        request = WorkloadRequest(model_id="tiny", device="cpu")
        if name == "decode":
            request, kwargs = DECODE, decode_inputs(model)
        fused, own_kwargs = applied(ranks, model, kwargs, replace(request, tp=tp))
        called = DistributedDataParallel(model) if name == "ddp" else model
        error = error_of(called, own_kwargs, whole, decode_inputs(whole) if name == "decode" else kwargs)
        sys.stdout.write(f"RESULT {name} {ranks.rank} {fused.launches} {error:.3e}\n")
    sys.stdout.flush()
    dist.barrier()
    ranks.leave()


if __name__ == "__main__":
    main()
    os._exit(0)
