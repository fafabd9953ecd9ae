"""``fusion-advisor profile --trace FILE``: a trace made elsewhere, with no model and no GPU."""

from __future__ import annotations

from pathlib import Path

import typer

from fusion_advisor.cli.common import core
from fusion_advisor.cli.common.console import Settings, write_result
from fusion_advisor.cli.common.progress import TerminalProgress
from fusion_advisor.content import tool_version
from fusion_advisor.errors import UsageError

_TAKEN = frozenset({"trace_file", "min_share", "top", "kernels", "as_json", "quiet", "verbose", "color"})


def check_usage(context: typer.Context, model_id: str, trace_file: Path | None) -> None:
    """Refuse options that contradict each other: a trace together with a model, or neither.

    Raises:
        UsageError: with the options that have to go.
    """
    if trace_file is None:
        if not model_id:
            raise UsageError(detail="there is nothing to profile", help="pass MODEL_ID, or --trace FILE")
        return
    given = [name for name in context.params if _is_given(context, name)]
    if others := [name for name in given if name not in _TAKEN]:
        named = {option.name: option.opts[-1] for option in context.command.params}
        words = ", ".join("MODEL_ID" if name == "model_id" else named.get(name, name) for name in others)
        raise UsageError(detail=f"--trace reads a file and runs nothing, so it takes no {words}", help=f"leave {words} out")
    if not trace_file.exists():
        raise UsageError(
            detail=f"--trace {trace_file}: there is no such file",
            help="pass a trace of torch.profiler (.json or .json.gz), or a folder with one of each rank",
        )


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def run_trace(
    settings: Settings, path: Path, *, min_share: float, top: int, kernel_dirs: tuple[Path, ...], as_json: bool
) -> None:
    """Rank a trace's kernels and repeated chains, and print them."""
    with TerminalProgress(settings) as progress:
        found = core.profile_trace(path, progress, min_share=min_share, top=top, kernel_dirs=kernel_dirs, tool=tool_version())
    if as_json:
        from fusion_advisor.records.serialize import TRACE_SCHEMA, dump_record

        write_result(dump_record(found, TRACE_SCHEMA))
        return
    from fusion_advisor.report.terminal.layout import plain
    from fusion_advisor.report.terminal.trace import trace_summary, trace_table

    console = settings.out()
    if settings.is_quiet:
        write_result(plain(trace_summary(found), console) + "\n")
        return
    with console.capture() as captured:
        console.print(trace_table(found, console))
    write_result(
        captured.get() + "next: fusion-advisor profile MODEL_ID   (with the model: what may be fused, and what it saves)\n"
    )
