"""``fusion-advisor kernels``: look at the kernel library, add to it, hold a kernel to its contract."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fusion_advisor.cli import bench, core, options
from fusion_advisor.cli.console import Settings, write_result
from fusion_advisor.cli.progress import TerminalProgress
from fusion_advisor.errors import KernelCheckFailed, UsageError

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="The kernel library: list, show, new, check, bench.")
app.command("bench")(bench.bench_command)

NameArg = Annotated[str, typer.Argument(metavar="NAME", help="A kernel's name.")]


@app.command("list")
def list_command(context: typer.Context, as_json: options.JsonOpt = False, color: options.ColorOpt = options.Color.AUTO) -> None:
    """Name every kernel, what it computes, and the backends it has."""
    settings = options.apply_output(context, color=color)
    kernels = core.list_kernels()
    if as_json:
        listed = [{"name": k.name, "summary": k.summary, "backends": list(k.backends), "dtypes": list(k.dtypes)} for k in kernels]
        write_result(json.dumps(listed, indent=1) + "\n")
        return
    rows = [(kernel.name, ", ".join(kernel.backends), kernel.summary) for kernel in kernels]
    _print_rows(settings, ("Kernel", "Backends", "Computes"), rows, "The library is empty.")


@app.command("show")
def show_command(context: typer.Context, name: NameArg, color: options.ColorOpt = options.Color.AUTO) -> None:
    """Print a kernel's manifest and its reference."""
    settings = options.apply_output(context, color=color)
    kernel = core.load_kernel(name)
    directory = kernel.spec.folder
    files = sorted(path for path in directory.iterdir() if path.suffix in (".toml", ".py", ".jinja", ".cu", ".cpp"))
    files.sort(
        key=lambda path: ["kernel.toml", "reference.py"].index(path.name) if path.name in ("kernel.toml", "reference.py") else 2
    )
    from fusion_advisor.report.terminal import plain

    console = settings.out()
    parts = []
    for path in files:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        parts.append(f"# {path.name}\n" + "".join(plain(line, console) + "\n" for line in lines))
    write_result("\n".join(parts))


@app.command("new")
def new_command(
    name: NameArg,
    directory: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="Where the kernel's folder is made.")] = Path(
        "kernels"
    ),
) -> None:
    """Write a new kernel's folder: a manifest and a reference in plain PyTorch."""
    if not re.fullmatch(r"[a-z][a-z0-9_]{1,47}", name):
        raise UsageError(detail=f"`{name}` is not a kernel name", help="use lower-case letters, digits and _, as in `gelu_tanh`")
    made = core.scaffold_kernel(name, directory)
    where = made if isinstance(made, str | Path) else directory / name
    write_result(f"wrote: {where}\nnext: fusion-advisor kernels check {name}\n")


@app.command("check")
def check_command(
    context: typer.Context,
    *,
    name: NameArg,
    as_json: options.JsonOpt = False,
    quiet: options.QuietOpt = False,
    verbose: options.VerboseOpt = 0,
    color: options.ColorOpt = options.Color.AUTO,
) -> None:
    """Build a kernel for every case of its manifest and compare it with its reference (exit 10 if one fails)."""
    settings = options.apply_output(context, quiet=quiet, verbose=verbose, color=color)
    with TerminalProgress(settings) as progress:
        progress.phase(f"check {name}")
        rows = core.check_kernel(name, progress)
    failed = sum(_field(row, "result") not in ("passed", "ok", "skipped") for row in rows)
    heads = ("case", "backend", "dtype", "result", "detail")
    if as_json:
        write_result(json.dumps([{head: _field(row, head) for head in heads} for row in rows], indent=1) + "\n")
    else:
        table = [tuple(_field(row, head) for head in heads) for row in rows]
        _print_rows(settings, tuple(head.capitalize() for head in heads), table, f"`{name}` declares no cases.")
    if failed:
        raise KernelCheckFailed(name=name, failed=failed, total=len(rows))


def _field(row: Any, name: str) -> str:
    at = ("case", "backend", "dtype", "result", "detail").index(name)
    return str(row[at] if isinstance(row, tuple) else getattr(row, name))


def _print_rows(settings: Settings, heads: tuple[str, ...], rows: Sequence[tuple[str, ...]], when_empty: str) -> None:
    from fusion_advisor.report.terminal import plain, simple_table

    console = settings.out()
    if not rows:
        write_result(plain(when_empty, console) + "\n")
        return
    with console.capture() as captured:
        console.print(simple_table(heads, rows, console))
    write_result(captured.get())
