"""``fusion-advisor kernels``: lists, shows, creates and checks library kernels."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fusion_advisor.cli.commands import bench
from fusion_advisor.cli.common import completion, core, options
from fusion_advisor.cli.common.console import Settings, write_result
from fusion_advisor.cli.common.help import Command, Group
from fusion_advisor.cli.common.progress import TerminalProgress
from fusion_advisor.errors import CannotWrite, KernelCheckFailed, UsageError

app = typer.Typer(
    cls=Group, no_args_is_help=True, rich_markup_mode=None, help="The kernel library: list, show, new, check, bench."
)
app.command("bench", cls=Command)(bench.bench_command)

NameArg = Annotated[str, typer.Argument(metavar="NAME", help="A kernel's name.", autocompletion=completion.kernels)]


@app.command("list", cls=Command)
def list_command(
    context: typer.Context,
    kernels: options.KernelsOpt = None,
    as_json: options.JsonOpt = False,
    color: options.ColorOpt = options.Color.AUTO,
) -> None:
    """Name every kernel, what it computes, and the backends it has."""
    settings = options.apply_output(context, color=color)
    found = core.list_kernels(options.kernel_dirs(kernels))
    if as_json:
        listed = [{"name": k.name, "summary": k.summary, "backends": list(k.backends), "dtypes": list(k.dtypes)} for k in found]
        write_result(json.dumps(listed, indent=1) + "\n")
        return
    rows = [(kernel.name, ", ".join(kernel.backends), kernel.summary) for kernel in found]
    _print_rows(settings, ("Kernel", "Backends", "Computes"), rows, "The library is empty.")


@app.command("show", cls=Command)
def show_command(
    context: typer.Context,
    name: NameArg,
    backend: Annotated[options.Backend | None, typer.Option(help="Print the source of this backend instead.")] = None,
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help="Dtype of the tensors in that source.")] = "bfloat16",
    kernels: options.KernelsOpt = None,
    color: options.ColorOpt = options.Color.AUTO,
) -> None:
    """Print a kernel's manifest and its reference, or the source that a backend makes of it."""
    settings = options.apply_output(context, color=color)
    kernel = core.load_kernel(name, options.kernel_dirs(kernels))
    if backend is not None:
        write_result(core.render_kernel(kernel, backend.value, _dtype_name(dtype)))
        return
    directory = kernel.spec.folder
    files = sorted(path for path in directory.iterdir() if path.suffix in (".toml", ".py", ".jinja", ".cu", ".cpp"))
    files.sort(
        key=lambda path: ["kernel.toml", "reference.py"].index(path.name) if path.name in ("kernel.toml", "reference.py") else 2
    )
    from fusion_advisor.report.terminal.layout import plain

    console = settings.out()
    parts = []
    for path in files:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        parts.append(f"# {path.name}\n" + "".join(plain(line, console) + "\n" for line in lines))
    write_result("\n".join(parts))


def _dtype_name(text: str) -> str:
    """A dtype by the name torch has for it: ``bf16`` is ``bfloat16``."""
    return {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64"}.get(text, text)


@app.command("new", cls=Command)
def new_command(
    name: NameArg,
    directory: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="Folder for the new kernel's folder.")] = Path(
        "kernels"
    ),
) -> None:
    """Write a new kernel's folder: a manifest and a reference in plain PyTorch."""
    if not re.fullmatch(r"[a-z][a-z0-9_]{1,47}", name):
        raise UsageError(detail=f"`{name}` is not a kernel name", help="use lower-case letters, digits and _, as in `gelu_tanh`")
    try:
        made = core.scaffold_kernel(name, directory)
    except OSError as error:
        raise CannotWrite(path=directory / name, detail=error.strerror or str(error)) from error
    command = shlex.join(["fusion-advisor", "kernels", "check", name, "--kernels", str(directory)])
    write_result(f"wrote: {made}\nnext: {command}\n")


@app.command("check", cls=Command)
def check_command(
    context: typer.Context,
    *,
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="A kernel's name.", show_default=False, autocompletion=completion.kernels),
    ] = "",
    check_all: Annotated[bool, typer.Option("--all", help="Check every kernel.")] = False,
    backend: Annotated[
        list[options.Backend], typer.Option(help="Only this backend; may be repeated. Default: all of the manifest's.")
    ] = [],  # noqa: B006 - typer reads the default and copies it
    kernels: options.KernelsOpt = None,
    as_json: options.JsonOpt = False,
    quiet: options.QuietOpt = False,
    verbose: options.VerboseOpt = 0,
    color: options.ColorOpt = options.Color.AUTO,
) -> None:
    """Build a kernel for every case of its manifest and compare it with its reference (exit 10 if one fails)."""
    settings = options.apply_output(context, quiet=quiet, verbose=verbose, color=color)
    if check_all == bool(name):
        detail = f"`{name}` and --all contradict each other: leave one out" if name else "name a kernel or give --all"
        raise UsageError(detail=detail, help="`fusion-advisor kernels list` shows all")
    directories = options.kernel_dirs(kernels)
    names = [kernel.name for kernel in core.list_kernels(directories)] if check_all else [name]
    backends = [one.value for one in backend] or None
    checked: list[tuple[str, Any]] = []
    with TerminalProgress(settings) as progress:
        for one in names:
            progress.phase(f"check {one}")
            rows = core.check_kernel(one, progress, kernel_dirs=directories, backends=backends)
            progress.note(", ".join(f"{count} {result}" for result, count in _results(rows).items()))
            checked += [(one, row) for row in rows]
    heads = ("case", "backend", "dtype", "result", "detail")
    if as_json:
        listed = [{"kernel": one, **{head: _field(row, head) for head in heads}} for one, row in checked]
        write_result(json.dumps(listed, indent=1) + "\n")
    else:
        table = [(*((one,) if check_all else ()), *(_field(row, head) for head in heads)) for one, row in checked]
        titles = (*(("Kernel",) if check_all else ()), *(head.capitalize() for head in heads))
        _print_rows(settings, titles, table, f"`{name}` declares no cases.")
    failed = sum(_field(row, "result") not in ("passed", "ok", "skipped") for _, row in checked)
    if failed:
        raise KernelCheckFailed(name="kernels" if check_all else name, failed=failed, total=len(checked))


def _results(rows: Sequence[Any]) -> dict[str, int]:
    results = [_field(row, "result") for row in rows]
    return {result: results.count(result) for result in dict.fromkeys(results)}


def _field(row: Any, name: str) -> str:
    at = ("case", "backend", "dtype", "result", "detail").index(name)
    return str(row[at] if isinstance(row, tuple) else getattr(row, name))


def _print_rows(settings: Settings, heads: tuple[str, ...], rows: Sequence[tuple[str, ...]], when_empty: str) -> None:
    from fusion_advisor.report.terminal.layout import plain, simple_table

    console = settings.out()
    if not rows:
        write_result(plain(when_empty, console) + "\n")
        return
    with console.capture() as captured:
        console.print(simple_table(heads, rows, console))
    write_result(captured.get())
