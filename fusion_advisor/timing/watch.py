"""Reading the device's clocks between timed runs, while further runs of the same step are queued on it.

A reading takes up to milliseconds and a lock in the driver, so none lies within a timed run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from fusion_advisor.records import Clocks, ClockSample
from fusion_advisor.timing import nvml

_QUEUED_NS = 5_000_000
_MOST_QUEUED = 16
_LONG_NS = 1_000_000_000
"""Longer runs (a whole ``generate``) are sampled once: each sample takes a run more."""


class Watch:
    """Collects samples by candidate.

    Attributes:
        missing: why there will be none; empty where there will.
    """

    def __init__(self, read: Callable[[], ClockSample] | None, *, missing: str = "") -> None:
        self.missing = missing
        self._read = read
        self._samples: dict[int, list[ClockSample]] = {}

    def sample(self, number: int, position: int, queue: Callable[[], object], last_ns: int) -> None:
        """Take a sample after a candidate's timed run; after the first one and then ever more rarely.

        Args:
            number: of the round, from 0.
            position: of the candidate.
            queue: starts one run of the step and does not wait for it.
            last_ns: what the step just took: short ones are queued several times, so that the device is at work when it is asked.
        """
        is_long = last_ns > _LONG_NS and number > 0
        if self._read is None or number & (number - 1) or is_long:
            return
        for _ in range(min(_MOST_QUEUED, _QUEUED_NS // max(last_ns, 1) + 1)):
            queue()
        self._samples.setdefault(position, []).append(self._read())

    def clocks(self, position: int = 0) -> Clocks | None:
        """Return what was seen of a candidate; None where there is nothing that has clocks."""
        if self._read is None and not self.missing:
            return None
        return Clocks(samples=tuple(self._samples.get(position, ())), missing=self.missing)


@contextmanager
def watching(*, on_cuda: bool) -> Iterator[Watch]:
    """Watch the current CUDA device; on a CPU nothing is read."""
    if not on_cuda:
        yield Watch(None)
        return
    uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    with ExitStack() as stack:
        try:
            watch = Watch(stack.enter_context(nvml.opened(uuid)).read)
        except nvml.NoNvml as error:
            watch = Watch(None, missing=str(error))
        yield watch
