"""Progress on stderr: one line for each finished phase; in a terminal also a bar that goes away.

In a log a phase is a line when it starts and a line when it ends, and a long one says every half minute how far it is.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Mapping
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

from fusion_advisor import units
from fusion_advisor.cli.common.console import Settings, annotate, is_tty

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

HEARTBEAT_S = 30.0


def shows_bar(settings: Settings, stream: TextIO, env: Mapping[str, str]) -> bool:
    """Whether progress is a bar that goes away, rather than lines that stay."""
    if settings.is_quiet or settings.progress in ("plain", "none"):
        return False
    return settings.progress == "bar" or (is_tty(stream) and env.get("TERM") != "dumb" and not env.get("CI"))


class TerminalProgress:
    """Shows what the core says; use as a context, so that the bar never outlives an error.

    With ``is_patient`` the first Ctrl-C lets the step that runs come to its end, so that what it measures is not lost; the second
    stops at once.
    """

    def __init__(self, settings: Settings, *, is_patient: bool = False) -> None:
        self._settings = settings
        self._is_live = shows_bar(settings, sys.stderr, os.environ)
        self._is_silent = settings.is_quiet or settings.progress == "none"
        self._console: Console = settings.err(is_live=self._is_live)
        self._is_patient = is_patient
        self._is_stopping = False
        self._handler: Any = None
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._phase = ""
        self._note = ""
        self._started = self._spoke = time.monotonic()
        self.durations_s: list[tuple[str, float]] = []

    def __enter__(self) -> Self:
        """Start watching."""
        handler = signal.getsignal(signal.SIGINT)
        is_ours = self._is_patient and threading.current_thread() is threading.main_thread()
        if is_ours and handler is signal.default_int_handler:  # another handler is the embedding program's own
            self._handler = signal.signal(signal.SIGINT, self._interrupted)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End the phase; a failed one gets no check mark."""
        self._finish("✓" if kind is None else "✗")
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            self._handler = None

    def phase(self, name: str) -> None:
        """A phase begins, and with it the last one ends."""
        self._stop_if_asked()
        self._finish("✓")
        self._phase, self._note = name, ""
        self._started = self._spoke = time.monotonic()
        self._settings.write_log(f"== {name}")
        if self._is_silent:
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
        self._stop_if_asked()
        self._settings.write_log(f"   [{done}/{total}] {text}")
        if self._bar is not None and self._task is not None:
            shown = self._shown(f"{self._phase}: {text}")
            self._bar.update(self._task, completed=done, total=total, description=shown, left=self._left(done, total))
        elif time.monotonic() - self._spoke > HEARTBEAT_S:
            self._say(f"  {self._phase} {done}/{total}: {text}")

    def found(self, text: str) -> None:
        """A gain that stays; shown at once."""
        self._settings.write_log(f"kept: {text}")
        self._say(f"  kept {text}", style="green")

    def warn(self, text: str) -> None:
        """Something the user should know, though the run goes on."""
        self._settings.write_log(f"warning: {text}")
        self._say(f"! {text}", style="yellow")
        annotate("warning", text)

    def _stop_if_asked(self) -> None:
        if self._is_stopping:
            self._is_stopping = False
            raise KeyboardInterrupt

    def _interrupted(self, signum: int, frame: FrameType | None) -> None:
        """Note the first Ctrl-C and print it past all buffers, because the interrupted code may be writing."""
        if self._is_stopping:
            signal.default_int_handler(signum, frame)
        self._is_stopping = True
        with contextlib.suppress(OSError, ValueError):
            os.write(sys.stderr.fileno(), b"\n! stopping after this step; Ctrl-C again stops at once\n")

    def _left(self, done: int, total: int) -> str:
        """Time left if the steps to come take as long as those that are done."""
        if done < 1:
            return ""
        return f"{done}/{total}, about {units.seconds((time.monotonic() - self._started) / done * (total - done))} left"

    def _start_bar(self, name: str) -> None:
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        from fusion_advisor.report.terminal.layout import is_ascii

        columns = (
            SpinnerColumn("line" if is_ascii(self._console) else "dots"),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}", markup=False),
        )
        self._bar = Progress(*columns, console=self._console, transient=True)
        self._task = self._bar.add_task(self._shown(name), total=None, left="")
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
        if not self._is_silent:
            head = f"{mark} {self._phase:<16} {units.seconds(took):>9}  "
            self._say(f"{head}{self._note}".rstrip(), style=style, indent=len(head))
        self._phase = ""

    def _say(self, text: str, style: str = "", indent: int = 2) -> None:
        from rich.text import Text

        if self._is_silent and not text.startswith("!"):
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
        from fusion_advisor.report.terminal.layout import plain

        return plain(text, self._console)
