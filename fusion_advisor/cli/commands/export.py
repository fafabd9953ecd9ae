"""``fusion-advisor export RUN --to DIR``: the kept kernels for programs that have torch and not fusion_advisor."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from fusion_advisor.cli.common import core, options, run_dir
from fusion_advisor.cli.common.console import warn, write_result
from fusion_advisor.cli.common.progress import TerminalProgress
from fusion_advisor.errors import UsageError
from fusion_advisor.export.formats.names import FORMATS, PACKAGE, PT2, known_format
from fusion_advisor.files.whole_folder import refuse_existing

_FORMATS = "; ".join(f"{name}: {what}" for name, what in FORMATS.items())


def export(
    context: typer.Context,
    *,
    run: run_dir.RunArg = None,
    to: Annotated[Path | None, typer.Option("--to", metavar="DIR", help="Folder to write; a package is named after it.")] = None,
    form: Annotated[str, typer.Option("--format", metavar="FORMAT", help=f"{_FORMATS}.")] = PACKAGE,
    force: Annotated[bool, typer.Option("--force", help="Replace a folder that is there.")] = False,
    with_cache: Annotated[
        bool, typer.Option("--with-cache", help="Ship the compiled kernels too: a machine like this one compiles nothing.")
    ] = False,
    within: Annotated[
        float | None,
        typer.Option("--within", metavar="SECONDS", min=1, help="Give up then, and say in which stage. [default: no limit]"),
    ] = None,
    trust_remote_code: options.TrustOpt = False,
    quiet: options.QuietOpt = False,
    verbose: options.VerboseOpt = 0,
    color: options.ColorOpt = options.Color.AUTO,
    progress: options.ProgressOpt = options.Bar.AUTO,
    _config: options.ConfigOpt = None,
    show_config: options.ShowConfigOpt = False,
) -> None:
    """Write what a run kept for programs without fusion-advisor: a package with kernels and forward, or another format."""
    settings = options.apply_output(
        context, quiet=quiet, verbose=verbose, color=color, progress=progress, show_config=show_config
    )
    known_format(form, with_cache=with_cache)
    if to is None:
        raise UsageError(detail="--to is missing", help="name the folder to write: --to gpt2_fused")
    refuse_existing(to, force=force)
    directory = run_dir.resolve(run)
    with TerminalProgress(settings) as shown:
        shown.phase("load the model")
        wanted: dict[str, Any] = {"form": form, "with_cache": with_cache, "within_s": within, "progress": shown}
        left_out = core.export_run(directory, to, force=force, trust_remote_code=trust_remote_code, **wanted)
    for sentence in left_out:
        warn(settings, f"not in the {form}: {sentence}")
    check = ["python", str(to / "run.py")] if form == PT2 else ["pytest", str(to / "tests")]
    write_result(f"wrote: {to}\n" + ("" if quiet else f"next: {shlex.join(check)}\n"))
