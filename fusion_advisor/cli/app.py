"""The program: registers the commands and prints their errors.

Nothing heavy is imported on the way: ``--help`` answers while torch would still be loading.
"""

from __future__ import annotations

import errno
import os
import shlex
import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer

from fusion_advisor.cli.commands import apply, compare, doctor, explain, export, fleet, kernels, plan, profile, report
from fusion_advisor.cli.common.console import Settings, annotate, silence_stdout, write_result
from fusion_advisor.cli.common.help import Command, Group
from fusion_advisor.content import tool_version
from fusion_advisor.errors import AdvisorError, CannotWrite

BUG = 1
INTERRUPTED = 130

app = typer.Typer(
    name="fusion-advisor",
    help="Profile a PyTorch model, fuse its op chains into readable kernels, keep only what measurably pays.",
    cls=Group,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,  # typer's own prints source lines of the frame; a user's mistake deserves a sentence
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("profile", cls=Command)(profile.profile)
app.command("plan", cls=Command)(plan.plan)
app.command("apply", cls=Command)(apply.apply)
app.command("report", cls=Command)(report.report)
app.command("export", cls=Command)(export.export)
app.command("compare", cls=Command)(compare.compare)
app.command("fleet", cls=Command)(fleet.fleet)
app.add_typer(kernels.app, name="kernels")
app.command("doctor", cls=Command)(doctor.doctor)
app.command("explain", cls=Command)(explain.explain)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        write_result(f"fusion-advisor {tool_version()}\n")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("-V", "--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    """Profile a PyTorch model, fuse its op chains into readable kernels, keep only what measurably pays."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    settings = Settings()
    try:
        app(args=arguments, prog_name="fusion-advisor", obj=settings)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0
    except AdvisorError as error:
        print_error(error, settings)
        code = error.exit_code
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:
        silence_stdout()
        code = 0
    except Exception as error:  # noqa: BLE001 - the last resort: a sentence and a log, not a traceback
        code = _end_of(error, settings)
    if code == INTERRUPTED:
        _write_error("\n".join(_interrupted(settings)), settings)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        silence_stdout()
    except OSError as error:
        silence_stdout()
        code = _end_of(error, settings)
    return code


def _end_of(error: Exception, settings: Settings) -> int:
    """Distinguish a disk that takes no more from a bug; return the exit code."""
    if not isinstance(error, OSError) or not _is_refused(error, settings):
        print_bug(error, settings)
        return BUG
    path = error.filename
    if path is None:
        frames = traceback.extract_tb(error.__traceback__)
        is_printed = bool(frames) and Path(frames[-1].filename).name == "console.py"
        path = "standard output" if is_printed or settings.log_path is None else settings.log_path.parent
    silence_stdout()
    full = CannotWrite(path=path, detail=error.strerror or str(error))
    print_error(full, settings)
    return full.exit_code


def _is_refused(error: OSError, settings: Settings) -> bool:
    """Whether a disk took no more, or a file of the run could not be written for whatever reason."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        return True
    if settings.log_path is None or not isinstance(error.filename, str | os.PathLike):
        return False
    return Path(error.filename).absolute().is_relative_to(settings.log_path.parent.absolute())


def _interrupted(settings: Settings) -> list[str]:
    """Name the files of an interrupted command, and the command that shows them."""
    if settings.log_path is None:
        return ["interrupted"]
    folder = settings.log_path.parent
    if not (folder / "report.json").is_file():
        return [f"interrupted before anything was measured; the log is {settings.log_path}"]
    return [f"interrupted; partial results are in {folder}", f"  next: {shlex.join(['fusion-advisor', 'report', str(folder)])}"]


def print_error(error: AdvisorError, settings: Settings) -> None:
    """Print a mistake in rustc's shape: code, what, note, help, and where the log is."""
    lines = [f"error[{error.code}]: {error}"]
    for name, text in (("note", error.note_text), ("help", error.hint_text)):
        first, *more = text.split("\n")
        if first:
            lines.append(f"  {name}: {first}")
        lines += [f"        {line.strip()}" for line in more]
    _keep_traceback(error, lines, settings)
    if settings.log_path is not None:
        lines.append(f"  log:  {settings.log_path}")
    _write_error("\n".join(lines), settings)


def print_bug(error: Exception, settings: Settings) -> None:
    """Print an unexpected exception as a bug."""
    lines = [
        f"error: bug in fusion-advisor: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    ]
    lines.append("  help: please report it with the traceback, which -vv prints")
    _keep_traceback(error, lines, settings)
    if settings.log_path is not None:
        lines.append(f"  log:  {settings.log_path}")
    _write_error("\n".join(lines), settings)


def _keep_traceback(error: BaseException, lines: list[str], settings: Settings) -> None:
    """Write the traceback into the log, and with -vv before the message."""
    text = "".join(traceback.format_exception(error))
    if settings.log_path is not None:
        settings.write_log(text)
    if settings.verbosity >= 2:
        lines[:0] = text.rstrip().split("\n")


def _write_error(text: str, settings: Settings) -> None:
    from rich.text import Text

    from fusion_advisor.report.escape import visible

    console = settings.err()
    for line in text.split("\n"):
        shown = Text(visible(line, 2000))
        if line.startswith("error"):
            shown.stylize("bold red", 0, line.find(":") if ":" in line else len(line))
        console.print(shown, soft_wrap=True)
    first = next((line for line in text.split("\n") if line.startswith("error")), "")
    if first:
        annotate("error", first)


if __name__ == "__main__":
    sys.exit(main())
