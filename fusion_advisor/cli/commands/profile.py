"""``fusion-advisor profile MODEL_ID | --trace FILE``: where device time goes, and which chains could be one kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fusion_advisor.cli.commands import trace
from fusion_advisor.cli.common import completion, core, options, ranks


def profile(
    context: typer.Context,
    *,
    model_id: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_ID",
            help="Hub id, local directory, module:factory or file.py:factory.",
            autocompletion=completion.models,
        ),
    ] = "",
    trace_file: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="PATH",
            help="Instead of a model: a torch.profiler trace, .json or .json.gz; or a folder with one of each rank.",
        ),
    ] = None,
    revision: options.RevisionOpt = None,
    dtype: options.DtypeOpt = None,
    device: options.DeviceOpt = None,
    batch: options.BatchOpt = None,
    seq_len: options.SeqLenOpt = None,
    example_input: options.InputOpt = None,
    phase: options.PhaseOpt = None,
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
    top: options.TopOpt = 20,
    only: options.OnlyOpt = None,
    skip: options.SkipOpt = None,
    kernels: options.KernelsOpt = None,
    backend: options.BackendOpt = None,
    fast_math: options.FastMathOpt = False,
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
    """Run a model, rank its op chains by their share of device time, and name a kernel for each."""
    settings = options.apply_output(
        context, quiet=quiet, verbose=verbose, color=color, progress=progress, show_config=show_config
    )
    trace.check_usage(context, model_id, trace_file)
    if trace_file is not None:
        share, dirs = options.parse_share("--min-share", min_share), options.kernel_dirs(kernels)
        trace.run_trace(settings, trace_file, min_share=share, top=top, kernel_dirs=dirs, as_json=as_json)
        return
    from fusion_advisor.cli.common import runner
    from fusion_advisor.fuse.plan.options import ProfileOptions

    chosen = ProfileOptions(
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
        nvtx=nvtx,
    )
    target = runner.output_of(output, formats, embed_trace=embed_trace, as_json=as_json, force=force, is_opened=open_html)
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
    runner.run_profile(settings, core.make_request(model_id=model_id, **asked), chosen, target)
