"""The stages of an export: announced and timed one by one, and ended where all of them take too long."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from fusion_advisor.errors import CannotExport
from fusion_advisor.fuse.plan.progress import Progress


class Stages:
    """Announces and times stages; a context, at whose end no process is left.

    Args:
        progress: is given each stage's name, and what is known at its end.
        within_s: that all stages may take. In the main thread a stage that takes longer is interrupted, whatever it does; in
            another one the next stage does not begin.
        now: returns seconds.
    """

    def __init__(
        self, progress: Progress | None = None, within_s: float | None = None, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._progress = progress or Progress()
        self._within_s = within_s
        self._now = now
        self._began = self._started = now()
        self._stage = "its start"
        self._handler: Any = None

    def __enter__(self) -> Self:
        """Begin to count."""
        self._began = self._started = self._now()
        if self._within_s is not None and threading.current_thread() is threading.main_thread():
            self._handler = signal.signal(signal.SIGALRM, _interrupt)
            signal.setitimer(signal.ITIMER_REAL, self._within_s)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Count no longer.

        Raises:
            CannotExport: the time was up; the stage is in the message.
        """
        if self._handler is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self._handler)
            self._handler = None
        if isinstance(error, TimeIsUpError):
            now = self._now()
            spent = f"{now - self._started:.0f} of {now - self._began:.0f} s went into `{self._stage}`"
            raise CannotExport(detail=f"it takes longer than {self._within_s:g} s; {spent}") from None

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Announce a stage.

        Args:
            name: of it.
        """
        if self._within_s is not None and self._now() - self._began > self._within_s:
            raise TimeIsUpError
        self._stage, self._started = name, self._now()
        self._progress.phase(name)
        yield

    @contextlib.contextmanager
    def meanwhile(
        self, command: Sequence[str], folder: Path, *, waits: bool = False
    ) -> Iterator[Callable[[], subprocess.CompletedProcess[str]]]:
        """Run a process while the block runs; it is ended with the block.

        Args:
            command: to run.
            folder: in which it runs.
            waits: its input stays open until it is waited for.

        Yields:
            what waits for its end and returns what it wrote.
        """
        with tempfile.TemporaryFile("w+", errors="replace") as out, tempfile.TemporaryFile("w+", errors="replace") as err:
            given = subprocess.PIPE if waits else subprocess.DEVNULL
            process = subprocess.Popen(command, cwd=folder, stdin=given, stdout=out, stderr=err, start_new_session=True)

            def finished() -> subprocess.CompletedProcess[str]:
                if process.stdin is not None:
                    process.stdin.close()
                process.wait()
                out.seek(0)
                err.seek(0)
                return subprocess.CompletedProcess(command, process.returncode, out.read(), err.read())

            try:
                yield finished
            finally:
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):  # its compilers are ended with it
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                if process.stdin is not None:
                    process.stdin.close()

    def note(self, text: str) -> None:
        """Say what a stage found.

        Args:
            text: a few words.
        """
        self._progress.note(text)


class TimeIsUpError(BaseException):
    """Ends a stage. It is no ``Exception``: compilers catch those and go on."""


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise TimeIsUpError
