"""Run directories: their names, how a user may name one, and what is written into them.

``<UTC date>-<time>-<6 hex>``: the hex digits depend on the model's revision, the shapes, the options and the version alone, so
repeats of a run share them and differ in the time.
"""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fusion_advisor.cli.common import completion
from fusion_advisor.content import tool_version
from fusion_advisor.errors import CannotWrite, RunExists, UnknownRun, UsageError
from fusion_advisor.files.safe_name import path_inside

if TYPE_CHECKING:
    from fusion_advisor.cli.common.console import Settings
    from fusion_advisor.fuse.plan.options import ProfileOptions
    from fusion_advisor.records import Fusion, GraphRewrite, Report
    from fusion_advisor.report.html.embed_traces import EmbeddedTrace

RunArg = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN]",
        help="A path, a run id, a unique prefix or @last; the latest when left out.",
        autocompletion=completion.runs,
    ),
]
RUNS = Path("fusion-runs")
FORMATS = ("html", "md", "json")
EXTRA = ("csv",)
"""Written only on request."""
_RUN_ID = re.compile(r"\d{8}-\d{6}-[0-9a-f]{6}")
_SPELLED = {
    "kernel_dirs": "--kernels", "min_time_s": "--min-time", "shape_points": "--points", "compile_limit_s": "--compile-limit",
}  # fmt: skip
"""Options whose names differ from their fields."""
_OF_THE_RUN = ("command", "run_dir", "run_id", "config_hash", "budgets", "bandwidth", "remembers")
"""Fields that identify a run, say how long it measures or where its verdicts come from: they make no other run of it."""


def config_hash(verb: str, request: Any, options: ProfileOptions, revision: str) -> str:
    """Return six hex digits of a hash over everything that makes two runs comparable."""
    import hashlib
    import json

    from fusion_advisor.records.serialize import encode

    asked = {item.name: encode(getattr(options, item.name)) for item in fields(options) if item.name not in _OF_THE_RUN}
    facts = [verb, encode(request), revision, asked, tool_version()]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:6]


def new_run_id(digest: str, later_s: int = 0) -> str:
    """Return a run id for now, or for so many seconds later."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "")
    moment = time.gmtime(int(epoch)) if epoch.isdecimal() else time.gmtime(time.time() + later_s)
    return f"{time.strftime('%Y%m%d-%H%M%S', moment)}-{digest}"


def free_run_id(digest: str, *, makes_folder: bool) -> str:
    """Return a run id; where it names the run's directory, that was made just now and is nobody else's.

    Two runs of one step that start in the same second (on two GPUs, say) would have one id: the other gets the next second's.
    """
    if not makes_folder or os.environ.get("SOURCE_DATE_EPOCH", "").isdecimal():
        return new_run_id(digest)
    for later_s in range(60):
        run_id = new_run_id(digest, later_s)
        try:
            (RUNS / run_id).mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError:  # making the run's directory will say why
            break
        return run_id
    return new_run_id(digest)


def command_line(verb: str, request: Any, options: ProfileOptions, revision: str) -> str:
    """Return the command that repeats a run: everything that differs from its default, and the seed in any case."""
    words = ["fusion-advisor", verb, request.model_id]
    pinned = revision if re.fullmatch(r"[0-9a-f]{40}", revision) else ""
    for record, skipped in ((request, ("model_id",)), (options, _OF_THE_RUN)):
        for item in fields(record):
            value = getattr(record, item.name)
            if item.name in skipped:
                continue
            if item.name == "revision" and pinned:
                value = pinned
            if value == item.default and item.name != "seed":
                continue
            option = _SPELLED.get(item.name, "--" + item.name.replace("_", "-"))
            if item.name in ("shapes", "shape_points"):
                value = _sizes_text(record)[item.name]
            if item.name == "effort":
                words.append(f"--{value}")
            elif isinstance(value, bool):
                words.append(option if value else option.replace("--", "--no-", 1))
            elif isinstance(value, tuple):
                words += [word for part in value for word in (option, str(part))]
            elif value is not None:
                words += [option, str(value)]
    return shlex.join(words)


def _sizes_text(options: Any) -> dict[str, str]:
    """Return ranges of sizes, and points in them, as their options take them."""
    return {"shapes": options.shapes.text, "shape_points": options.shapes.points_text(options.shape_points)}


def refuse_taken(directory: Path, *, force: bool) -> None:
    """Refuse a directory that holds a run, before a model is loaded for minutes.

    Raises:
        RunExists: It does, and ``force`` was not given.
        CannotWrite: It is a file.
    """
    if directory.exists() and not directory.is_dir():
        raise CannotWrite(path=directory, detail="it is a file")
    if (directory / "report.json").exists() and not force:
        raise RunExists(path=directory)


def create(run_id: str, output: Path | None, *, force: bool) -> Path:
    """Make the directory of a new run.

    Raises:
        RunExists: It already holds a run, and ``force`` was not given.
        CannotWrite: The file system refuses.
    """
    directory = output if output is not None else RUNS / run_id
    refuse_taken(directory, force=force)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        path_inside(directory, "kernels").mkdir(exist_ok=True)
    except OSError as error:
        raise CannotWrite(path=directory, detail=error.strerror or str(error)) from error
    return directory


def begin(directory: Path, settings: Settings, request: str) -> None:
    """Open the log of a new run and write what repeats it.

    Args:
        directory: of the run.
        settings: get the log.
        request: ``request.json``'s text.

    Raises:
        CannotWrite: the file system refuses.
    """
    from fusion_advisor.records.serialize import write_atomic

    try:
        settings.open_log(path_inside(directory, "log.txt"))
        write_atomic(directory / "request.json", request)
    except OSError as error:
        raise CannotWrite(path=directory, detail=error.strerror or str(error)) from error


def known_runs() -> list[Path]:
    """Return the runs below the working directory, the latest first."""
    if not RUNS.is_dir():
        return []
    found = [path for path in RUNS.iterdir() if (path / "report.json").is_file()]
    return sorted(found, key=lambda path: path.name, reverse=True)


def is_run(name: str) -> bool:
    """Whether an argument of ``apply`` names a run rather than a model."""
    path = Path(name)
    if name.startswith("@") or _RUN_ID.fullmatch(name) or re.fullmatch(r"\d{8}-[\d-]*[0-9a-f]*", name):
        return True
    return path.name == "report.json" or (path / "report.json").is_file() or (path / "request.json").is_file()


def resolve(name: str | None) -> Path:
    """Return the directory of the run that a user named.

    Args:
        name: A path, a run id, a unique prefix of one, ``@last``; None is the latest.

    Raises:
        UnknownRun: There is none, or the prefix fits several.
    """
    runs = known_runs()
    listed = ", ".join(f"`{path.name}`" for path in runs[:5])
    known = (
        f"known runs: {listed}" if runs else f"there are no runs below ./{RUNS}; start one with `fusion-advisor profile MODEL_ID`"
    )
    if name is None or name == "@last":
        if not runs:
            raise UnknownRun(name="@last", detail=f"./{RUNS} holds none", known=known)
        return runs[0]
    path = Path(name)
    if path.is_file() and path.name.endswith(".json"):
        return path.parent
    if path.is_dir():
        if (path / "report.json").is_file() or (path / "request.json").is_file():
            return path
        raise UnknownRun(name=name, detail="the directory holds no report.json", known=known)
    fitting = [run for run in runs if run.name.startswith(name)]
    if len(fitting) == 1:
        return fitting[0]
    detail = f"{len(fitting)} runs start like that" if fitting else "no such path, and no run id starts like that"
    raise UnknownRun(name=name, detail=detail, known=known)


def parse_formats(values: Iterable[str] | None, *, extra: tuple[str, ...] = EXTRA, embed_trace: bool = False) -> tuple[str, ...]:
    """Return the formats asked for, repeated or separated by commas; without any, all but the ``extra`` ones."""
    known = (*FORMATS, *extra)
    asked = [part.strip() for value in values or () for part in value.split(",") if part.strip()]
    for part in asked:
        if part not in known:
            raise UsageError(detail=f"--format {part} is not known", help=f"use {', '.join(known[:-1])} or {known[-1]}")
    formats = tuple(dict.fromkeys(asked)) or FORMATS
    if embed_trace and "html" not in formats:
        raise UsageError(
            detail="--embed-trace puts traces into the HTML, and --format leaves it out", help="add html to --format"
        )
    return formats


def traces_of(report: Report, directory: Path, *, embed_trace: bool) -> tuple[EmbeddedTrace, ...]:
    """Read what ``--embed-trace`` puts into the HTML; nothing without it."""
    if not embed_trace:
        return ()
    from fusion_advisor.report.html.embed_traces import read_traces

    return read_traces(directory, report)


def trace_warnings(traces: tuple[EmbeddedTrace, ...], directory: Path) -> list[str]:
    """Return warnings about the page that embeds these traces."""
    if not traces:
        return []
    from fusion_advisor.report.html.embed_traces import warnings

    return warnings(traces, (directory / "report.html").stat().st_size)


def write_views(
    report: Report,
    directory: Path,
    formats: tuple[str, ...],
    *,
    md_limit: int | None = None,
    top_kernels: int | None = None,
    traces: tuple[EmbeddedTrace, ...] = (),
) -> list[Path]:
    """Write the views of a report that were asked for, and return their paths."""
    from fusion_advisor.records.serialize import write_atomic

    written = []
    try:
        if "html" in formats:
            from fusion_advisor.report.html.page import MAX_KERNELS, render_html

            written.append(directory / "report.html")
            write_atomic(written[-1], render_html(report, top_kernels=top_kernels or MAX_KERNELS, traces=traces))
        if "md" in formats:
            from fusion_advisor.report.markdown import LIMIT, render_markdown

            text = render_markdown(report, md_limit or LIMIT)
            written.append(directory / "report.md")
            write_atomic(written[-1], text)
        if "csv" in formats:
            from fusion_advisor.report.tables import csv_text, tables

            for name, table in tables(report).items():
                written.append(path_inside(directory, f"csv/{name}.csv"))
                write_atomic(written[-1], csv_text(table))
    except OSError as error:
        raise CannotWrite(path=written[-1] if written else directory, detail=error.strerror or str(error)) from error
    return written


def write_run(report: Report, directory: Path, formats: tuple[str, ...], traces: tuple[EmbeddedTrace, ...] = ()) -> list[Path]:
    """Write report.json, the kernels' sources and the views."""
    from fusion_advisor.records.serialize import write_atomic, write_report

    try:
        write_report(report, directory / "report.json")
        rows: list[Fusion | GraphRewrite] = [*report.fusions, *report.rewrites]
        for row in rows:
            for kernel in row.rendered:
                if kernel.path and not (path := path_inside(directory, kernel.path)).exists():
                    write_atomic(path, kernel.source)
    except OSError as error:
        raise CannotWrite(path=directory, detail=error.strerror or str(error)) from error
    return [directory / "report.json", *write_views(report, directory, formats, traces=traces)]


def append_step_summary(text: str) -> None:
    """Append markdown to the job's summary where GitHub Actions asks for one."""
    path = os.environ.get("GITHUB_STEP_SUMMARY")
    if not path:
        return
    with Path(path).open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text + "\n")
