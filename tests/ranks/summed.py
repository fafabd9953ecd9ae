"""Run by ``test_sums.py`` in each of two processes: split models whose sums over ranks are one kernel with what follows them."""

from __future__ import annotations

import copy
import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from fusion_advisor.errors import PlanMismatch
from fusion_advisor.fuse.decide.instruments import Instruments
from fusion_advisor.fuse.live.restore_plan import apply_plan
from fusion_advisor.fuse.live.saved_plan import load_plan
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.fuse.plan.progress import Progress
from fusion_advisor.fuse.rewrite.collective_kernels import TITLES
from fusion_advisor.library.match import hash_text
from fusion_advisor.ranks.group import join
from fusion_advisor.ranks.run import apply_on_ranks, placed, plan_entries
from fusion_advisor.records.serialize import write_capture, write_report
from fusion_advisor.workload.load import describe_live
from fusion_advisor.workload.request import WorkloadRequest
from tests.ranks import models
from tests.ranks.calls import DECODE, decode_inputs, error_of
from tests.ranks.host_kernels import HostKernels
from tests.ranks.skewed import SkewedTimer

OPTIONS = ApplyOptions(effort="quick", keep="verified", runs=3, steps=1, warmup=1, compile=False)
WITH_WARM_UP = replace(OPTIONS, effort="usual")


def split(ranks, name):
    """Return this rank's part, the arguments of its call, the whole model in fp64, and the arguments of that one."""
    made = {"decode": models.tiny_llama, "starcoder2": models.tiny_starcoder2}.get(name, models.tiny_qwen2)
    model, kwargs = made()
    whole = copy.deepcopy(model).double()
    request = WorkloadRequest(model_id="tiny", device="cpu")
    truth_kwargs = kwargs
    if name == "decode":
        request, kwargs, truth_kwargs = DECODE, decode_inputs(model), decode_inputs(whole)
    loaded = placed(replace(describe_live(model, (), kwargs), request=replace(request, tp="auto")), ranks)
    return loaded, whole, truth_kwargs


def kept_and_restored(ranks, name, options):
    """Apply to a split model, save what was kept, revert, restore it in a fresh model and refuse it on another rank count."""
    made = []

    def kernels(group_name, device):
        made.append(HostKernels())
        return made[-1]

    loaded, whole, truth_kwargs = split(ranks, name)
    run = apply_on_ranks(ranks, loaded, options, Progress(), lambda _: None, measured=Instruments(group_kernels=kernels))
    rows = [row for row in run.report.fusions if row.kernel in TITLES]
    norms = ("add_rmsnorm", "add_layernorm")
    others = {row.kernel: row.status.value for row in run.report.fusions if row.chain_id and row.kernel.endswith(norms)}
    error = error_of(run.fused, loaded.kwargs, whole, truth_kwargs)
    own = made[0]
    told = {
        "name": name, "rank": ranks.rank, "plan": plan_entries(run.report), "error": error, "launched": own.launches > 0,
        "status": [row.status.value for row in rows], "replaced": [row.receipt.sites_replaced for row in rows],
        "before": [row.receipt.launches_before for row in rows], "bytes": [row.kernel_bytes for row in rows],
        "reasons": [row.reason for row in rows], "numerics": [row.numerics.is_passed for row in rows if row.numerics],
        "tuning": [row.rendered[0].tuning for row in rows if row.rendered], "add_norm": others,
        "kernels": [row.kernel for row in rows],
        "there": [one.is_there for one in made], "warnings": run.report.warnings, "fallbacks": list(run.fused.fallbacks),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        write_capture(run.capture, Path(folder) / "capture.json.gz")
        write_report(run.report, Path(folder) / "report.json")
        run.revert()
        told["freed"] = not own.is_there
        told["unfused"] = error_of(loaded.model, loaded.kwargs, whole, truth_kwargs)
        run.fused.apply()
        told["again"] = error_of(run.fused, loaded.kwargs, whole, truth_kwargs)
        told["acquired"] = own.acquired
        run.revert()
        saved = load_plan(folder)
        other, whole, truth_kwargs = split(ranks, name)  # a cache of its own: the first one has grown by now
        before = len(made)
        with apply_plan(other, saved, group_kernels=kernels) as restored:
            told["restored"] = error_of(restored, other.kwargs, whole, truth_kwargs)
            told["restored_launches"] = made[before].launches > 1
        told["restored_freed"] = not made[before].is_there
        told["refused"] = refusal_of(other, with_ranks(saved, 4), kernels)
        told["no_memory"] = refusal_of(other, saved, lambda *_: "no symmetric memory: the ranks run on CPUs")
    return told


def with_ranks(saved, count):
    """The plan as another number of ranks would have made it."""

    def changed(row):
        if row.kernel not in TITLES or not row.rendered:
            return row
        kernel = replace(row.rendered[0], tuning=row.rendered[0].tuning.replace("over 2 ranks", f"over {count} ranks"))
        return replace(row, rendered=(kernel,))

    return replace(saved, report=replace(saved.report, fusions=tuple(map(changed, saved.report.fusions))))


def refusal_of(loaded, saved, kernels):
    """Why a plan cannot be put in."""
    try:
        apply_plan(loaded, saved, group_kernels=kernels).revert()
    except PlanMismatch as error:
        return str(error)
    return ""


def judged(ranks, name, measured, options=OPTIONS):
    """Apply to a split model and tell what became of the kernel."""
    loaded, whole, truth_kwargs = split(ranks, "qwen2")
    run = apply_on_ranks(ranks, loaded, options, Progress(), lambda _: None, measured=measured)
    rows = [row for row in run.report.fusions if row.kernel in TITLES]
    error = error_of(run.fused, loaded.kwargs, whole, truth_kwargs)
    run.revert()
    return {
        "name": name, "rank": ranks.rank, "status": [row.status.value for row in rows], "reasons": [row.reason for row in rows],
        "error": error, "plan": plan_entries(run.report), "deltas": [row.step_delta_ns for row in rows],
    }  # fmt: skip


def main():
    """Print what each run came to, rank by rank."""
    ranks = join()
    told = [kept_and_restored(ranks, *one) for one in (("qwen2", WITH_WARM_UP), ("decode", OPTIONS), ("starcoder2", OPTIONS))]
    told.append(judged(ranks, "cpu", Instruments()))
    made = []

    def kernels(spoils=()):
        made.append(HostKernels(spoils))
        return made[-1]

    told.append(judged(ranks, "wrong", Instruments(group_kernels=lambda *_: kernels(spoils=(1,)))))
    timed = Instruments(group_kernels=lambda *_: kernels(), timer=SkewedTimer(ranks.rank))
    told.append(judged(ranks, "timed", timed, replace(OPTIONS, keep="paying", min_gain=0.0)))
    told[-1]["there"] = [one.is_there for one in made]
    for one in told:
        # One write of at most 4 KiB: both ranks write to one pipe.
        os.write(1, f"RESULT {json.dumps(one | {'plan': hash_text(json.dumps(one['plan']))})}\n".encode())
    dist.barrier()
    ranks.leave()


if __name__ == "__main__":
    main()
    os._exit(0)
