"""A timer whose time goes on only when a test says so."""

from __future__ import annotations

from collections.abc import Callable


class PlantedTimer:
    """Stands for the run's timer: calls that it times move ``now_ns`` on.

    Attributes:
        now_ns: the time.
        rest: called with the nanoseconds of each rest.
    """

    method = "wall"

    def __init__(self, rest: Callable[[int], object] = lambda _: None) -> None:
        self.now_ns = 0
        self.rest = rest

    def time_ns(self, call: Callable[[], object]) -> int:
        """Run a call and return by how much it moved the time."""
        start = self.now_ns
        call()
        return self.now_ns - start

    def agreed_ns(self, own_ns: int) -> int:
        """Return a time as it is."""
        return own_ns

    def seconds(self) -> float:
        """Return the time in seconds."""
        return self.now_ns / 1e9
