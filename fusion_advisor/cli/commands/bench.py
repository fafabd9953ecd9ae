"""``fusion-advisor kernels bench``: times every contender of a kernel against the device's memory limit."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fusion_advisor.cli.common import completion, core, options
from fusion_advisor.cli.common.console import Settings, write_result
from fusion_advisor.cli.common.progress import TerminalProgress
from fusion_advisor.codegen.registry import NAMES
from fusion_advisor.errors import CannotWrite, UsageError

if TYPE_CHECKING:
    from fusion_advisor.evaluate.bench.records import BenchRun


if TYPE_CHECKING:

    class Which(enum.StrEnum):
        """One contender."""

else:
    Which = enum.StrEnum(
        "Which", {name.upper(): name for name in ("ref", "compile", "liger", *NAMES, "cublas", "chosen")}
    )  # fmt: skip


def bench_command(
    context: typer.Context,
    *,
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="A kernel's name.", autocompletion=completion.kernels)
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every kernel of the library.")] = False,
    shapes: Annotated[
        list[str] | None,
        typer.Option("--shapes", metavar="R=2048,C=4096", help="Sizes instead of the manifest's; repeat for more."),
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option("--dtype", metavar="LIST", help="bf16, fp16, fp32; by default bf16, on a CPU fp32.")
    ] = None,
    backend: Annotated[list[str] | None, typer.Option("--backend", metavar="LIST", help="Only these backends.")] = None,
    preset: Annotated[str, typer.Option("--preset", metavar="NAME", help="A sweep of kernel.toml, as `published`.")] = "",
    variant: Annotated[str, typer.Option("--variant", metavar="NAME", help="Another reference than the first.")] = "",
    which: Annotated[
        Which | None, typer.Option("--which", help="Run this contender in a loop, for ncu or nsys; measure nothing.")
    ] = None,
    iterations: Annotated[int, typer.Option("--iterations", min=1, help="Calls that --which makes.")] = 1_000_000,
    no_compile: Annotated[bool, typer.Option("--no-compile", help="Leave torch.compile out: seconds for each shape.")] = False,
    device: options.DeviceOpt = None,
    kernels: options.KernelsOpt = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="DIR", help="Write bench.json, bench.md and the plots here.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The run as JSON on stdout, nothing else.")] = False,
    quiet: options.QuietOpt = False,
    verbose: options.VerboseOpt = 0,
    color: options.ColorOpt = options.Color.AUTO,
) -> None:
    """Time a kernel against eager, torch.compile and Liger, and show how close each comes to the memory limit."""
    settings = options.apply_output(context, quiet=quiet, verbose=verbose, color=color)
    if (name is None) == (not every):
        raise UsageError(detail="pass a kernel's name or --all", help="`fusion-advisor kernels list` shows the names")
    if shapes and (every or preset):
        raise UsageError(detail="--shapes is for one kernel and replaces its cases", help="leave --all and --preset out")
    if output is not None and output.exists() and not output.is_dir():
        raise UsageError(detail=f"--output {output} is a file", help="pass a directory")
    plan = core.plan_bench(
        name,
        shapes=[parse_shape(text) for text in shapes or ()],
        dtypes=_listed(dtype),
        preset=preset,
        backends=_listed(backend),
        variant=variant,
        device=device or "auto",
        with_compile=not no_compile or which == "compile",
        kernel_dirs=tuple(kernels or ()),
    )
    with TerminalProgress(settings) as progress:
        if which is not None:
            progress.phase(f"loop {which.value}")
            write_result(core.run_contender(plan, "eager" if which == "ref" else which.value, iterations) + "\n")
            return
        progress.phase("bench")
        run = core.bench_kernels(plan, progress, lambda so_far: _save(so_far, output))
    written = _views(settings, run, output)
    if as_json:
        from fusion_advisor.evaluate.bench.records import dump_run

        write_result(dump_run(run))
        return
    from fusion_advisor.evaluate.bench.view import bench_tables, summary_line
    from fusion_advisor.report.terminal.layout import plain

    console = settings.out()
    if quiet:
        write_result(plain(summary_line(run), console) + "\n")
        return
    with console.capture() as captured:
        console.print(bench_tables(run, console))
    write_result(captured.get() + "".join(f"wrote: {path}\n" for path in written))


def parse_shape(text: str) -> dict[str, int]:
    """Read ``R=2048,C=4096``."""
    found = {}
    for item in text.split(","):
        letter, sign, size = item.strip().partition("=")
        if not sign or not letter.isidentifier() or not size.strip().isdecimal():
            raise UsageError(detail=f"--shapes {text}: `{item.strip()}` is not a size", help="write --shapes R=2048,C=4096")
        found[letter] = int(size)
    return found


def _listed(texts: list[str] | None) -> tuple[str, ...]:
    return tuple(part.strip() for text in texts or () for part in text.split(",") if part.strip())


def _save(run: BenchRun, directory: Path | None) -> None:
    """Write the rows so far, so that an interrupted run keeps them."""
    from fusion_advisor.evaluate.bench.records import dump_run

    if directory is not None:
        _write(directory / "bench.json", dump_run(run))


def _views(settings: Settings, run: BenchRun, directory: Path | None) -> list[Path]:
    """Write the Markdown and the plots; if plots cannot be drawn, say so and go on."""
    if directory is None:
        return []
    from fusion_advisor.evaluate.bench.plot import CannotPlot, draw
    from fusion_advisor.evaluate.bench.view import bench_markdown

    _write(directory / "bench.md", bench_markdown(run))
    written = [directory / "bench.json", directory / "bench.md"]
    try:
        written += draw(run, directory)
    except CannotPlot as error:
        settings.err().print(f"! {error}")
    except OSError as error:
        raise CannotWrite(path=directory, detail=error.strerror or str(error)) from error
    return written


def _write(path: Path, text: Any) -> None:
    from fusion_advisor.records.serialize import write_atomic

    try:
        write_atomic(path, text)
    except OSError as error:
        raise CannotWrite(path=path, detail=error.strerror or str(error)) from error
