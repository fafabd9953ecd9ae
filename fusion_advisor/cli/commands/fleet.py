"""``fusion-advisor fleet 'traces/**/*.json.gz'``: ranks the chains of many traces, on this machine's cores or on Ray."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fusion_advisor.cli.common import core, options
from fusion_advisor.cli.common.console import open_page, write_result
from fusion_advisor.cli.common.progress import TerminalProgress
from fusion_advisor.content import tool_version
from fusion_advisor.errors import CannotWrite, UnreadableTrace, UsageError

if TYPE_CHECKING:
    from fusion_advisor.fleet.run import State
    from fusion_advisor.records.trace import FleetReport

FLEET_SCHEMA = "fusion-advisor-fleet/1"


class Engine(enum.StrEnum):
    """What reads the traces."""

    LOCAL = "local"
    RAY = "ray"


def fleet(
    context: typer.Context,
    *,
    patterns: Annotated[
        list[str],
        typer.Argument(metavar="PATTERN...", help="Traces, quoted: 'traces/**/*.json.gz', 's3://bucket/**/*.json.gz' …"),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="DIR", help="Reports, and one Parquet part for each trace.")
    ] = Path("fleet"),
    engine: Annotated[Engine, typer.Option("--engine", help="This machine's cores, or a Ray cluster.")] = Engine.LOCAL,
    address: Annotated[
        str | None, typer.Option("--address", help="Of a running Ray cluster; one is started when left out.")
    ] = None,
    processes: Annotated[int, typer.Option("--processes", metavar="N", min=0, help="0: one for each core (local).")] = 0,
    weights: Annotated[
        Path | None, typer.Option("--weights", metavar="CSV", help="Columns job, gpu_hours and, if you like, model.")
    ] = None,
    job: Annotated[
        str | None, typer.Option("--job", metavar="REGEX", help="Finds the job in a trace's path: 'runs/([^/]+)/'.")
    ] = None,
    min_share: options.MinShareOpt = "0.1%",
    top: options.TopOpt = 20,
    kernels: options.KernelsOpt = None,
    as_json: Annotated[bool, typer.Option("--json", help="The ranking as JSON on stdout, nothing else.")] = False,
    open_html: options.OpenOpt = False,
    quiet: options.QuietOpt = False,
    verbose: options.VerboseOpt = 0,
    color: options.ColorOpt = options.Color.AUTO,
    _config: options.ConfigOpt = None,
    show_config: options.ShowConfigOpt = False,
) -> None:
    """Rank chains over many traces by GPU-hours. Needs no GPU; reads each trace once, whatever happens in between."""
    settings = options.apply_output(context, quiet=quiet, verbose=verbose, color=color, show_config=show_config)
    if address and engine is not Engine.RAY:
        raise UsageError(detail="--address is the address of a Ray cluster", help="add --engine ray, or leave --address out")
    if processes and engine is Engine.RAY:
        raise UsageError(
            detail=f"--processes {processes} is of --engine local; Ray has a worker for each core", help="leave one of them out"
        )
    with TerminalProgress(settings) as progress:
        report = core.run_fleet(
            _said_to(progress),
            patterns=tuple(patterns),
            output=output,
            engine=engine.value,
            address=address or "",
            processes=processes,
            weights=weights,
            job_pattern=job or "",
            min_share=options.parse_share("--min-share", min_share),
            top=top,
            kernel_dirs=options.kernel_dirs(kernels),
            tool=tool_version(),
        )
    written = _write(report, output)
    if open_html:
        open_page(settings, output / "fleet.html")
    from fusion_advisor.records.serialize import dump_record

    if as_json:
        write_result(dump_record(report, FLEET_SCHEMA))
    else:
        from fusion_advisor.report.fleet.view import headline, prove_lines
        from fusion_advisor.report.terminal.fleet import fleet_table
        from fusion_advisor.report.terminal.layout import plain

        console = settings.out()
        if settings.is_quiet:
            write_result(plain(headline(report), console) + "\n")
        else:
            with console.capture() as captured:
                console.print(fleet_table(report, console))
            following = prove_lines(report.chains[0])[:1] if report.chains else ()
            lines = [*(f"wrote: {path}" for path in written), *(f"next: {line}" for line in following)]
            write_result(captured.get() + "".join(f"{line}\n" for line in lines))
    if not report.traces:
        raise UnreadableTrace(name=", ".join(patterns), detail="not one of the files could be ranked", known="")


def _said_to(progress: TerminalProgress) -> object:
    """Show the state of the run: traces done, MB of JSON each second, time left, failures."""
    import time

    started = time.monotonic()
    progress.phase("read")

    def say(state: State) -> None:
        rate = state.json_bytes / 1e6 / max(time.monotonic() - started, 1e-9)
        failed = f", {state.failed:,} failed" if state.failed else ""
        progress.step(state.done, state.traces, f"{rate:,.0f} MB/s of JSON{failed}")
        per_core = state.json_bytes / 1e6 / max(state.cpu_ns / 1e9, 1e-9)
        read = f"{state.json_bytes / 1e6:,.0f} MB of JSON, {per_core:,.0f} MB/s for each core"
        progress.note(f"{state.done:,} traces, {read}, workers up to {state.peak_bytes / 1e6:,.0f} MB{failed}")

    return say


def _write(report: FleetReport, directory: Path) -> list[Path]:
    from fusion_advisor.records.serialize import dump_record, write_atomic
    from fusion_advisor.report.html.other_pages import render_fleet_html, render_fleet_markdown

    texts = {
        "fleet.json": dump_record(report, FLEET_SCHEMA),
        "fleet.md": render_fleet_markdown(report),
        "fleet.html": render_fleet_html(report),
    }
    written = []
    for name, text in texts.items():
        try:
            write_atomic(directory / name, text)
        except OSError as error:
            raise CannotWrite(path=directory / name, detail=error.strerror or str(error)) from error
        written.append(directory / name)
    return written
