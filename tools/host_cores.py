"""How fast each of a host's cores runs Python now: python -m tools.host_cores.

What waits for Python (eager steps, torch.compile's first call, dynamo in a warm-up) is as fast as the core that it runs on, and
on a host cores can be unequal: 27 to 48 ms for this loop on one with an H200, where others were the slow ones minutes later.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Iterator

_ITERATIONS = 400_000
_REPEATS = 5


def loop_ms() -> float:
    """Time arithmetic on small integers, which nobody's memory traffic slows down."""
    total, started = 0, time.perf_counter()
    for number in range(_ITERATIONS):
        total += number * number % 7
    return (time.perf_counter() - started) * 1e3


def lines() -> Iterator[str]:
    """A line for each core that this process may use; its affinity is put back."""
    allowed = os.sched_getaffinity(0)
    yield "core  least  median  most, ms"
    try:
        for core in sorted(allowed):
            os.sched_setaffinity(0, {core})
            times = [loop_ms() for _ in range(_REPEATS)]
            yield f"{core:4d} {min(times):6.1f} {statistics.median(times):7.1f} {max(times):5.1f}"
    finally:
        os.sched_setaffinity(0, allowed)


if __name__ == "__main__":
    for line in lines():
        sys.stdout.write(f"{line}\n")
