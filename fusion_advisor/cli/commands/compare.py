"""``fusion-advisor compare A B``: compares two runs, with gates for a pull request."""

from __future__ import annotations

import contextlib
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fusion_advisor.cli.common import completion, options
from fusion_advisor.cli.common.console import Settings, open_page, write_result
from fusion_advisor.errors import CannotWrite, NoSuchState, UnknownRun, UsageError

if TYPE_CHECKING:
    from fusion_advisor.records import Report
    from fusion_advisor.report.compare.comparison import Comparison, State

_STATES: tuple[State, ...] = ("eager", "applied", "compile")
_RUN_HELP = "A path, a run id, a unique prefix or @last; RUN:eager, RUN:applied or RUN:compile names one of its steps."


def compare(
    context: typer.Context,
    *,
    a: Annotated[str, typer.Argument(metavar="A", help=_RUN_HELP, autocompletion=completion.runs)],
    b: Annotated[
        str,
        typer.Argument(
            metavar="B",
            help="As A. The same run twice compares its eager and its rewritten step.",
            autocompletion=completion.runs,
        ),
    ],
    fail_on: options.FailOnOpt = None,
    absolute: options.AbsoluteOpt = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="DIR", help="Where --format writes; B's directory when left out.")
    ] = None,
    formats: Annotated[
        list[str] | None, typer.Option("--format", metavar="LIST", help="Also write compare.html, .md, .json; repeat or comma.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The comparison as JSON on stdout, nothing else.")] = False,
    open_html: options.OpenOpt = False,
    quiet: options.QuietOpt = False,
    verbose: options.VerboseOpt = 0,
    color: options.ColorOpt = options.Color.AUTO,
    _config: options.ConfigOpt = None,
    show_config: options.ShowConfigOpt = False,
) -> None:
    """Compare two runs; exit 10 if a --fail-on limit is exceeded."""
    settings = options.apply_output(context, quiet=quiet, verbose=verbose, color=color, show_config=show_config)
    from fusion_advisor.cli.common import gates, run_dir
    from fusion_advisor.report.compare import comparison as comparing
    from fusion_advisor.report.compare import gate_rules

    rules = gate_rules.parse_rules(fail_on or (), absolute=absolute)
    wanted = run_dir.parse_formats(formats, extra=()) if formats else ()
    (a_report, a_state, _), (b_report, b_state, b_directory) = (_read(name) for name in (a, b))
    if a_state is None and b_state is None and a_report == b_report and a_report.after is not None:
        a_state = "eager"
    a_state, b_state = a_state or comparing.default_state(a_report), b_state or comparing.default_state(b_report)
    for report, state, name in ((a_report, a_state, a), (b_report, b_state, b)):
        if comparing.state_step(report, state) is None:
            raise NoSuchState(run=name.removesuffix(f":{state}"), state=state, why=_why_not(state))
    shown = gate_rules.judge(rules, comparing.compare(a_report, b_report, a_state, b_state))
    written = _write(shown, wanted, output or b_directory)
    if "md" in wanted:
        from fusion_advisor.report.html.other_pages import render_compare_markdown

        run_dir.append_step_summary(render_compare_markdown(shown))
    if open_html:
        open_page(settings, (output or b_directory) / "compare.html")
    command = ["fusion-advisor", "compare", a, b, *gates.words(rules, absolute=absolute)]
    hint = "" if rules or shown.obstacles else shlex.join([*command, "--fail-on", "regression>2%"])
    _print(settings, shown, written, hint, as_json=as_json)
    gates.end(shown.gates, shlex.join(command))


def _read(name: str) -> tuple[Report, State | None, Path]:
    """Return a run's report, the state asked for by a suffix, and its directory."""
    from fusion_advisor.cli.common import run_dir
    from fusion_advisor.records.serialize import read_report

    base, _, suffix = name.rpartition(":")
    state = next((known for known in _STATES if base and suffix == known), None)
    if base and state is None and not Path(name).exists():
        with contextlib.suppress(UnknownRun):
            run_dir.resolve(base)
            raise UsageError(detail=f"a run has no state `{suffix}`", help=f"use {', '.join(_STATES[:-1])} or {_STATES[-1]}")
    run = base if state else name
    directory = run_dir.resolve(run)
    path = Path(run) if Path(run).is_file() else directory / "report.json"
    return read_report(path), state, directory


def _why_not(state: str) -> str:
    if state == "compile":
        return "torch.compile is only measured with --compile"
    return "nothing was applied in it: it is a profile, a dry run, or it ended early"


def _write(shown: Comparison, wanted: tuple[str, ...], directory: Path) -> list[Path]:
    """Write the views that were asked for, and return their paths."""
    if not wanted:
        return []
    from fusion_advisor.records.serialize import dump_record, write_atomic
    from fusion_advisor.report.compare.comparison import COMPARE_SCHEMA
    from fusion_advisor.report.html.other_pages import render_compare_html, render_compare_markdown

    if directory.exists() and not directory.is_dir():
        raise UsageError(detail=f"--output {directory} is a file", help="pass a directory")
    texts = {
        "html": lambda: render_compare_html(shown),
        "md": lambda: render_compare_markdown(shown),
        "json": lambda: dump_record(shown, COMPARE_SCHEMA),
    }
    written = []
    try:
        for name in wanted:
            written.append(directory / f"compare.{name}")
            write_atomic(written[-1], texts[name]())
    except OSError as error:
        raise CannotWrite(path=directory, detail=error.strerror or str(error)) from error
    return written


def _print(settings: Settings, shown: Comparison, written: list[Path], hint: str, *, as_json: bool) -> None:
    if as_json:
        from fusion_advisor.records.serialize import dump_record
        from fusion_advisor.report.compare.comparison import COMPARE_SCHEMA

        write_result(dump_record(shown, COMPARE_SCHEMA))
        return
    from fusion_advisor.report.compare.rows import headline
    from fusion_advisor.report.terminal.compare import compare_table
    from fusion_advisor.report.terminal.layout import plain

    console = settings.out()
    if settings.is_quiet:
        write_result(plain(headline(shown).text, console) + "\n")
        return
    with console.capture() as captured:
        console.print(compare_table(shown, console, is_whole=settings.verbosity > 0))
    lines = [*(f"wrote: {path}" for path in written), *([f"next: {hint}"] if hint else [])]
    write_result(captured.get() + "".join(f"{line}\n" for line in lines))
