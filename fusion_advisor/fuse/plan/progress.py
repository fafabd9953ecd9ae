"""Progress of a run for its watcher, and how long its phases took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
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
    """Announces phases and keeps their seconds for the report.

    Args:
        progress: is given each phase's name.
        is_whole: count what passes ahead of a phase, since the phase before it, with that phase: the phases then sum to the run.
        now: returns seconds.
    """

    def __init__(self, progress: Progress, *, is_whole: bool = False, now: Callable[[], float] = time.perf_counter) -> None:
        self.progress = progress
        self.durations_s: list[tuple[str, float]] = []
        self._is_whole = is_whole
        self._now = now
        self._started = self._ended = now()

    def elapsed_s(self) -> float:
        """Return the seconds since the clock was made."""
        return round(self._now() - self._started, 3)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Announce a phase and time it.

        Args:
            name: of the phase.
        """
        self.progress.phase(name)
        started = self._now()
        yield
        self._end(name, self._ended if self._is_whole else started)

    def split(self, name: str) -> None:
        """Count what has passed of the current phase under another name, and the rest alone as its own; for a whole clock.

        Args:
            name: of the first part.
        """
        self._end(name, self._ended)

    def _end(self, name: str, started: float) -> None:
        self._ended = self._now()
        self.durations_s.append((name, round(self._ended - started, 3)))
