"""Profile a PyTorch model, fuse its pointwise and reduction chains into readable kernels, keep only what measurably pays.

Importing this module imports no torch; the work is imported when a function is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from fusion_advisor.fuse.finish import AppliedRun
    from fusion_advisor.fuse.live.fused_model import FusedModel
    from fusion_advisor.fuse.live.saved_plan import SavedPlan
    from fusion_advisor.fuse.modes.apply_training import TrainedRun
    from fusion_advisor.fuse.plan.options import ApplyOptions, ProfileOptions
    from fusion_advisor.fuse.train.trained_model import TrainedModel
    from fusion_advisor.report.html.notebook import NotebookReport
    from fusion_advisor.workload.load import LoadedWorkload

OptionsT = TypeVar("OptionsT", bound="ProfileOptions")

__all__ = ["apply", "lay_out_weights", "load_plan", "load_report", "profile"]


def profile(model: torch.nn.Module, inputs: Any, **options: Any) -> NotebookReport:
    """Profile a live model; nothing about it is changed.

    Args:
        model: any module, on its device, in the mode you run it in.
        inputs: one example call: a tensor, a tuple of positional or a dict of keyword arguments.
        **options: fields of :class:`fusion_advisor.fuse.plan.options.ProfileOptions`.

    Returns:
        The report: where device time goes, the chains, and the kernel each would get.

    Raises:
        CannotCapture: dynamo captured no graph of the model.
        UsageError: an option has a value out of its range.
        TypeError: an option does not exist.
        OutOfMemory: with what to try instead.
    """
    from fusion_advisor.fuse.pipeline import profile_workload
    from fusion_advisor.fuse.plan.options import ProfileOptions
    from fusion_advisor.fuse.plan.python_options import read_options
    from fusion_advisor.report.html.notebook import for_notebook
    from fusion_advisor.workload.load import describe_live

    loaded = describe_live(model, *_call(inputs))
    report, _ = profile_workload(loaded, _named("profile", loaded, read_options(ProfileOptions, options)))
    return for_notebook(report)


@overload
def apply(
    model: torch.nn.Module, inputs: Any, *, phase: Literal["forward"] = "forward", plan: SavedPlan | None = None, **options: Any
) -> FusedModel: ...


@overload
def apply(
    model: torch.nn.Module, inputs: Any, *, phase: Literal["train"], plan: SavedPlan | None = None, **options: Any
) -> TrainedModel: ...


def apply(
    model: torch.nn.Module, inputs: Any, *, phase: str = "forward", plan: SavedPlan | None = None, **options: Any
) -> FusedModel | TrainedModel:
    """Fuse a live model and keep what pays.

    Args:
        model: any module, in ``eval()`` mode for ``phase="forward"``; this instance is fused in place, until ``revert()``. What
            an earlier ``apply`` put into it is reverted first.
        inputs: one example call, as for :func:`profile`. Calls that differ from it run the original ops.
        phase: ``forward``, or ``train`` to fuse forward, loss and backward of a training step. The step is measured in
            ``train()`` mode and under the autocast of this call; the model keeps its mode, its gradients and its buffers. The
            loss is the model's own where it returns one (give labels), else the mean of its outputs; what is verified does not
            depend on it.
        plan: from :func:`load_plan`: what an earlier run kept is built, checked and installed, without options or timing.
        **options: fields of :class:`fusion_advisor.fuse.plan.options.ApplyOptions`. ``shapes="batch=1..16,seq=1..4096"`` serves
            ranges of sizes (:func:`fusion_advisor.fuse.plan.size_ranges.read_shapes`). With ``run_dir`` the run's files are
            written there, as ``fusion-advisor apply`` writes them: the report (JSON, HTML, markdown), the capture and the
            kernels. :func:`load_plan` reads them.

    Returns:
        The fused model: call it like the model; ``.report`` says what was done, ``.revert()`` (or leaving a ``with`` block)
        undoes it.

    Raises:
        CannotCapture: dynamo captured no graph of the model.
        ModelInTraining, AutocastAround: the model, or a dropout in it, is in ``train()`` mode; autocast is on around this call.
        NotTrainable: for ``phase="train"``, no output depends on a parameter, or the step raises.
        UsageError: an option that the phase cannot serve, or with a value out of its range.
        TypeError: an option that does not exist, options together with a plan, a plan for ``phase="train"``, another phase, or an
            argument that is no module.
        PlanMismatch, WeightsApart: the plan was made for another graph or device; it needs :func:`lay_out_weights` first.
        OutOfMemory: with what to try instead.
    """
    from functools import partial

    from fusion_advisor.fuse.slot.in_place import take_out
    from fusion_advisor.workload.load import describe_live

    if phase not in ("forward", "train"):
        raise TypeError(f"phase is 'forward' or 'train', not {phase!r}")
    loaded = describe_live(model, *_call(inputs), phase=phase)
    if plan is not None:
        if phase == "train":
            raise TypeError("a training step is rewritten anew in each process: leave plan out")
        if options:
            raise TypeError(f"a plan is put in as it was made, without {', '.join(sorted(options))}")
        return _put_in(loaded, plan)
    from fusion_advisor.export.formats.write import write_run
    from fusion_advisor.fuse.plan.options import ApplyOptions
    from fusion_advisor.fuse.plan.python_options import read_options
    from fusion_advisor.report.html.notebook import for_notebook

    chosen = _named("apply", loaded, read_options(ApplyOptions, options))
    take_out(model)
    run = _applied(loaded, chosen)
    run.fused.report = for_notebook(run.report)
    if phase == "forward":
        run.fused.exporter = partial(write_run, loaded, run.capture, run.report)
    return run.fused


def _put_in(loaded: LoadedWorkload, plan: SavedPlan) -> FusedModel:
    """Put a saved plan into a model, in place of what an earlier ``apply`` put there."""
    from os import PathLike

    from fusion_advisor.fuse.slot.in_place import take_out
    from fusion_advisor.runtime.gc_pause import collector_paused

    if isinstance(plan, str | PathLike):
        raise TypeError(f"a plan is what fa.load_plan returns: plan=fa.load_plan({str(plan)!r})")
    take_out(loaded.model)

    with collector_paused():  # see load_plan
        from fusion_advisor.fuse.live.restore_plan import apply_plan
        from fusion_advisor.report.html.notebook import for_notebook

    def write_export(*args: Any, **options: Any) -> tuple[str, ...]:
        from fusion_advisor.export.formats.write import write_plan

        return write_plan(loaded, plan, *args, **options)

    fused = apply_plan(loaded, plan)
    if plan.report.shapes is not None:
        from fusion_advisor.fuse.restore_shapes import restore_shapes

        restore_shapes(fused, loaded, plan)
    fused.report = for_notebook(plan.report)
    fused.exporter = write_export
    return fused


def _applied(loaded: LoadedWorkload, options: ApplyOptions) -> AppliedRun | TrainedRun:
    """Apply to a loaded workload, and write the run's files where there is a directory for them."""
    from dataclasses import replace
    from pathlib import Path

    from fusion_advisor.cli.common.run_dir import FORMATS, write_run
    from fusion_advisor.fuse.modes.apply_training import apply_training
    from fusion_advisor.fuse.pipeline import apply_workload
    from fusion_advisor.fuse.plan.training_options import check_options_of_other_phases
    from fusion_advisor.records.serialize import write_capture, write_report

    if loaded.record.phase != "train":
        check_options_of_other_phases(options)
    work: Callable[..., AppliedRun | TrainedRun] = apply_training if loaded.record.phase == "train" else apply_workload
    if options.run_dir is None:
        return work(loaded, options)
    folder = Path(options.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "report.json"
    run = work(loaded, replace(options, run_dir=folder), on_report=lambda report: write_report(report, path))
    write_run(run.report, folder, FORMATS)
    write_capture(run.capture, folder / "capture.json.gz")
    if (write_start := getattr(run, "write_start", None)) is not None:
        write_start(folder)
    return run


def lay_out_weights(model: torch.nn.Module) -> int:
    """Lay a model's weights out as ``fusion-advisor apply`` does for the models that it loads, ahead of :func:`apply`.

    Weights of linears that read one input are laid side by side, so that they can run as one GEMM, and 16-bit weights of an odd
    number of rows get room after them. Parameters stay the same objects with the same values, and an optimizer goes on with them.
    What else holds a weight's old memory (a view of it, another process) keeps that memory, and does not see later writes.

    Args:
        model: on its device, in its dtype. While its weights are moved, those of one module lie in memory twice.

    Returns:
        How many parameters were moved; 0 where all lie so already.

    Raises:
        TypeError: it is no module.
    """
    from fusion_advisor.workload import weight_packing
    from fusion_advisor.workload.load import refuse_non_module

    refuse_non_module(model)
    return weight_packing.lay_out_weights(model)


def load_plan(run_dir: str | Path) -> SavedPlan:
    """Read what an earlier ``apply`` kept, to put it in place again: ``fa.apply(model, inputs, plan=fa.load_plan(run_dir))``.

    Args:
        run_dir: a run directory with ``report.json`` and ``capture.json.gz`` in it.

    Raises:
        NoPlan: it is no run directory, or one without a plan.
        UnreadableReport: a file is truncated or not one of ours.
    """
    from pathlib import Path

    from fusion_advisor.codegen.triton.digest import digest_in_background
    from fusion_advisor.runtime.gc_pause import collector_paused

    with collector_paused():  # while hundreds of modules are loaded, it would walk all that torch has made
        if any(Path(run_dir).glob("kernels/*.py")):  # of Triton
            digest_in_background()
        from fusion_advisor.fuse.live import saved_plan

    return saved_plan.load_plan(run_dir)


def load_report(run: str | Path) -> NotebookReport:
    """Read the report of an earlier run; no torch is imported and no device is needed.

    Args:
        run: a run directory, or its ``report.json``.

    Raises:
        UnreadableReport: the file is missing, truncated or not one of ours.
    """
    from pathlib import Path

    from fusion_advisor.records.serialize import read_report
    from fusion_advisor.report.html.notebook import for_notebook

    path = Path(run)
    return for_notebook(read_report(path / "report.json" if path.is_dir() else path))


def _named(verb: str, loaded: LoadedWorkload, options: OptionsT) -> OptionsT:
    """Give a run without an id the id that the command line would give it."""
    from dataclasses import replace

    from fusion_advisor.cli.common.run_dir import config_hash, new_run_id

    if options.run_id:
        return options
    digest = config_hash(verb, loaded.request, options, loaded.record.revision)
    return replace(options, run_id=new_run_id(digest), config_hash=digest)


def _call(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):  # a tokenizer's BatchEncoding is one, and no dict
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}
