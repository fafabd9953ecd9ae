"""How long ranges may take: an answer comes in time, and says what was left out for it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from fusion_advisor.fuse.plan.progress import Progress


class OutOfTime(Exception):
    """Work that was ended because its time was over; the text says whose time."""


@dataclass(slots=True)
class TimeLimit:
    """Seconds that all ranges of a run may take, and what each kind of work took at most so far.

    Attributes:
        limit_s: infinite where there is no limit.
        clock: tells the time in seconds.
        hint: what gives more time, with a comma ahead; empty where nothing does.
    """

    limit_s: float = math.inf
    clock: Callable[[], float] = time.perf_counter
    hint: str = ""
    _started_s: float = field(init=False)
    _longest_s: dict[str, float] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._started_s = self.clock()

    @property
    def left_s(self) -> float:
        """The seconds that are left."""
        return self.limit_s - (self.clock() - self._started_s)

    @property
    def sentence(self) -> str:
        """Why something was left out."""
        return f"the {self.limit_s:g} s for all ranges were over{self.hint}"

    def has_room_for(self, work: str) -> bool:
        """Whether work of a kind may begin: what it took at most so far is left, or anything where it was never done.

        Args:
            work: its kind, in words.
        """
        return self.left_s > self._longest_s.get(work, 0.0)

    @contextmanager
    def spent_on(self, work: str) -> Iterator[None]:
        """Note how long a piece of work takes, if it is done.

        Args:
            work: its kind, in words.
        """
        started = self.clock()
        yield
        self._longest_s[work] = max(self._longest_s.get(work, 0.0), self.clock() - started)

    def look(self) -> None:
        """End work whose time is over.

        Raises:
            OutOfTime: it is.
        """
        if self.left_s <= 0:
            raise OutOfTime(self.sentence)


class WatchedProgress(Progress):
    """Shows nothing, and ends a run of trials when the time for it is over.

    Args:
        limit: of the time.
    """

    def __init__(self, limit: TimeLimit) -> None:
        self._limit = limit

    def step(self, done: int, total: int, text: str) -> None:
        """Look at the clock ahead of a step.

        Args:
            done: steps.
            total: of them.
            text: what is next.

        Raises:
            OutOfTime: its time is over.
        """
        del done, total, text
        self._limit.look()
