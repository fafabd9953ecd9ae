"""Progress of a run for its watcher, and how long its phases took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Progress:
    """Told how a run goes; shows nothing itself. The command line passes an object of its own with these methods."""

    def phase(self, name: str) -> None:
        """A phase begins."""

    def note(self, text: str) -> None:
        """What the phase found."""

    def step(self, done: int, total: int, text: str) -> None:
        """How far the phase has come."""

    def found(self, text: str) -> None:
        """A gain that stays; shown at once."""

    def warn(self, text: str) -> None:
        """Something the user should know, though the run goes on."""


class PhaseClock:
    """Announces phases and keeps their seconds for the report."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.durations_s: list[tuple[str, float]] = []
        self._started = time.perf_counter()

    def elapsed_s(self) -> float:
        """Return the seconds since the clock was made."""
        return round(time.perf_counter() - self._started, 3)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Announce a phase and time it."""
        self.progress.phase(name)
        started = time.perf_counter()
        yield
        self.durations_s.append((name, round(time.perf_counter() - started, 3)))
