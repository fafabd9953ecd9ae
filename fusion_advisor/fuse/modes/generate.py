"""``--phase generate``: two regimes, two plans, one fused model, and the tokens as proof.

What pays for a prompt of many tokens is not what pays for one token, so the prefill and the decode step of ``generate`` are
profiled and fused each by itself. The fused model then holds both and picks by the call's signature; a call of any other shape
runs the original ops. The whole is judged by its tokens: in fp32 they must be eager's own, in 16 bits the first one that differs
is reported with the distance between the two tokens' logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fusion_advisor.autotune.build_ahead import BuildAhead
from fusion_advisor.fuse import pipeline
from fusion_advisor.fuse.decide import step_profile
from fusion_advisor.fuse.finish import AppliedRun
from fusion_advisor.fuse.live.fused_model import FusedModel
from fusion_advisor.fuse.plan.options import ApplyOptions, ProfileOptions
from fusion_advisor.fuse.plan.progress import Progress
from fusion_advisor.fuse.receipts import reverted
from fusion_advisor.records import Capture, GenerationCheck, Report
from fusion_advisor.runtime.torch_internals import module_call
from fusion_advisor.timing.wall_timer import as_timing, wall_times
from fusion_advisor.workload.generate import Generation
from fusion_advisor.workload.load import LoadedWorkload

PREFILL = "prefill"
"""Name of the folder that the prefill's own report goes to, below the run's."""


def profile_generate(
    loaded: LoadedWorkload, options: ProfileOptions, progress: Progress | None = None
) -> tuple[tuple[Report, Capture], tuple[Report, Capture]]:
    """Profile both steps of ``generate``.

    Args:
        loaded: with its ``generation``.
        options: how to measure; the prefill's files go into a folder of their own.
        progress: receives each phase.

    Returns:
        (report, capture) of the decode step, with the whole call's time in it, and of the prefill.
    """
    progress = progress or Progress()
    call = _call_of(loaded)
    prefill, decode = _regimes(loaded, call)
    first = pipeline.profile_workload(prefill, _below(options), progress)
    report, capture = pipeline.profile_workload(decode, options, progress)
    progress.phase("generate")
    on_cuda = capture.environment.device_kind == "cuda"
    times = wall_times(
        call, runs=options.runs, budget_s=options.budgets.wall_s, least_s=options.min_time_s, on_cuda=on_cuda, warmup=1
    )
    generation = GenerationCheck(
        prompt_tokens=int(call.input_ids.shape[1]),
        new_tokens=call.new_tokens,
        prefill_before_ns=_wall_ns(first[0].before),
        decode_before_ns=_wall_ns(report.before),
        before=as_timing(times, "wall"),
    )
    return (replace(report, workload=loaded.record, generation=generation), capture), first


def apply_generate(
    loaded: LoadedWorkload,
    options: ApplyOptions,
    progress: Progress | None = None,
    on_report: Callable[[Report], None] = lambda _: None,
    *,
    started: BuildAhead | None = None,
) -> AppliedRun:
    """Fuse both steps of ``generate`` and compare the tokens with eager's.

    Args:
        loaded: with its ``generation``.
        options: how to measure and decide; the prefill's files go into a folder of their own.
        progress: receives each phase.
        on_report: given the decode step's report so far.
        started: processes that compile kernels for a GPU, of which one step makes use.

    Returns:
        The run of the decode step: its fused model holds both regimes, its ``parts`` the prefill's report and capture.
    """
    progress = progress or Progress()
    call = _call_of(loaded)
    prefill, decode = _regimes(loaded, call)
    first = pipeline.apply_workload(prefill, _below(options), progress, started=started)
    first_kept = first.fused.is_applied
    first.revert()
    run = pipeline.apply_workload(decode, options, progress, on_report, started=started)
    run_kept = run.fused.is_applied
    run.revert()
    fused = run.fused if run_kept or not first_kept else first.fused
    if first_kept and run_kept:
        fused.include(first.fused)
    progress.phase("generate")
    generation = _compare(call, fused, first.report, run.report, options, kept=(first_kept, run_kept))
    report = replace(run.report, workload=loaded.record, generation=generation)
    prefill_report = first.report
    refusal = None
    if generation.after is not None and not generation.is_same and loaded.record.dtype == "fp32":
        refusal = f"in fp32 new token {generation.first_divergence} differs from eager's: everything was reverted"
        progress.warn(refusal)
        report, prefill_report = reverted(report, refusal), reverted(prefill_report, refusal)
    elif (first_kept or run_kept) and not options.dry_run:
        fused.apply()
    fused.report = report
    return AppliedRun(
        fused=fused, report=report, capture=run.capture, parts=((PREFILL, prefill_report, first.capture),),
        write_start=partial(_write_starts, first.write_start, run.write_start),
    )  # fmt: skip


def _write_starts(prefill: Callable[..., str] | None, decode: Callable[..., str] | None, folder: Path) -> str:
    """Write what starts of both steps without a trace need; return why there is none of one of them."""
    why = [
        f"{name}: {'nothing was kept' if write is None else found}"
        for name, write, place in ((PREFILL, prefill, folder / PREFILL), ("decode", decode, folder))
        if (found := "" if write is None else write(place)) or write is None
    ]
    return "; ".join(why)


def first_divergence(
    eager: torch.Tensor, fused: torch.Tensor, logits: tuple[torch.Tensor, ...], prompt_tokens: int
) -> tuple[int, float] | None:
    """Return where two greedy continuations part and how close the decision was; None when they are the same.

    Args:
        eager: token ids, int64 [batch, prompt + new].
        fused: the same, of the fused model.
        logits: eager's raw logits of each new token, [batch, vocabulary].
        prompt_tokens: tokens before the first new one.

    Returns:
        The number of the new token (from 0) and, of the rows that part there, the largest distance between eager's logits of the
        two tokens.
    """
    differs = (eager != fused)[:, prompt_tokens:]
    if not bool(differs.any()):
        return None
    step = int(differs.any(0).nonzero()[0])
    rows = differs[:, step].nonzero().flatten()
    at = logits[step][rows].to(torch.float64)
    ours = fused[rows, prompt_tokens + step].to(at.device)
    theirs = eager[rows, prompt_tokens + step].to(at.device)
    gap = at.gather(1, theirs[:, None]) - at.gather(1, ours[:, None])
    return step, float(gap.abs().max())


def _compare(
    call: Generation, fused: FusedModel, first: Report, second: Report, options: ApplyOptions, *, kept: tuple[bool, bool]
) -> GenerationCheck:
    on_cuda = second.environment.device_kind == "cuda"

    def eager_call() -> Any:
        # Not reverted: that would throw away the graphs that the next fused call replays.
        in_place = module_call.set_compiled_call(call.model, None)
        try:
            return call()
        finally:
            module_call.set_compiled_call(call.model, in_place)

    check = GenerationCheck(
        prompt_tokens=int(call.input_ids.shape[1]),
        new_tokens=call.new_tokens,
        prefill_before_ns=_wall_ns(first.before),
        decode_before_ns=_wall_ns(second.before),
        before=as_timing([0], "wall"),
    )
    if not any(kept):
        times = wall_times(
            eager_call, runs=options.runs, budget_s=options.budgets.wall_s, least_s=options.min_time_s, on_cuda=on_cuda, warmup=1
        )
        return replace(check, before=as_timing(times, "wall"))
    fused.apply()
    try:
        theirs = eager_call()
        counted = sum(fused.fallbacks.values())
        ours = call()
        original_calls = sum(fused.fallbacks.values()) - counted
        parted = first_divergence(theirs.sequences, ours.sequences, theirs.logits, check.prompt_tokens)
        before, after = step_profile.walls(
            [eager_call, call],
            on_cuda=on_cuda,
            runs=options.runs,
            budget_s=2 * options.budgets.wall_s,
            least_s=options.min_time_s,
        )
    finally:
        fused.revert()
    return replace(
        check,
        prefill_after_ns=_wall_ns(first.after) if kept[0] else 0,
        decode_after_ns=_wall_ns(second.after) if kept[1] else 0,
        before=before,
        after=after,
        original_calls=original_calls,
        first_divergence=None if parted is None else parted[0],
        logit_gap=None if parted is None else parted[1],
    )


def _wall_ns(step: Any) -> int:
    """Median wall time of one side of a report."""
    return 0 if step is None or step.wall is None else int(step.wall.median_ns)


def _call_of(loaded: LoadedWorkload) -> Generation:
    if loaded.generation is None:
        raise ValueError("this workload is a single step")
    return loaded.generation


def _regimes(loaded: LoadedWorkload, call: Generation) -> tuple[LoadedWorkload, LoadedWorkload]:
    tokens = int(call.input_ids.shape[1])
    prefill, decode = call.steps()
    record = replace(loaded.record, new_tokens=0)
    return (
        loaded.step(prefill, replace(record, phase="prefill")),
        loaded.step(decode, replace(record, phase="decode", seq_len=1, context=tokens)),
    )


def _below(options: Any) -> Any:
    """The same options for the prefill, whose files go one folder down."""
    if options.run_dir is None:
        return options
    folder = options.run_dir / PREFILL
    folder.mkdir(parents=True, exist_ok=True)
    return replace(options, run_dir=folder, run_id=f"{options.run_id}-{PREFILL}")
