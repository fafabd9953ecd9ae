"""Runs ``profile`` and ``apply`` on one rank of several, and puts all ranks into one report."""

from __future__ import annotations

import functools
import importlib.metadata
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch

from fusion_advisor.autotune.select_gemm import choose
from fusion_advisor.content import tool_version
from fusion_advisor.errors import UsageError
from fusion_advisor.fuse.decide.instruments import MEASURED, Instruments
from fusion_advisor.fuse.finish import AppliedRun
from fusion_advisor.fuse.pipeline import apply_workload, profile_workload
from fusion_advisor.fuse.plan.options import ApplyOptions, ProfileOptions
from fusion_advisor.fuse.plan.progress import Progress
from fusion_advisor.fuse.stages.linear_kernels import linear_kernels
from fusion_advisor.ranks.graphs import with_graphs
from fusion_advisor.ranks.group import Ranks
from fusion_advisor.ranks.instruments import agreed_choice, instruments_of, last_stage
from fusion_advisor.ranks.recording import records_together
from fusion_advisor.ranks.shard import plan_of, shard
from fusion_advisor.ranks.split import rank_times, told_of
from fusion_advisor.records import Capture, RankRun, RankTime, Report, Status
from fusion_advisor.records.serialize import encode
from fusion_advisor.runtime.call_tensors import tensors_in
from fusion_advisor.workload.inputs import input_metas, make_inputs
from fusion_advisor.workload.load import LoadedWorkload
from fusion_advisor.workload.weight_packing import lay_out_weights

_LEFT_OUT = "left out"
PHASES = ("forward", "prefill", "decode")
"""Steps that run on several ranks: training draws its gradients through collectives, and generate is many steps."""


def check_start(ranks: Ranks, request: Any) -> None:
    """Refuse ranks that were not started alike, before any model is loaded.

    Args:
        ranks: of the run.
        request: of this rank.

    Raises:
        RanksDiffer: other versions or another request.
        UsageError: a phase that does not run on several ranks.
    """
    if request.phase not in PHASES:
        raise UsageError(
            detail=f"--phase {request.phase} does not run on several ranks", help=f"use --phase {' or '.join(PHASES)}"
        )
    names = ("torch", "transformers", "triton")
    versions = [f"fusion-advisor {tool_version()}", *(f"{name} {_version(name)}" for name in names)]
    ranks.agree("versions", ", ".join(versions))
    ranks.agree("the request", json.dumps(asdict(request), sort_keys=True))


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "-"


def placed(loaded: LoadedWorkload, ranks: Ranks) -> LoadedWorkload:
    """Split a loaded model where ``--tp`` asks for it, and see that all ranks hold the same model and inputs.

    Args:
        loaded: whole on each rank.
        ranks: of the run.

    Raises:
        RanksDiffer: another model or other inputs.
        UnsupportedPlan: the model cannot be split.
    """
    ranks.agree("inputs", _digest(loaded))
    ranks.agree("weights", _sample(loaded.model))
    model_id = loaded.record.model_id
    if loaded.request.tp is not None:
        plan = plan_of(loaded.model, model_id, ranks.world_size)
        shard(loaded.model, plan, ranks.rank, ranks.world_size, ranks.group_name, model_id=model_id)
        lay_out_weights(loaded.model)
        if loaded.record.device != "cpu":
            torch.cuda.empty_cache()
        if loaded.request.phase == "decode":
            loaded = _with_own_cache(loaded)
    shapes = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in loaded.model.state_dict().items()]
    ranks.agree("the model", "\n".join(shapes))
    parameters = list(loaded.model.parameters())
    record = replace(
        loaded.record,
        inputs=input_metas(loaded.model, loaded.args, loaded.kwargs),
        parameter_bytes=sum(one.numel() * one.element_size() for one in parameters),
        parameter_count=sum(one.numel() for one in parameters),
    )
    return replace(loaded, record=record)


def _with_own_cache(loaded: LoadedWorkload) -> LoadedWorkload:
    """Fill a cache by the split model: it holds the heads of this rank alone."""
    model = loaded.model
    parameter = next(model.parameters())
    made = make_inputs(model, loaded.request, device=parameter.device, dtype=parameter.dtype)
    return replace(loaded, args=made.args, kwargs=made.kwargs)


def _sample(model: torch.nn.Module) -> str:
    """Return sums of the first values of each weight: ranks that drew or read other weights differ in them."""
    return "".join(repr(one.detach().flatten()[:64].double().sum().item()) for one in model.parameters())


def _digest(loaded: LoadedWorkload) -> str:
    """Return the inputs' names, layouts and, with a split model, values: replicas may be fed each its own."""
    metas = input_metas(loaded.model, loaded.args, loaded.kwargs)
    text = json.dumps([[name, meta.shape, meta.dtype] for name, meta in metas])
    if loaded.request.tp is None:
        return text
    values = [*loaded.args, *loaded.kwargs.values()]
    return text + "".join(repr(tensor.detach().double().sum().item()) for value in values for _, tensor in tensors_in("", value))


class _Watched(Progress):
    """Shows progress on rank 0, and tells the watchdog of each rank that it goes on."""

    def __init__(self, shown: Progress, ranks: Ranks) -> None:
        self._shown = shown
        self._ranks = ranks

    def phase(self, name: str) -> None:
        """A phase begins."""
        self._ranks.watchdog.reached(name)
        self._shown.phase(name)

    def note(self, text: str) -> None:
        """What the phase found."""
        self._shown.note(text)

    def step(self, done: int, total: int, text: str) -> None:
        """How far the phase has come."""
        self._ranks.watchdog.reached(text)
        self._shown.step(done, total, text)

    def found(self, text: str) -> None:
        """A gain that stays."""
        self._shown.found(text)

    def warn(self, text: str) -> None:
        """Something the user should know."""
        self._shown.warn(text)


def profile_on_ranks(ranks: Ranks, loaded: LoadedWorkload, options: ProfileOptions, progress: Progress) -> tuple[Report, Capture]:
    """Profile this rank's step; the report has a row for each rank.

    Args:
        ranks: of the run.
        loaded: from :func:`placed`.
        options: how to measure.
        progress: of this rank.
    """
    own: list[Capture] = []
    instruments = instruments_of(ranks, on_cuda=loaded.record.device != "cpu", on_capture=own.append)
    report, capture = profile_workload(loaded, options, _Watched(progress, ranks), instruments=instruments)
    return with_ranks(report, ranks, own[-1]), capture


def apply_on_ranks(
    ranks: Ranks,
    loaded: LoadedWorkload,
    options: ApplyOptions,
    progress: Progress,
    on_report: Callable[[Report], None],
    *,
    measured: Instruments = MEASURED,
) -> AppliedRun:
    """Apply what pays on the slowest rank to all ranks' models; the report has a row for each rank.

    Nothing is put into any model unless all ranks would put in the same.

    Args:
        ranks: of the run.
        loaded: from :func:`placed`.
        options: how to measure and decide. A CUDA graph is recorded where the GPUs talk through NCCL. Nothing is remembered.
        progress: of this rank.
        on_report: given the report so far.
        measured: what this rank measures by itself; all ranks decide by the same of it.
    """
    own: list[Capture] = []
    options = replace(options, graph=options.graph and records_together(), remembers=False)
    on_cuda = loaded.record.device != "cpu"
    instruments = instruments_of(ranks, on_cuda=on_cuda, on_capture=own.append, measured=measured)
    agreed_kernels = functools.partial(linear_kernels, choose=functools.partial(agreed_choice, ranks, choose))

    def told(report: Report) -> None:
        ranks.agree_entries("the plan", plan_entries(report))
        on_report(report)

    applied = apply_workload(
        loaded, options, _Watched(progress, ranks), told, instruments=instruments,
        last=with_graphs(last_stage(ranks, instruments), ranks, instruments.timer), linear_kernels=agreed_kernels,
    )  # fmt: skip
    try:
        ranks.agree_entries("the plan", plan_entries(applied.report))
        applied.report = with_ranks(applied.report, ranks, own[-1])
    except BaseException:
        applied.revert()
        raise
    return applied


def plan_entries(report: Report) -> dict[str, str]:
    """Return what a run puts into a model, by name: rewrites, kernels' sources, launch parameters.

    Why a rewrite is left out is no part of it: a kernel may fail to build on one rank and give wrong numbers on another.
    """
    found: dict[str, str] = {}
    for fusion in report.fusions:
        name = f"{fusion.id} {fusion.kernel}"
        found[name] = _place_of(fusion.status)
        for number, kernel in enumerate(fusion.rendered if found[name] != _LEFT_OUT else (), start=1):
            which = f"{name}, kernel {number}"
            found[which] = f"{kernel.name} in {kernel.backend}"
            found[f"launch parameters of {which}"] = json.dumps(encode(kernel.parameters))
            found[f"source of {which}"] = kernel.source
    for rewrite in report.rewrites:
        found[rewrite.id] = f"{_place_of(rewrite.status)}, {rewrite.sites} sites"
    return found


def _place_of(status: Status) -> str:
    return status.value if status in (Status.PLANNED, Status.KEPT, Status.ABSORBED) else _LEFT_OUT


def with_ranks(report: Report, ranks: Ranks, own: Capture) -> Report:
    """Add a row for each rank to a report.

    Args:
        report: of this rank.
        ranks: of the run.
        own: this rank's capture, with its own times.
    """
    rows: tuple[RankTime, ...] = rank_times(ranks.gather("times of the ranks", told_of(own)))
    way = "replicas" if loaded_whole(own) else "tensor parallel"
    return replace(report, ranks=RankRun(way=way, rows=rows))


def loaded_whole(capture: Capture) -> bool:
    """Whether a captured step has no op between ranks: each holds the whole model."""
    return not any(op.op_class == "collective" for op in capture.ops)
