"""Progress on stderr: one line for each finished phase; in a terminal also a bar that goes away.

In a log a phase is a line when it starts and a line when it ends, and a long one says every half minute how far it is.
"""

from __future__ import annotations

import os
import sys
import textwrap
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from fusion_advisor import units
from fusion_advisor.cli.console import Settings, annotate, is_tty

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

HEARTBEAT_S = 30.0


class TerminalProgress:
    """Shows what the core says; use as a context, so that the bar never outlives an error."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._console: Console = settings.err()
        self._is_live = is_tty(sys.stderr) and os.environ.get("TERM") != "dumb" and not settings.is_quiet
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._phase = ""
        self._note = ""
        self._started = self._spoke = time.monotonic()
        self.durations_s: list[tuple[str, float]] = []

    def __enter__(self) -> Self:
        """Start watching."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End the phase; a failed one gets no check mark."""
        self._finish("✓" if kind is None else "✗")

    def phase(self, name: str) -> None:
        """A phase begins, and with it the last one ends."""
        self._finish("✓")
        self._phase, self._note = name, ""
        self._started = self._spoke = time.monotonic()
        self._settings.write_log(f"== {name}")
        if self._settings.is_quiet:
            return
        if self._is_live:
            self._start_bar(name)
        else:
            self._say(f"  {name} …")

    def note(self, text: str) -> None:
        """What the phase found; shown on its last line, and at once with -v."""
        self._note = text
        self._settings.write_log(f"   {text}")
        if self._settings.verbosity:
            self._say(f"    {text}")

    def step(self, done: int, total: int, text: str) -> None:
        """How far the phase has come."""
        self._settings.write_log(f"   [{done}/{total}] {text}")
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, total=total, description=self._shown(f"{self._phase}: {text}"))
        elif time.monotonic() - self._spoke > HEARTBEAT_S:
            self._say(f"  {self._phase} {done}/{total}: {text}")

    def warn(self, text: str) -> None:
        """Something the user should know, though the run goes on."""
        self._settings.write_log(f"warning: {text}")
        self._say(f"! {text}", style="yellow")
        annotate("warning", text)

    def _start_bar(self, name: str) -> None:
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=self._console, transient=True)
        self._task = self._bar.add_task(self._shown(name), total=None)
        self._bar.start()

    def _finish(self, mark: str) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = self._task = None
        if not self._phase:
            return
        took = time.monotonic() - self._started
        self.durations_s.append((self._phase, took))
        style = "green" if mark == "✓" else "red"
        if not self._settings.is_quiet:
            head = f"{mark} {self._phase:<16} {units.seconds(took):>9}  "
            self._say(f"{head}{self._note}".rstrip(), style=style, indent=len(head))
        self._phase = ""

    def _say(self, text: str, style: str = "", indent: int = 2) -> None:
        from rich.text import Text

        if self._settings.is_quiet and not text.startswith("!"):
            return
        self._spoke = time.monotonic()
        width = self._console.width
        later = " " * (indent if indent < width // 2 else 2)
        for number, part in enumerate(textwrap.wrap(self._shown(text), width, subsequent_indent=later, drop_whitespace=True)):
            line = Text(part)
            if style and not number:
                line.stylize(style, 0, 1)  # the mark alone: colour helps to find a line, not to read it
            self._console.print(line, overflow="fold")

    def _shown(self, text: str) -> str:
        from fusion_advisor.report.terminal import plain

        return plain(text, self._console)
