"""Run by ``test_ddp.py`` in each of two processes: steps of a model in DistributedDataParallel, fused and plain.

The word ``compile`` fuses what DDP has around the model; ``apply`` fuses the model before DDP is put around it.
"""

from __future__ import annotations

import copy
import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import fusion_advisor as fa
from tests.fuse.train.test_trained_graph import WIDTH, Block, Counted, step
from tests.fuse.train.test_trained_model import OPTIONS


def main(how: str) -> None:
    """Print whether a pass was rewritten and how far the gradients are from plain DDP's."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(Block(), Block())
    plain = copy.deepcopy(model)
    other = DistributedDataParallel(plain)
    x = torch.randn(8, 5, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    backend, applied = Counted(), None
    if how == "apply":
        applied = fa.apply(model, (x,), **OPTIONS)
        fused = DistributedDataParallel(model)
    else:
        fused = torch.compile(DistributedDataParallel(model), backend=backend, dynamic=False)
    for _ in range(2):
        step(fused, x)
        step(other, x)
    errors = [
        float((mine.grad - own.grad).norm() / own.grad.norm())
        for mine, own in zip(model.parameters(), plain.parameters(), strict=True)
    ]
    sums = torch.stack([parameter.grad.double().sum() for parameter in model.parameters()])
    both = [torch.empty_like(sums) for _ in range(2)]
    dist.all_gather(both, sums)
    is_fused = any(backend.changed) if applied is None else applied.launches > 0 and not applied.fallbacks
    sys.stdout.write(f"RESULT {dist.get_rank()} {is_fused} {max(errors):.3e} {torch.equal(*both)}\n")
    sys.stdout.flush()
    dist.barrier()  # the other process has printed its result too
    os._exit(0)  # twice, on a loaded machine, a process had not ended by itself minutes after its result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
