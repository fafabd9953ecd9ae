"""``apply --phase train``: both passes of a training step rewritten, judged by their gradients, kept where the step is faster.

The graphs and their verdicts are those of the torch.compile backend (``fuse.dynamo_backend``); here they are collected, the whole
step is timed against eager, and what stays is put into the live model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule

from fusion_advisor.autotune.build_ahead import BuildAhead
from fusion_advisor.autotune.start_compilers import building_ahead
from fusion_advisor.capture.graph import tracer
from fusion_advisor.capture.step_memory import record_step_memory
from fusion_advisor.capture.trace.attribute import Step
from fusion_advisor.capture.training import in_training
from fusion_advisor.codegen.registry import refuse_unready
from fusion_advisor.errors import CannotCapture
from fusion_advisor.fuse.after_side import profile_of, without_doubles
from fusion_advisor.fuse.decide import step_profile
from fusion_advisor.fuse.decide.instruments import MEASURED, Instruments
from fusion_advisor.fuse.decide.session import Variant
from fusion_advisor.fuse.dynamo_backend import fuse_graph, optimise
from fusion_advisor.fuse.modes.training import (
    NOTES,
    Measured,
    apart_from_caller,
    capture_of,
    clocked,
    first_report,
    measure_training,
)
from fusion_advisor.fuse.modes.training_findings import (
    Findings,
    batch_norm_notes,
    check_of_all,
    logits_findings,
    merged,
    step_rows,
)
from fusion_advisor.fuse.modes.training_runs import UNCHANGED, Call, TrainingJob, baselines_of, modules_of, traced
from fusion_advisor.fuse.pipeline import on_device
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.fuse.plan.progress import PhaseClock, Progress
from fusion_advisor.fuse.plan.training_options import check_training_options
from fusion_advisor.fuse.receipts import reverted, with_receipt
from fusion_advisor.fuse.rewrite import device_memory
from fusion_advisor.fuse.train import step_parts
from fusion_advisor.fuse.train.journal import Entry, Journal
from fusion_advisor.fuse.train.trained_graph import TrainedGraph
from fusion_advisor.fuse.train.trained_model import TrainedModel
from fusion_advisor.fuse.whole_model_gate import given_back, why_nothing_stays
from fusion_advisor.records import EAGER, OURS, Baseline, Capture, Finding, Report, Status, Training
from fusion_advisor.runtime.environment import describe_environment, measure_bandwidth
from fusion_advisor.workload.load import LoadedWorkload
from fusion_advisor.workload.weights import seeded

_HOW = (
    "Both passes are AOTAutograd's graphs. Chains of each were chosen by their own times; then forward and backward with all of "
    "them were timed in turn with the model's own ops.",
    "Outputs and all gradients were judged against fp64, with random gradients of the outputs; eager's own error is the limit.",
)


@dataclass(slots=True)
class TrainedRun:
    """A finished ``apply --phase train``: the model and its report."""

    fused: TrainedModel
    report: Report
    capture: Capture
    parts: tuple[tuple[str, Report, Capture], ...] = ()
    """None: the report is of the whole step."""
    write_start: Callable[..., str] | None = None
    """None: a training step is rewritten in the process that trains."""

    def revert(self) -> None:
        """Put the original model back."""
        self.fused.revert()


def apply_training(
    loaded: LoadedWorkload, options: ApplyOptions, progress: Progress | None = None,
    on_report: Callable[[Report], None] = lambda _: None, *, instruments: Instruments = MEASURED,
    optimise: Callable[..., Call] = optimise, started: BuildAhead | None = None,
) -> TrainedRun:  # fmt: skip
    """Rewrite both passes of a model's training step, keep what pays, and leave the model fused.

    The model keeps its mode, its gradients and its buffers.

    Args:
        loaded: the model and its inputs.
        options: how to measure and decide.
        progress: is given each phase and its results.
        on_report: given the report so far after each phase.
        instruments: measure, and decide what stays.
        optimise: rewrites one graph of a pass.
        started: processes that compile kernels for a GPU and were started earlier.

    Raises:
        UsageError: an option that a training step cannot serve.
        NotTrainable: no output depends on a parameter, or the step raises.
        CannotCapture: dynamo captured nothing that asks for a gradient.
        NoCompiler: on a CPU, where every kernel is C++.
        OutOfMemory: with what to try instead.
    """
    check_training_options(options)
    refuse_unready(options.backend, torch.device(loaded.record.device).type)
    tracer.refuse_own_ops(loaded.model, loaded.args, loaded.kwargs, loaded.record.model_id)
    clock = PhaseClock(progress := progress or Progress(), is_whole=True)
    with (
        apart_from_caller(loaded) as own, on_device(loaded, "applying to a training step"),
        seeded(loaded.request.seed, torch.device(loaded.record.device)), in_training(loaded.model), ExitStack() as at_the_end,
    ):  # fmt: skip
        with clock.phase("bandwidth"):
            environment = describe_environment(loaded.record.device)
            bandwidth = options.bandwidth or measure_bandwidth(loaded.record.device)
            options = replace(options, bandwidth=bandwidth)
        job = TrainingJob(
            loaded=own, options=options, progress=progress, clock=clock, instruments=instruments,
            on_cuda=environment.device_kind == "cuda", optimise=optimise,
        )  # fmt: skip
        with clock.phase("profile"):
            measured = measure_training(own, options, progress, on_cuda=job.on_cuda, at_the_end=at_the_end)
        capture = capture_of(own, environment, bandwidth, measured)
        report = replace(
            first_report(capture, measured, options, clock), status="interrupted", baseline=options.baseline, keep=options.keep,
            is_exact=options.exact, notes=(*NOTES, *_HOW),
        )  # fmt: skip
        on_report(report)
        with building_ahead(loaded.record.device, progress.warn, started) as ahead:
            fused, journal = _rewritten(job, ahead, _eager_bytes(own, measured))
        report = _with_findings(report, fused, journal, measured)
        on_report(report)
        final = _dry(report) if options.dry_run else _measured(job, fused, journal, report, on_report)
    journal.entries.clear()  # the graphs' optimiser keeps it, and the report has all that it holds
    fused.report = final = replace(final, durations_s=tuple(clock.durations_s))
    is_left_fused = final.status == "applied" and final.after is not None and final.after.label != UNCHANGED
    (fused.apply if is_left_fused else fused.forget)()
    return TrainedRun(fused=fused, report=final, capture=capture)


def _eager_bytes(loaded: LoadedWorkload, measured: Measured) -> int | None:
    """Return what the model's own step allocates at its peak; None where nothing measures it."""
    needed = device_memory.needed_bytes(loaded.model, loaded.args, loaded.kwargs)
    return measured.peak_bytes - needed if measured.peak_bytes else None


def _rewritten(job: TrainingJob, ahead: BuildAhead | None, eager_bytes: int | None) -> tuple[TrainedModel, Journal]:
    """Capture the step, and rewrite and judge each of its graphs: all of that is done by the graphs' first call."""
    loaded, journal = job.loaded, Journal()
    names = {id(parameter): name for name, parameter in loaded.model.named_parameters()}
    tried = functools.partial(job.optimise, progress=job.progress, journal=journal, instruments=job.instruments, ahead=ahead)
    fuse = functools.partial(
        fuse_graph, options=job.options, optimiser=tried, names=functools.partial(_qualified, names),
        trained=functools.partial(TrainedGraph, eager_bytes=eager_bytes),
    )  # fmt: skip
    model_id = loaded.record.model_id
    fused = TrainedModel(loaded.model, loaded.args, loaded.kwargs, fuse)
    with job.clock.phase("fusions"):
        with tracer.refusals_told(model_id):
            job.step(fused.compiled_call)()
        loaded.model.zero_grad(set_to_none=True)
    if not fused.graphs_of_step:
        raise CannotCapture(model_id=model_id, detail=_no_gradient(loaded.model))
    for graph in fused.graphs_of_step:
        if graph.outcome is not None and graph.outcome.reason:
            job.progress.note(graph.outcome.reason)
    journal.forget([one for graph in fused.graphs_of_step for one in graph.left_out])
    fused.seal([entry.variant for entry in journal.entries if entry.variant is not None])
    return fused, journal


def _no_gradient(model: torch.nn.Module) -> str:
    """Say why no graph asks for a gradient."""
    found = "none of the graphs that dynamo captured asks for a gradient"
    layer = next(((name, one) for name, one in model.named_modules() if isinstance(one, torch.nn.RNNBase)), None)
    if layer is None:
        return found
    kind = type(layer[1]).__name__
    return f"{found}; `{layer[0] or kind}` is a recurrent layer ({kind}), whose callers dynamo runs op by op in training"


def _qualified(names: Mapping[int, str], graph_module: GraphModule, args: tuple[Any, ...]) -> tuple[str, ...]:
    """Name a graph's inputs: parameters as the model does."""
    placeholders = [str(node.target) for node in graph_module.graph.nodes if node.op == "placeholder"]
    return tuple(names.get(id(arg), name) for name, arg in zip(placeholders, args, strict=True))


def _refusal_of(fused: TrainedModel, entry: Entry) -> str:
    """Return why an entry's graph runs its own ops; empty where it does not, or asks for no gradient."""
    for graph in fused.graphs_of_step:
        if any(half.graph is entry.graph for half in graph.halves) and graph.outcome is not None:
            return graph.outcome.reason
    return ""


def _with_findings(report: Report, fused: TrainedModel, journal: Journal, measured: Measured) -> Report:
    found = merged(journal.entries, functools.partial(_refusal_of, fused))
    outcomes = [graph.outcome for graph in fused.graphs_of_step if graph.outcome is not None]
    whole = step_rows(outcomes)
    rewritten = [one for one in outcomes if not one.reason]
    checks = [one.check for one in rewritten or outcomes if one.check is not None]
    captured = step_profile.step_profile("captured", found.launches)
    joined_ns = sum(one.capture.quality.joined_share * one.capture.quality.captured_device_ns for one in journal.entries)
    quality = replace(
        report.quality, joined_share=joined_ns / max(captured.device_ns, 1), captured_device_ns=captured.device_ns,
        reconciliation=_reconciled(found, measured),
        graph_breaks=tuple(fused.breaks),
    )  # fmt: skip
    training = report.training
    if training is not None:
        again = [row for graph in fused.graphs_of_step for row in graph.computed_again(journal.capture_of)]
        training = replace(training, recomputed=tuple(sorted(again, key=lambda row: -row.saved_bytes)))
    return replace(
        report, training=training, chains=found.chains, answers=found.answers, fusions=found.fusions,
        rewrites=(*whole, *found.rewrites), quality=quality,
        findings=(*(found_logits := logits_findings(whole, report.workload.model_id)), *_renumbered(report, len(found_logits))),
        captured=replace(captured, timeline=None), model_check=check_of_all(checks),
        notes=(*report.notes, *batch_norm_notes(journal.entries)),
        warnings=(*report.warnings, *dict.fromkeys(_unranked(fused, journal))),
    )  # fmt: skip


def _unranked(fused: TrainedModel, journal: Journal) -> Iterator[str]:
    """Say of each graph in which no chain was looked for why it runs its own ops."""
    ranked = {id(entry.graph) for entry in journal.entries}
    for graph in fused.graphs_of_step:
        if graph.outcome is not None and graph.outcome.reason and not any(id(half.graph) in ranked for half in graph.halves):
            yield f"the original ops run, and no chain was ranked: {graph.outcome.reason}"


def _renumbered(report: Report, first: int) -> list[Finding]:
    """Return the findings about the step's parts, numbered from ``first + 1`` on."""
    return [replace(one, id=f"N{number}") for number, one in enumerate(report.findings, start=first + 1)]


def _reconciled(found: Findings, measured: Measured) -> str:
    parts = ", ".join(f"{name} {ns / 1e6:.3f} ms" for name, ns in found.passes_ns)
    total_ns, eager_ns = sum(ns for _, ns in found.passes_ns), measured.traced.device_ns
    share = (total_ns - eager_ns) / max(eager_ns, 1)
    return f"captured {total_ns / 1e6:.3f} ms ({parts}) against eager {eager_ns / 1e6:.3f} ms of kernel time ({share:+.1%})"


def _dry(report: Report) -> Report:
    return replace(report, status="dry run", model_check=None)


def _measured(
    job: TrainingJob, fused: TrainedModel, journal: Journal, report: Report, on_report: Callable[[Report], None]
) -> Report:  # fmt: skip
    """Time the step before and after, trace it, and revert everything where the whole does not pass."""
    kept = [entry for entry in journal.entries if entry.variant is not None and not _refusal_of(fused, entry)]
    is_lighter = any(row.status is Status.KEPT for row in report.rewrites)
    after_step: Step | None = None
    concluded = functools.partial(_unchanged, report)
    if kept or is_lighter:
        with job.clock.phase("measure after"):
            with fused.launched():
                runs, after_step = traced(job, fused, kept)
            report = _with_own_parts(job, fused, report)
        whole = Variant(modules=[module for entry in kept for module in modules_of(entry)])
        fusions = tuple(with_receipt(fusion, whole, after_step, runs) for fusion in report.fusions)
        concluded = functools.partial(_concluded, job, fused, replace(report, fusions=fusions))

    def early(rows: tuple[Baseline, ...], state_bytes: int) -> None:
        so_far, _ = concluded(rows, state_bytes)
        on_report(replace(so_far, status="interrupted", durations_s=tuple(job.clock.durations_s)))

    final, refusal = concluded(*baselines_of(job, fused, after_step, report.before, early))
    if refusal:
        job.progress.warn(refusal)
    return final


def _unchanged(report: Report, rows: tuple[Baseline, ...], state_bytes: int) -> tuple[Report, str]:
    """Return the report of a run that kept nothing."""
    before = profile_of(rows, EAGER, "eager")
    final = replace(
        report, status="applied", before=before, after=replace(before, label=UNCHANGED), baselines=without_doubles(rows),
        training=_with_state(report.training, state_bytes),
    )  # fmt: skip
    return final, ""


def _concluded(
    job: TrainingJob, fused: TrainedModel, report: Report, rows: tuple[Baseline, ...], state_bytes: int
) -> tuple[Report, str]:  # fmt: skip
    """Return the report with the times of all ways, and why nothing stays; empty where something does."""
    before, after = (profile_of(rows, name, label) for name, label in ((EAGER, "eager"), (OURS, "fused")))
    final = replace(
        report, status="applied", before=before, after=after, baselines=without_doubles(rows),
        training=_with_state(report.training, state_bytes),
        warnings=(*report.warnings, *(f"the fused model ran its original ops: {reason}" for reason in fused.fallbacks)),
    )  # fmt: skip
    assert before.wall is not None and after.wall is not None
    refusal = why_nothing_stays(
        report.model_check, before.device_ns, after.device_ns, before.wall, after.wall,
        is_device_judged=job.on_cuda and not _is_replayed(fused),
        is_time_judged=job.options.is_timed and job.options.memory_budget >= 1,
    )  # fmt: skip
    if refusal is None:
        return final, ""
    dropped = replace(reverted(final, refusal, given_back(report.model_check)), after=replace(before, label=UNCHANGED))
    return (dropped if final.training is None else replace(dropped, training=final.training.eager_alone())), refusal


def _with_state(training: Training | None, state_bytes: int) -> Training | None:
    if training is None or training.parts is None:
        return training
    return replace(training, parts=replace(training.parts, state_bytes=state_bytes))


def _is_replayed(fused: TrainedModel) -> bool:
    """Whether CUDA graphs replay the step: they are there for the host's time, and may take kernels that are no faster."""
    return any(graph.step_graph is not None and graph.step_graph.is_on for graph in fused.graphs_of_step)


def _with_own_parts(job: TrainingJob, fused: TrainedModel, report: Report) -> Report:
    """Add the times of the fused passes, eager's in turn with them, and what a fused step holds over its time."""
    training = report.training
    if training is None or training.parts is None:
        return report
    loaded = job.loaded
    (eager, ours) = step_parts.pass_times(
        [fused.original_call, fused.compiled_call], loaded.args, loaded.kwargs, job.step,
        clocked(job.options, on_cuda=job.on_cuda),
    )  # fmt: skip
    parts = replace(
        training.parts, forward_before_ns=eager[0], backward_before_ns=eager[1], forward_after_ns=ours[0],
        backward_after_ns=ours[1],
    )  # fmt: skip
    with fused.launched():  # in graphs everything is there from the start
        held = record_step_memory(job.step(fused.compiled_call), label="fused", on_cuda=job.on_cuda)
    loaded.model.zero_grad(set_to_none=True)
    memory = (*training.memory, *(() if held is None else (held,)))
    return replace(report, training=replace(training, parts=parts, memory=memory))
