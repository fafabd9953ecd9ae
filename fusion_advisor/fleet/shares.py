"""How a rank's time splits into compute, communication and idle time."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fusion_advisor.capture.trace.kernels import Work

_COLLECTIVE = re.compile(r"^(void )?(nccl|rccl|ncclDevKernel|multimem_|one_shot_all_reduce|two_shot_all_reduce)", re.IGNORECASE)


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
    devices = {item.queue[0] for item in work}
    collective = [item for item in work if is_collective(item.kernel_name)]
    compute = any_ns = 0
    for device in devices:
        own = [item for item in work if item.queue[0] == device]
        any_ns += _union(own)
        compute += _union(item for item in own if not is_collective(item.kernel_name))
    return Split(
        compute_ns=compute,
        communication_ns=any_ns - compute,
        collectives_ns=tuple(item.duration_ns for item in collective),
    )


def _union(work: Iterable[Work]) -> int:
    total = end = 0
    for number, item in enumerate(work):
        end = max(end, item.start_ns) if number else item.start_ns
        stop = item.start_ns + item.duration_ns
        total += max(0, stop - max(end, item.start_ns))
        end = max(end, stop)
    return total
