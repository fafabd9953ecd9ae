"""``fusion-advisor report [RUN]``: the views of a report again, with no device and no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fusion_advisor.cli.common import options, run_dir
from fusion_advisor.cli.common.console import open_page, warn, write_result
from fusion_advisor.errors import CannotWrite, UsageError


def report(
    context: typer.Context,
    *,
    run: run_dir.RunArg = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="DIR", help="Instead of the run's directory.")] = None,
    formats: options.FormatOpt = None,
    embed_trace: options.EmbedTraceOpt = False,
    as_json: options.JsonOpt = False,
    md_limit: Annotated[int, typer.Option("--md-limit", min=1000, help="Most characters of the markdown.")] = 60_000,
    top_kernels: Annotated[int, typer.Option("--top-kernels", min=1, help="Most rows of the HTML's kernel table.")] = 500,
    redact: Annotated[
        list[str] | None,
        typer.Option("--redact", metavar="LIST", help="Leave out paths, source, env; repeat or comma. Needs -o."),
    ] = None,
    no_source: Annotated[bool, typer.Option("--no-source", help="The same as --redact source.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print report.json's JSON Schema instead.")] = False,
    open_html: options.OpenOpt = False,
    quiet: options.QuietOpt = False,
    verbose: options.VerboseOpt = 0,
    color: options.ColorOpt = options.Color.AUTO,
    _config: options.ConfigOpt = None,
    show_config: options.ShowConfigOpt = False,
) -> None:
    """Show a run's result, and write its HTML and markdown again from report.json."""
    settings = options.apply_output(context, quiet=quiet, verbose=verbose, color=color, show_config=show_config)
    from fusion_advisor.records.json_schema import json_schema
    from fusion_advisor.records.serialize import dump_report, read_report

    if schema:
        write_result(json.dumps(json_schema(), indent=1) + "\n")
        return
    directory = run_dir.resolve(run)
    named = Path(run) if run else directory
    path = named if named.is_file() else directory / "report.json"
    shown = read_report(path)
    wanted = run_dir.parse_formats(formats, embed_trace=embed_trace)
    target = output or directory
    hidden = _hidden(redact, no_source=no_source)
    if hidden:
        from fusion_advisor.report import redact as redacting

        if target.resolve() == path.parent.resolve():
            detail = f"--redact {','.join(hidden)} would write a copy next to {path}, which is not redacted"
            raise UsageError(detail=detail, help="pass -o DIR, a folder for the copy")
        if embed_trace:
            detail = "a trace contains names of modules, files and the machine, and --redact does not change traces"
            raise UsageError(detail=detail, help="leave out --embed-trace, or --redact")
        shown = redacting.redact(shown, hidden)
    if target.exists() and not target.is_dir():
        raise UsageError(detail=f"--output {target} is a file", help="pass a directory")
    traces = run_dir.traces_of(shown, path.parent, embed_trace=embed_trace)
    written = run_dir.write_views(shown, target, wanted, md_limit=md_limit, top_kernels=top_kernels, traces=traces)
    for sentence in run_dir.trace_warnings(traces, target):
        warn(settings, sentence)
    if "json" in wanted and target.resolve() != path.parent.resolve():
        from fusion_advisor.records.serialize import write_report

        try:
            write_report(shown, target / "report.json")
        except OSError as error:
            raise CannotWrite(path=target, detail=error.strerror or str(error)) from error
        written.append(target / "report.json")
    if open_html:
        open_page(settings, target / "report.html")
    if as_json:
        write_result(dump_report(shown))
        return
    from fusion_advisor.report.terminal.layout import plain
    from fusion_advisor.report.terminal.result import details, result_table, summary_line

    console = settings.out()
    if quiet:
        write_result(plain(summary_line(shown), console) + "\n")
        return
    with console.capture() as captured:
        console.print(result_table(shown, console))
        if verbose:
            console.print(details(shown, console, with_source=verbose > 1))
    write_result(captured.get() + "".join(f"wrote: {path}\n" for path in written))


def _hidden(redact: list[str] | None, *, no_source: bool) -> tuple[str, ...]:
    """Return the parts to leave out."""
    from fusion_advisor.report.redact import PARTS

    asked = [part.strip() for value in redact or () for part in value.split(",") if part.strip()]
    asked += ["source"] if no_source else []
    for part in asked:
        if part not in PARTS:
            raise UsageError(detail=f"--redact {part} is not known", help=f"use {', '.join(PARTS[:-1])} or {PARTS[-1]}")
    return tuple(part for part in PARTS if part in asked)
