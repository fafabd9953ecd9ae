"""Clocks for calls on the host: the one timer that a run is given, so that tests plant times without patching modules.

On a CPU other programs take cores away in the middle of a step, and its wall time says more about them than about the step. There
the busiest thread's CPU time is counted: the scheduler stops that clock while another program has the core. Figures:
``docs/measurements/cpu_clock.md``.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

CPU_TIME = "cpu_time"
"""Method of timings that other programs do not move."""
_TASKS = Path("/proc/self/task")


class HostTimer(Protocol):
    """Times calls and says how much time has gone by.

    Attributes:
        method: of the timings, as in :class:`~fusion_advisor.records.Timing`.
    """

    method: str

    def time_ns(self, call: Callable[[], object]) -> int:
        """Run a call once and return its nanoseconds."""
        ...

    def seconds(self) -> float:
        """Return the time since some moment: budgets are differences of it."""
        ...

    def rest(self, for_ns: int) -> object:
        """Let the device be idle for some nanoseconds."""
        ...

    def agreed_ns(self, own_ns: int) -> int:
        """Return what counts of a time that the device told: of several processes, the slowest one's."""
        ...


class WallTimer:
    """The wall clock: right where the host waits for a device."""

    method = "wall"

    def time_ns(self, call: Callable[[], object]) -> int:
        """Run a call once and return how long it took by the wall clock."""
        start = time.perf_counter_ns()
        call()
        return time.perf_counter_ns() - start

    def seconds(self) -> float:
        """Return the wall clock's seconds."""
        return time.perf_counter()

    def rest(self, for_ns: int) -> None:
        """Wait with the processor awake: the time to wake it up is no part of a step."""
        end_ns = time.perf_counter_ns() + for_ns
        while time.perf_counter_ns() < end_ns:
            pass

    def agreed_ns(self, own_ns: int) -> int:
        """Return a time as it is: there is one process."""
        return own_ns


class BusiestThreadTimer(WallTimer):
    """CPU time of the process's thread that worked longest during the call.

    With threads that sleep while they wait (``OMP_WAIT_POLICY=PASSIVE``), that is the step's wall time on an idle machine, less
    the time to wake threads. Threads that spin are counted while they wait for others.
    """

    method = CPU_TIME

    def time_ns(self, call: Callable[[], object]) -> int:
        """Run a call once and return the CPU time of its busiest thread."""
        before = _clocks()
        start = time.thread_time_ns()
        call()
        own = time.thread_time_ns() - start
        after = _clocks()
        # The calling thread's figure leaves out reading the other threads' clocks.
        caller = threading.get_native_id()
        others = [spent - before.get(thread, 0) for thread, spent in after.items() if thread != caller]
        return max([own, *others])


def _clocks() -> dict[int, int]:
    """Return the CPU nanoseconds of every thread of this process, by its number in the kernel."""
    found = {}
    for task in _TASKS.iterdir():
        thread = int(task.name)
        try:
            found[thread] = time.clock_gettime_ns(~thread << 3 | 6)  # the kernel's name of a thread's scheduler clock
        except OSError:  # the thread ended between the two calls
            continue
    return found


def step_timer(*, on_cuda: bool) -> HostTimer:
    """Return the timer for steps: CPU time on a CPU whose system tells it, the wall clock elsewhere.

    Args:
        on_cuda: whether the step runs on a GPU.
    """
    return BusiestThreadTimer() if not on_cuda and sys.platform == "linux" and _TASKS.is_dir() else WallTimer()
