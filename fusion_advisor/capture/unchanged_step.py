"""Times and traces a step as the model runs it, before anything is rewritten: the eager step, or a training step."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nvtx
import torch

from fusion_advisor.capture.trace import profiler
from fusion_advisor.capture.trace.attribute import Step, median_step
from fusion_advisor.capture.trace.events import Trace
from fusion_advisor.errors import MissingKernels, ProfilerAttached
from fusion_advisor.records import Timing
from fusion_advisor.runtime.external_profiler import BASELINE_RANGE, NVTX_DOMAIN, attached_profiler, recorded_by
from fusion_advisor.timing import wall_timer
from fusion_advisor.timing.clock_sampler import watching
from fusion_advisor.timing.host_timer import HostTimer

KNOWN_TO = 0.02
"""Share of the eager step's time, where ``apply`` times it again at its end, next to what stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """How a step is timed and traced.

    Attributes:
        warmup: runs before anything is measured (fewer when one takes over a tenth of a second).
        runs: wall-time runs at most.
        budget_s: seconds spent on wall times.
        least_s: seconds spent on them at least, beyond ``runs`` and ``budget_s``.
        known_to: share of the wall time; once it is known to within that, the step is timed no longer. 0: for all its runs.
        traced_steps: how many steps are traced, eager and captured; the median of each is kept.
        with_nvtx: open NVTX ranges per phase and module.
        trace_to: keep the raw trace here (``trace.before.json.gz``).
        layouts: rules whose copies may give values another layout in the captured step; None: all.
    """

    warmup: int = 10
    runs: int = 50
    budget_s: float = 3.0
    least_s: float = 0.0
    known_to: float = 0.0
    traced_steps: int = 3
    with_nvtx: bool = False
    trace_to: Path | None = None
    layouts: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """The wall time of a step.

    Attributes:
        title: what was timed, for a message.
        timing: of the runs.
        profiler: ``nsys`` or ``ncu`` where one records this process; empty without one.
    """

    title: str
    timing: Timing
    profiler: str

    @property
    def runs(self) -> int:
        """Timed runs."""
        return len(self.timing.times_ns)

    def refuse_profiler(self) -> None:
        """End a run under nsys or ncu, once the step was timed for it.

        Raises:
            ProfilerAttached: torch.profiler would get no kernel.
        """
        if self.profiler:
            raise ProfilerAttached(tool=self.profiler, recorded=recorded_by(self.profiler, self.runs, self.title))


@dataclass(frozen=True, slots=True, kw_only=True)
class UnchangedStep:
    """A step of a model with its own ops.

    Attributes:
        title: ``eager step`` or ``training step``.
        call: runs it.
        model: whose submodules get a range each.
        on_cuda: whether it runs on a GPU.
        rewind: called ahead of each run, untimed: it puts back what a run moves on.
    """

    title: str
    call: Callable[[], Any]
    model: torch.nn.Module
    on_cuda: bool
    rewind: Callable[[], object] = wall_timer.nothing

    def time(self, how: Measurement, timer: HostTimer) -> TimedStep:
        """Warm the step up and time it without a profiler of ours."""
        with named_range("fa:warmup", is_on=how.with_nvtx):
            _warm_up(self.call, how.warmup, self.rewind, timer)
        tool = attached_profiler(os.environ) if self.on_cuda else ""
        is_recorded = how.with_nvtx or bool(tool)
        with (
            named_range(BASELINE_RANGE, is_on=how.with_nvtx),
            watching(on_cuda=self.on_cuda and not tool) as watch,
            _seen_by_nsys(self.model, on_cuda=self.on_cuda, has_ranges=how.with_nvtx, is_recorded=is_recorded),
        ):

            def untimed() -> None:
                with named_range("fa:clocks", is_on=how.with_nvtx):
                    self.rewind()
                    self.call()

            def between(number: int, last_ns: int) -> None:
                watch.sample(number, 0, untimed, last_ns)

            times = wall_timer.wall_times(
                _numbered(self.call) if how.with_nvtx else self.call,
                runs=how.runs,
                budget_s=how.budget_s,
                least_s=how.least_s,
                known_to=how.known_to,
                on_cuda=self.on_cuda,
                warmup=0,
                before=self.rewind,
                after=between,
                timer=timer,
            )
        return TimedStep(title=self.title, timing=wall_timer.as_timing(times, timer.method, watch.clocks()), profiler=tool)

    def trace(self, how: Measurement) -> tuple[Trace, Step]:
        """Trace some steps with torch.profiler; returns the trace and its median step.

        Raises:
            MissingKernels: the profiler saw launches and no kernel.
        """
        with named_range("fa:trace", is_on=how.with_nvtx), profiler.module_ranges(self.model, torch.profiler.record_function):
            trace = profiler.record(
                self.call, steps=how.traced_steps, on_cuda=self.on_cuda, save_to=how.trace_to, before=self.rewind
            )
        step = median_step(trace, on_cuda=self.on_cuda)
        if step.calls and not step.launches:
            known = "another profiler may hold the device's counters; then its own recording is whole"
            raise MissingKernels(kernels=0, launches=step.calls, known=known)
        return trace, step


def named_range(name: str, *, is_on: bool) -> contextlib.AbstractContextManager[Any]:
    """Open an NVTX range of ours, so that nsys shows the names that the report uses; nothing when NVTX is off."""
    return _nvtx_range(name) if is_on else contextlib.nullcontext()


def _nvtx_range(name: str) -> contextlib.AbstractContextManager[Any]:
    """Open an NVTX range of ours."""
    return nvtx.annotate(name, domain=NVTX_DOMAIN)


@contextlib.contextmanager
def _seen_by_nsys(model: torch.nn.Module, *, on_cuda: bool, has_ranges: bool, is_recorded: bool) -> Iterator[None]:
    """Mark a timed region for ``nsys profile --capture-range=cudaProfilerApi`` and ``ncu --profile-from-start off``.

    Args:
        model: whose submodules' calls get a range each.
        on_cuda: whether there is a device to record.
        has_ranges: open those ranges.
        is_recorded: start and stop the recording.
    """
    with profiler.module_ranges(model, _nvtx_range) if has_ranges else contextlib.nullcontext():
        if not (on_cuda and is_recorded):
            yield
            return
        torch.cuda.profiler.start()
        try:
            yield
        finally:
            torch.cuda.profiler.stop()


def _numbered(step: Callable[[], Any]) -> Callable[[], Any]:
    """Give each run of a step an NVTX range with its number as payload; one name, for nvtx keeps every name for good."""
    numbers = itertools.count()

    def run() -> Any:
        with nvtx.annotate("fa:step", domain=NVTX_DOMAIN, payload=next(numbers)):
            return step()

    return run


def _warm_up(step: Callable[[], Any], wanted: int, rewind: Callable[[], object], timer: HostTimer) -> None:
    """Run a step at least twice before any run counts; fewer times than asked for when one takes over a tenth of a second."""
    on_cuda = torch.cuda.is_initialized()
    first = wall_timer.wall_times(step, runs=1, budget_s=0.0, on_cuda=on_cuda, warmup=1, before=rewind, timer=timer)
    for _ in range(max(0, min(wanted, int(1e9 / max(first[-1], 1))))):
        rewind()
        step()
