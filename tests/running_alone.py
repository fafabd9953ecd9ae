"""Turns of test processes: many run at once, or one runs alone."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


class Turn:
    """Two file locks that all processes of a test run share.

    Args:
        path: what both files' names start with.
    """

    def __init__(self, path: Path) -> None:
        self._queue, self._running = path.with_name(path.name + ".queue"), path.with_name(path.name + ".running")

    def delete(self) -> None:
        """Delete both files, when the run is over."""
        for path in (self._queue, self._running):
            path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def take(self, *, alone: bool) -> Iterator[None]:
        """Wait until this process may run: beside others, or by itself.

        Each process goes through the queue, so those that share cannot overtake the process that waits to run alone.
        """
        if fcntl is None:
            yield
            return
        with _opened(self._running) as running:
            with _opened(self._queue) as queue:
                fcntl.flock(queue, fcntl.LOCK_EX)
                fcntl.flock(running, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
            yield


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        yield file
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)  # a forked child keeps the file open, and with it a lock that is not given back
        os.close(file)
