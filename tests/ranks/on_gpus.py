"""Run by ``test_on_gpus.py`` in each of two processes, a GPU for each: norms after a sum, steps that ranks record together."""

from __future__ import annotations

import functools
import json
import os

import torch
import torch.distributed as dist

from fusion_advisor.collectives.group_kernels import NormCall, join_group
from fusion_advisor.ranks.group import join
from fusion_advisor.ranks.instruments import AgreedTimer
from fusion_advisor.ranks.recording import TimedRecorder, records_together
from fusion_advisor.timing import interleaving
from fusion_advisor.timing.host_timer import step_timer
from fusion_advisor.timing.interleaving import CannotRecord

COLS = 3584
NORMS = (("rms", False), ("rms", True), ("rms-once", True), ("layer", False), ("layer", True))


def normed(total, call, weight, shift):
    """The norm's rows, in the dtype of ``total``."""
    if call.norm == "layer":
        return torch.nn.functional.layer_norm(total, total.shape[-1:], weight, shift, call.eps)
    rows = total * torch.rsqrt(total.double().pow(2).mean(-1, keepdim=True) + call.eps).to(total.dtype)
    return rows * weight


def kernel_rows(kernels, device, rank):
    """Yield what each call came to: its error and that of NCCL and torch against fp64, and a sum of its bits."""
    for norm, has_offset in NORMS:
        for rows, way in ((1, "one-shot"), (64, "one-shot"), (1024, "one-shot"), (1024, "two-shot")):
            call = NormCall(rows=rows, cols=COLS, dtype=torch.bfloat16, eps=1e-5, norm=norm, has_offset=has_offset)
            drawn = functools.partial(torch.randn, device=device, dtype=torch.bfloat16)
            torch.manual_seed(100 + rank)
            x = drawn(rows, COLS)
            torch.manual_seed(7)
            residual, weight, shift, offset = drawn(rows, COLS) + 3, drawn(COLS), drawn(COLS), drawn(COLS)
            total, out = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
            vectors = [weight, *[shift] * (norm == "layer"), *[offset] * has_offset]
            launch = kernels.launcher(call, way)
            for _ in range(3):
                launch(x, residual, *vectors, total, out)
            wide = x.double()
            dist.all_reduce(wide)
            truth = wide + residual.double() + (offset.double() if has_offset else 0)
            summed = x.clone()
            dist.all_reduce(summed)
            eager = (summed + offset if has_offset else summed) + residual
            want = normed(truth, call, weight.double(), shift.double())
            bits = out.view(torch.int16).long().sum().item()
            errors = [float((one.double() - want).norm() / want.norm()) for one in (out, normed(eager, call, weight, shift))]
            yield {"norm": norm, "has_offset": has_offset, "rows": rows, "way": way, "errors": errors, "bits": bits}


def recorded_steps(ranks, device):
    """What became of steps that ranks record together: replays' results, a difference of times, and a refusal of rank 1."""
    group = ranks.group_name
    weight = torch.randn(COLS, COLS, device=device, dtype=torch.bfloat16) / 60
    x = torch.randn(4, COLS, device=device, dtype=torch.bfloat16)
    ops = torch.ops._c10d_functional

    def step(times):
        y = x
        for _ in range(times):
            y = ops.wait_tensor(ops.all_reduce(torch.nn.functional.linear(y, weight), "sum", group)) / 8
        return y

    results = [torch.empty_like(x), torch.empty_like(x)]
    calls = [lambda: results[0].copy_(step(20)), lambda: results[1].copy_(step(24))]
    record, timer = TimedRecorder(ranks), AgreedTimer(step_timer(on_cuda=True), ranks)
    pool = torch.cuda.graph_pool_handle()
    with torch.no_grad():
        plain = [step(times).clone() for times in (20, 24)]
        replays = [record(call, pool=pool) for call in calls]
        times = interleaving.interleave(replays, rounds=20, budget_s=2.0, on_cuda=True, in_a_row=True, timer=timer)
        change = interleaving.difference(*times)
        are_right = [torch.equal(one, other) for one, other in zip(results, plain, strict=True)]

        def refusing():
            y = step(2)
            if ranks.rank == 1 and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("rank 1 does not record this")
            return step(2) + y

        refusal = ""
        try:
            record(refusing, pool=pool)
        except CannotRecord as error:
            refusal = str(error)
        goes_on = torch.equal(step(20), plain[0])
    return {"change_ns": [change.low_ns, change.high_ns], "are_right": are_right, "refusal": refusal, "goes_on": goes_on}


def main():
    """Print a line for each check."""
    ranks = join()
    device = torch.device("cuda", ranks.local_rank)
    with ranks.ending_together():
        assert records_together()
        kernels = join_group(ranks.group_name, device, ranks.gather)
        told = [{"steps": recorded_steps(ranks, device)}]
        told += [{"why_not": kernels}] if isinstance(kernels, str) else list(kernel_rows(kernels, device, ranks.rank))
        for one in told:
            os.write(1, f"RESULT {json.dumps(one | {'rank': ranks.rank})}\n".encode())
        if not isinstance(kernels, str):
            kernels.release()
        ranks.leave()


if __name__ == "__main__":
    main()
    os._exit(0)
