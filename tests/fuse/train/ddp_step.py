"""Run by ``test_ddp.py`` in each of two processes: steps of a model in DistributedDataParallel, fused and plain.

The word ``compile`` fuses what DDP has around the model; ``apply`` fuses the model before DDP is put around it, and ``unused``
after, with a layer that no step uses and steps that are not shared.
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import fusion_advisor as fa
from tests.fuse.train.test_trained_graph import WIDTH, Block, Counted, step
from tests.fuse.train.test_trained_model import OPTIONS


class Idle(torch.nn.Module):
    """Has a weight and uses none."""

    def __init__(self):
        super().__init__()
        self.idle = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x


def main(how: str) -> None:
    """Print whether a pass was rewritten and how far the gradients are from plain DDP's."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(Block(), Block())
    if how == "unused":
        model.append(Idle())
    plain = copy.deepcopy(model)
    options = {"find_unused_parameters": how == "unused"}
    other = DistributedDataParallel(plain, **options)
    x = torch.randn(8, 5, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    backend, applied = Counted(), None
    if how == "apply":
        applied = fa.apply(model, (x,), **OPTIONS)
        fused = DistributedDataParallel(model)
    elif how == "unused":
        fused = DistributedDataParallel(model, **options)
        applied = fa.apply(model, (x,), **OPTIONS)
    else:
        fused = torch.compile(DistributedDataParallel(model), backend=backend, dynamic=False)
    for is_shared in (False, True) if how == "unused" else (True, True):
        for one in (fused, other):
            with contextlib.nullcontext() if is_shared else one.no_sync():
                step(one, x)
    pairs = list(zip(model.parameters(), plain.parameters(), strict=True))
    assert all((mine.grad is None) == (own.grad is None) for mine, own in pairs)
    errors = [float((mine.grad - own.grad).norm() / own.grad.norm()) for mine, own in pairs if own.grad is not None]
    sums = torch.stack([mine.grad.double().sum() for mine, _ in pairs if mine.grad is not None])
    both = [torch.empty_like(sums) for _ in range(2)]
    dist.all_gather(both, sums)
    is_fused = any(backend.changed) if applied is None else applied.launches > 0 and not applied.fallbacks
    sys.stdout.write(f"RESULT {dist.get_rank()} {is_fused} {max(errors):.3e} {torch.equal(*both)}\n")
    sys.stdout.flush()
    dist.barrier()  # the other process has printed its result too
    os._exit(0)  # twice, on a loaded machine, a process had not ended by itself minutes after its result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
