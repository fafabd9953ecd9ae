"""Lets the ranks of one machine begin a timed run at the same moment.

What ranks tell each other does not reach them at the same time: the last one to tell goes on at once, the others when they are
woken. Whoever goes on first waits in its first collective, and that wait is no part of the step. Figures:
``docs/measurements/ranks.md``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from fusion_advisor.ranks.group import Ranks

AHEAD_NS = 2_000_000
"""From the last rank's word to the common moment: more than a rank on a slow host takes to be woken."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")
"""Equal in all processes of one machine, whose monotonic clocks are one."""


def this_machine() -> str:
    """Return a name of the machine's running system; empty where it has none."""
    try:
        return _BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return ""


class CommonStart:
    """Waits for a moment that the ranks have agreed on. Ranks of several machines have no common clock, and do not wait.

    Args:
        ranks: of the run.
        machine: this rank's; equal names share a clock.
        clock: reads its nanoseconds.
    """

    def __init__(self, ranks: Ranks, machine: str | None = None, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._ranks = ranks
        self._clock = clock
        self._machine = this_machine() if machine is None else machine
        self._is_shared: bool | None = None

    def wait(self) -> bool:
        """Return at the agreed moment; tells whether there was one."""
        if self._is_shared is None:
            machines = self._ranks.gather("the machine of a timed run", self._machine)
            self._is_shared = bool(machines[0]) and len(set(machines)) == 1
        if not self._is_shared:
            return False
        begin_ns = max(self._ranks.gather("the begin of a timed run", self._clock())) + AHEAD_NS
        while self._clock() < begin_ns:  # sleeping would end at another moment on each rank
            pass
        return True
