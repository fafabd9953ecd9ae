"""The only place that builds rich consoles.

Rich decides by itself what a stream can show, and some of what it decides surprises: ``FORCE_COLOR=0`` turns colour on,
``NO_COLOR`` still lets bold through, a pipe is 80 columns wide. So width, colour and markup are decided here and handed to it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 120


@dataclass(slots=True)
class Settings:
    """Output settings: ``main`` makes them, the command fills them in, and an error message reads them."""

    verbosity: int = 0
    progress: str = "auto"
    """``auto``, ``bar``, ``plain`` or ``none``."""
    is_quiet: bool = False
    color: str = "auto"
    log: list[str] = field(default_factory=list)
    """Lines not yet in a file; the run directory is known only once the model is loaded."""
    log_path: Path | None = None
    sources: dict[str, str] = field(default_factory=dict)
    """Sources of options that were not given as flags, by parameter; see :mod:`fusion_advisor.cli.common.config`."""
    started_ns: int = field(default_factory=time.monotonic_ns)
    """The command's start on the monotonic clock: a line of the log says how long after it was written."""

    def out(self) -> Console:
        """The console for results."""
        return build_console(sys.stdout, self.color)

    def err(self, *, is_live: bool = False) -> Console:
        """The console for progress, warnings and errors."""
        return build_console(sys.stderr, self.color, is_live=is_live)

    def write_log(self, text: str) -> None:
        """Add a line to ``log.txt``, now or as soon as there is one, with the seconds since the command's start in front."""
        text = f"{(time.monotonic_ns() - self.started_ns) / 1e9:8.2f}  {text}"
        if self.log_path is None:
            self.log.append(text)
            return
        # A log that cannot be written is no reason to stop, nor to end an error's message with another error.
        with contextlib.suppress(OSError), self.log_path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text + "\n")

    def open_log(self, path: Path) -> None:
        """Write all buffered lines, and every later line, to a file."""
        path.write_text("".join(line + "\n" for line in self.log), encoding="utf-8", errors="backslashreplace")
        self.log.clear()
        self.log_path = path


def build_console(stream: TextIO, color: str = "auto", env: Mapping[str, str] | None = None, *, is_live: bool = False) -> Console:
    """Return a console that never guesses.

    Args:
        stream: Where it writes.
        color: ``auto``, ``always`` or ``never``.
        env: The environment; the process's own by default.
        is_live: Whether it may move the cursor, as a bar does; without colour a terminal still can.
    """
    from rich.console import Console

    environ = os.environ if env is None else env
    is_coloured = wants_color(stream, color, environ)
    return Console(
        file=stream,
        width=stream_width(stream, environ),
        force_terminal=is_coloured or is_live,
        color_system="standard" if is_coloured else None,
        no_color=not is_coloured,
        highlight=False,
        markup=False,
        emoji=False,
        soft_wrap=False,
    )


def wants_color(stream: TextIO, color: str, env: Mapping[str, str]) -> bool:
    """Whether to colour: the flag first, then NO_COLOR, then FORCE_COLOR, then whether a person is looking."""
    if color != "auto":
        return color == "always"
    if env.get("NO_COLOR"):
        return False
    if env.get("FORCE_COLOR", "0") not in ("", "0"):
        return True
    return is_tty(stream) and env.get("TERM") != "dumb"


def stream_width(stream: TextIO, env: Mapping[str, str]) -> int:
    """Columns: COLUMNS, else the terminal's own, else enough for a log."""
    asked = env.get("COLUMNS", "")
    if asked.isdecimal() and int(asked) > 0:
        return max(20, int(asked))
    return max(20, shutil.get_terminal_size((80, 24)).columns) if is_tty(stream) else PIPE_WIDTH


def is_tty(stream: TextIO) -> bool:
    """Whether a terminal reads the stream."""
    try:
        return stream.isatty()
    except (AttributeError, ValueError):  # a closed or replaced stream
        return False


def write_result(text: str) -> None:
    """Write to stdout; a closed pipe ends the output without an error, because the run is done."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        silence_stdout()
    except UnicodeEncodeError:  # a locale without these characters: spell them rather than fail
        encoding = sys.stdout.encoding or "ascii"
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))


def open_page(settings: Settings, path: Path) -> None:
    """Show a page in the user's browser (``BROWSER``, or the system's own), or say why not."""
    import webbrowser

    can_show = any(os.environ.get(name) for name in ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY")) or sys.platform in (
        "darwin",
        "win32",
    )
    if not path.is_file():
        why = "no HTML was written; add html to --format"
    elif not is_tty(sys.stderr) or not can_show:
        why = f"there is no terminal with a display here; it lies in {path}"
    elif webbrowser.open(path.absolute().as_uri()):
        return
    else:
        why = f"no browser answered; it lies in {path}"
    warn(settings, f"--open: {why}")


def warn(settings: Settings, text: str) -> None:
    """Write one sentence to stderr."""
    from fusion_advisor.report.terminal.layout import plain

    console = settings.err()
    console.print(plain(f"! {text}", console), soft_wrap=True)


def annotate(level: str, text: str) -> None:
    """Write a line that GitHub Actions shows next to the change; nothing anywhere else.

    Args:
        level: ``error``, ``warning`` or ``notice``.
        text: One message; a line end or a percent sign in it would end or change the command.
    """
    if os.environ.get("GITHUB_ACTIONS"):
        from fusion_advisor.report.escape import visible

        sys.stderr.write(f"::{level}::{visible(text, 500).replace('%', '%25')}\n")


def silence_stdout() -> None:
    """Send what is still buffered nowhere, so that the interpreter's last flush cannot complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, sys.stdout.fileno())
    except (OSError, ValueError):  # stdout is no file: nothing will be flushed into a pipe
        return
    finally:
        os.close(nowhere)
