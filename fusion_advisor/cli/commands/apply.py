"""``fusion-advisor apply [MODEL_ID|RUN]``: render, build, check and time every rewrite; keep what pays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from fusion_advisor.cli.common import completion, core, options, ranks, run_dir, size_options
from fusion_advisor.errors import UsageError

_PARAMETERS = {"context": "context_tokens", "input": "example_input"}
"""Workload fields whose parameter has another name here."""
_ALLOWED_WITH_RUN = ("trust_remote_code", "offline")


def apply(
    context: typer.Context,
    *,
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL_ID|RUN]",
            help="A model, or a run to repeat; the latest run when left out.",
            autocompletion=completion.models_and_runs,
        ),
    ] = None,
    revision: options.RevisionOpt = None,
    dtype: options.DtypeOpt = None,
    device: options.DeviceOpt = None,
    batch: options.BatchOpt = None,
    seq_len: options.SeqLenOpt = None,
    example_input: options.InputOpt = None,
    phase: options.PhaseOpt = None,
    shapes: size_options.ShapesOpt = None,
    points: size_options.PointsOpt = None,
    context_tokens: options.ContextOpt = None,
    new_tokens: options.NewTokensOpt = None,
    layers: options.LayersOpt = None,
    seed: options.SeedOpt = None,
    weights: options.WeightsOpt = None,
    trust_remote_code: options.TrustOpt = False,
    offline: options.OfflineOpt = False,
    tp: ranks.TpOpt = None,
    warmup: options.WarmupOpt = 10,
    runs: options.RunsOpt = 50,
    min_time: options.MinTimeOpt = "0s",
    steps: options.StepsOpt = 3,
    nvtx: options.NvtxOpt = False,
    min_share: options.MinShareOpt = "0.1%",
    top: options.TopOpt = 40,
    only: options.OnlyOpt = None,
    skip: options.SkipOpt = None,
    kernels: options.KernelsOpt = None,
    backend: options.BackendOpt = None,
    fast_math: options.FastMathOpt = False,
    keep: options.KeepOpt = options.Keep.PAYING,
    exact: options.ExactOpt = False,
    min_gain: options.MinGainOpt = "0.5%",
    confidence: options.ConfidenceOpt = 0.95,
    rtol: options.RtolOpt = None,
    atol: options.AtolOpt = None,
    strict: options.StrictOpt = False,
    dry_run: options.DryRunOpt = False,
    graph: options.GraphOpt = True,
    compile_too: options.CompileOpt = None,
    baseline: options.BaselineOpt = options.Against.EAGER,
    compile_limit: options.CompileLimitOpt = None,
    max_autotune: options.MaxAutotuneOpt = False,
    freeze: options.FreezeOpt = False,
    drop_logits: options.DropLogitsOpt = False,
    memory_budget: options.MemoryBudgetOpt = 1.0,
    fresh: options.FreshOpt = False,
    is_quick: options.EffortOpt = None,
    fail_on: options.FailOnOpt = None,
    absolute: options.AbsoluteOpt = False,
    output: options.OutputOpt = None,
    formats: options.FormatOpt = None,
    embed_trace: options.EmbedTraceOpt = False,
    as_json: options.JsonOpt = False,
    force: options.ForceOpt = False,
    open_html: options.OpenOpt = False,
    progress: options.ProgressOpt = options.Bar.AUTO,
    quiet: options.QuietOpt = False,
    verbose: options.VerboseOpt = 0,
    color: options.ColorOpt = options.Color.AUTO,
    _config: options.ConfigOpt = None,
    show_config: options.ShowConfigOpt = False,
) -> None:
    """Put fused kernels into a model, check its numbers, and keep what measurably pays."""
    settings = options.apply_output(
        context, quiet=quiet, verbose=verbose, color=color, progress=progress, show_config=show_config
    )
    from fusion_advisor.cli.common import runner
    from fusion_advisor.fuse.plan.options import ApplyOptions
    from fusion_advisor.report.compare.gate_rules import parse_rules

    chosen = ApplyOptions(
        warmup=warmup,
        runs=runs,
        min_time_s=options.parse_seconds("--min-time", min_time),
        steps=steps,
        min_share=options.parse_share("--min-share", min_share),
        top=top,
        only=tuple(only or ()),
        skip=tuple(skip or ()),
        kernel_dirs=options.kernel_dirs(kernels),
        backend=backend.value if backend else None,
        fast_math=fast_math,
        exact=exact,
        nvtx=nvtx,
        keep=keep.value,
        min_gain=options.parse_share("--min-gain", min_gain),
        confidence=confidence,
        rtol=rtol,
        atol=atol,
        strict=strict,
        dry_run=dry_run,
        graph=graph,
        compile=compile_too,
        baseline=baseline.value,
        compile_limit_s=None if compile_limit is None else options.parse_seconds("--compile-limit", compile_limit),
        max_autotune=max_autotune,
        freeze=freeze,
        effort="usual" if is_quick is None else "quick" if is_quick else "thorough",
        remembers=not fresh,
    )
    shown = runner.output_of(output, formats, embed_trace=embed_trace, as_json=as_json, force=force, is_opened=open_html)
    asked = core.workload_fields(
        revision=revision,
        dtype=dtype,
        device=device,
        batch=batch,
        seq_len=seq_len,
        input=example_input,
        phase=phase,
        context=context_tokens,
        new_tokens=new_tokens,
        layers=layers,
        seed=seed,
        weights=weights,
        trust_remote_code=trust_remote_code,
        offline=offline,
        tp=tp,
    )
    request = _request(context, target, asked)
    ranges, at = size_options.read_sizes(shapes, points, phase=request.phase, is_dry=dry_run)
    chosen = replace(chosen, shapes=ranges, shape_points=at, memory_budget=memory_budget, drop_logits=drop_logits)
    runner.run_apply(settings, request, chosen, shown, parse_rules(fail_on or (), absolute=absolute))


def _is_typed(context: typer.Context, parameter: str) -> bool:
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"


def _request(context: typer.Context, target: str | None, asked: dict[str, object]) -> Any:
    """Return what to run; a run that is repeated keeps its own model and shapes whatever the configuration says."""
    if target is not None and not run_dir.is_run(target):
        return core.make_request(model_id=target, **asked)
    directory = run_dir.resolve(target)
    typed = (name for name in asked if _is_typed(context, _PARAMETERS.get(name, name)))
    clash = [name for name in typed if name not in _ALLOWED_WITH_RUN]
    if clash:
        option = "--" + clash[0].replace("_", "-")
        raise UsageError(
            detail=f"{option} contradicts the run `{directory.name}`, whose model and shapes are used again",
            help="name the model instead of the run, with the options you want",
        )
    request = core.stored_request(Path(directory))
    # a file must not be able to switch this on: whoever runs the command decides again
    return replace(
        request, trust_remote_code=bool(asked.get("trust_remote_code")), offline=bool(asked.get("offline", request.offline))
    )
