"""Reading the device's clocks between timed runs, while further runs of the same step are queued on it.

A reading takes up to milliseconds and a lock in the driver, so none lies within a timed run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

import torch

from fusion_advisor.records import Clocks, ClockSample
from fusion_advisor.timing import nvml
from fusion_advisor.timing.wall_timer import nothing

_QUEUED_NS = 5_000_000
_MOST_QUEUED = 16
_LONG_NS = 1_000_000_000
"""Longer runs (a whole ``generate``) are sampled once: each sample takes a run more."""
_LOOK_S = 0.6
"""Of running before the power limit is believed or not; it shows within 0.2 s (ViT-B/16, batch 64, H200)."""
_POWER_LIMIT = "sw_power_cap"


class Watch:
    """Collects samples by candidate.

    Attributes:
        missing: why there will be none; empty where there will.

    Args:
        read: reads the device's clocks; None where there are none.
        missing: see above.
        now_ns: the time.
    """

    def __init__(
        self, read: Callable[[], ClockSample] | None, *, missing: str = "", now_ns: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        self.missing = missing
        self._now_ns = now_ns
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
        self._samples.setdefault(position, []).append(self._at_work(self._read, queue, last_ns))

    def runs_at_power_limit(self, queue: Callable[[], object], wait: Callable[[], object]) -> bool:
        """Run a step again and again for a while; return whether the power limit holds its clock down then.

        A limit that did not show in the first half of that time is not waited for.
        One that takes longer than a second is not run again: it brings the clock to where it keeps it by itself.

        Args:
            queue: starts one run of the step and does not wait for it.
            wait: returns when the device has nothing left to do.
        """
        if self._read is None:
            return False
        wait()
        start = self._now_ns()
        queue()
        wait()
        step_ns = self._now_ns() - start
        if step_ns > _LONG_NS:
            return False
        late: list[ClockSample] = []
        was_seen = False
        while (taken_ns := self._now_ns() - start) < 1e9 * _LOOK_S or not late:
            sample = self._at_work(self._read, queue, step_ns)
            was_seen |= _POWER_LIMIT in (sample.reasons or ())
            if taken_ns > 1e9 * _LOOK_S / 2:
                if not was_seen:
                    return False
                late.append(sample)
            wait()
        return is_at_power_limit(Clocks(samples=tuple(late)))

    @staticmethod
    def _at_work(read: Callable[[], ClockSample], queue: Callable[[], object], step_ns: int) -> ClockSample:
        for _ in range(min(_MOST_QUEUED, _QUEUED_NS // max(step_ns, 1) + 1)):
            queue()
        return read()

    def clocks(self, position: int = 0) -> Clocks | None:
        """Return what was seen of a candidate; None where there is nothing that has clocks."""
        if self._read is None and not self.missing:
            return None
        return Clocks(samples=tuple(self._samples.get(position, ())), missing=self.missing)


@contextmanager
def watching(*, on_cuda: bool, uuid: str | None = None) -> Iterator[Watch]:
    """Watch a CUDA device; on a CPU nothing is read.

    Args:
        on_cuda: whether there is one.
        uuid: of the device; None: the current one's.
    """
    if not on_cuda:
        yield Watch(None)
        return
    uuid = uuid or str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    with ExitStack() as stack:
        try:
            watch = Watch(stack.enter_context(nvml.opened(uuid)).read)
        except nvml.NoNvml as error:
            watch = Watch(None, missing=str(error))
        yield watch


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauge:
    """How a CUDA device is watched and waited for.

    Attributes:
        watching: opens a :class:`Watch`.
        wait: returns when the device has nothing left to do.
    """

    watching: Callable[..., AbstractContextManager[Watch]] = watching
    wait: Callable[[], object] = torch.cuda.synchronize


CURRENT_DEVICE = Gauge()


def is_held_down(
    calls: Sequence[Callable[[], object]],
    *,
    on_cuda: bool,
    before: Callable[[], object] = nothing,
    gauge: Gauge = CURRENT_DEVICE,
) -> bool:
    """Whether the power limit sets the clock of any step that runs again and again.

    Args:
        calls: warm; each starts one run.
        on_cuda: whether they run on the current CUDA device; a CPU has no such limit.
        before: called ahead of each run.
        gauge: watches the device.
    """

    def queued(call: Callable[[], object]) -> Callable[[], None]:
        def queue() -> None:
            before()
            call()

        return queue

    with torch.no_grad(), gauge.watching(on_cuda=on_cuda) as watch:
        return any(watch.runs_at_power_limit(queued(call), gauge.wait) for call in calls)


def is_at_power_limit(clocks: Clocks | None) -> bool:
    """Whether the power limit throttled the device in most readings."""
    samples = clocks.samples if clocks is not None else ()
    return 2 * sum(_POWER_LIMIT in (sample.reasons or ()) for sample in samples) > len(samples)
