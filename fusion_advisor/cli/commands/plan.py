"""``fusion-advisor plan RUN``: prints what ``apply`` would try on a captured step, without model or device."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from fusion_advisor.cli.common import completion, core, options, run_dir
from fusion_advisor.cli.common.console import warn, write_result
from fusion_advisor.cli.common.progress import TerminalProgress
from fusion_advisor.errors import NoCapture, UsageError

CAPTURE = "capture.json.gz"


def plan(
    context: typer.Context,
    *,
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            help="A path, a run id, a unique prefix or @last, or a capture.json.gz; the latest run when left out.",
            autocompletion=completion.runs,
        ),
    ] = None,
    min_share: options.MinShareOpt = "0.1%",
    top: options.TopOpt = 40,
    only: options.OnlyOpt = None,
    skip: options.SkipOpt = None,
    kernels: options.KernelsOpt = None,
    exact: Annotated[bool, typer.Option("--exact", help="Plan kernels that round each op's result as eager does.")] = False,
    formats: Annotated[str, typer.Option("--format", metavar="FORMAT", help="text or md, on stdout.")] = "text",
    as_json: Annotated[bool, typer.Option("--json", help="The plan as JSON on stdout, nothing else.")] = False,
    quiet: options.QuietOpt = False,
    verbose: options.VerboseOpt = 0,
    color: options.ColorOpt = options.Color.AUTO,
    _config: options.ConfigOpt = None,
    show_config: options.ShowConfigOpt = False,
) -> None:
    """Print what apply would try on a captured step: chains, kernels, and the most that each can save. Needs no GPU."""
    settings = options.apply_output(context, quiet=quiet, verbose=verbose, color=color, show_config=show_config)
    if formats not in ("text", "md"):
        raise UsageError(detail=f"--format {formats} is not known", help="use text or md, or --json")
    path = capture_of(run)
    from fusion_advisor.fuse.plan.options import ProfileOptions

    chosen = ProfileOptions(
        min_share=options.parse_share("--min-share", min_share),
        top=top,
        only=tuple(only or ()),
        skip=tuple(skip or ()),
        kernel_dirs=options.kernel_dirs(kernels),
        exact=exact,
    )
    with TerminalProgress(settings) as progress:
        progress.phase("plan")
        shown = core.plan_capture(path, chosen)
    from fusion_advisor.records.serialize import PLAN_SCHEMA, dump_record
    from fusion_advisor.report import plan_view

    if as_json:
        write_result(dump_record(shown, PLAN_SCHEMA))
    elif formats == "md":
        write_result(plan_view.render_plan_markdown(shown))
    else:
        from fusion_advisor.report.terminal.layout import plain
        from fusion_advisor.report.terminal.plan import plan_table

        console = settings.out()
        if settings.is_quiet:
            write_result(plain(plan_view.summary(shown), console) + "\n")
            for sentence in plan_view.warnings(shown):
                warn(settings, sentence)
            return
        with console.capture() as captured:
            console.print(plan_table(shown, console))
        next_command = shlex.join(["fusion-advisor", "apply", str(path.parent)])
        is_run = (path.parent / "request.json").is_file()
        write_result(captured.get() + (f"next: {next_command}\n" if is_run else ""))


def capture_of(run: str | None) -> Path:
    """Return the capture that a user named, by itself or by its run.

    Raises:
        NoCapture: The run has none.
        UnknownRun: There is no such run.
    """
    named = Path(run) if run else None
    if named is not None and named.is_file() and named.name != "report.json":
        return named
    if named is not None and (named / CAPTURE).is_file():
        return named / CAPTURE
    path = run_dir.resolve(run) / CAPTURE
    if not path.is_file():
        raise NoCapture(path=path)
    return path
