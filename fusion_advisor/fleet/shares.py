"""How a rank's time splits into compute, communication and idle time."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from fusion_advisor.capture.trace.kernels import Work

_COLLECTIVE = re.compile(r"^(void )?(nccl|rccl|ncclDevKernel|multimem_|one_shot_all_reduce|two_shot_all_reduce)", re.IGNORECASE)


@functools.cache
def is_collective(kernel_name: str) -> bool:
    """Whether a kernel's name is that of a collective."""
    return _COLLECTIVE.match(kernel_name) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Times of one trace, its devices summed."""

    compute_ns: int
    communication_ns: int
    """Only collectives ran."""
    collectives_ns: tuple[int, ...]
    """Duration of each collective, in order of time."""


def split(work: Sequence[Work]) -> Split:
    """Split the device's busy time.

    Args:
        work: of one trace, in order of time.
    """
    any_ends: dict[int, int] = {}
    compute_ends: dict[int, int] = {}
    any_ns = compute_ns = 0
    collectives_ns = []
    for item in work:
        device, start, stop = item.queue[0], item.start_ns, item.start_ns + item.duration_ns
        any_ns += _new_ns(any_ends, device, start, stop)
        if is_collective(item.kernel_name):
            collectives_ns.append(item.duration_ns)
        else:
            compute_ns += _new_ns(compute_ends, device, start, stop)
    return Split(compute_ns=compute_ns, communication_ns=any_ns - compute_ns, collectives_ns=tuple(collectives_ns))


def _new_ns(ends: dict[int, int], device: int, start_ns: int, stop_ns: int) -> int:
    """Return how much of a span comes after the device's end so far, and move that end on."""
    end_ns = ends.get(device, start_ns)
    if stop_ns <= end_ns:
        return 0
    ends[device] = stop_ns
    return stop_ns - (end_ns if end_ns > start_ns else start_ns)
