"""Reads a trace within a limit of events: all of it, or its first whole steps.

A trace of 2 GB holds millions of events, which as objects take several times its size. Where more events are used than fit, the
trace is read a second time and only what began within the first whole steps is kept; the report says so.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fusion_advisor.capture.trace.chrome_trace import TraceFile
from fusion_advisor.capture.trace.events import Trace, is_step, is_used, read_events, start_of
from fusion_advisor.capture.trace.trace_event import TraceEvent
from fusion_advisor.errors import TraceTooLarge
from fusion_advisor.fleet.task import MOST_EVENTS

_LEAST_SHARE = 1 / 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A trace's events, and which share of its time they are."""

    trace: Trace
    read_share: float


def read_window(file: TraceFile, most_events: int = MOST_EVENTS) -> Window:
    """Read a trace, or as many of its first steps as fit.

    Raises:
        TraceTooLarge: not even one step fits.
    """
    counted = _Counted(file, most_events)
    trace = read_events(itertools.chain.from_iterable(counted.parts()))
    if counted.used <= most_events:
        return Window(trace=trace, read_share=1.0)
    starts = [events[0].start_ns for events in (trace.kernels, trace.launches, trace.ranges, trace.cpu_ops) if events]
    del trace
    until_ns, share = _until(file, min(starts), max([*starts, counted.last_ns]), most_events / counted.used)
    trace = read_events(event for event in file.typed_events() if is_used(event) and start_of(event) <= until_ns)
    calls = {call.correlation for call in trace.launches}
    whole = [kernel for kernel in trace.kernels if kernel.correlation in calls or kernel.correlation < 0]
    window = Trace(
        kernels=tuple(whole),
        launches=_launched(trace, whole),
        ranges=tuple(span for span in trace.ranges if span.end_ns <= until_ns or not is_step(span)),
        cpu_ops=trace.cpu_ops,
        unreadable=trace.unreadable,
    )
    return Window(trace=window, read_share=share)


def _launched(trace: Trace, kernels: list[Any]) -> tuple[Any, ...]:
    """Return the launches whose kernels began inside the window; those of its last moments run after it."""
    ran = {kernel.correlation for kernel in kernels}
    return tuple(call for call in trace.launches if call.correlation in ran)


class _Counted:
    """Hands on events until too many were used; goes on counting."""

    def __init__(self, file: TraceFile, most: int) -> None:
        self._file, self._most = file, most
        self.used = 0
        self.last_ns = 0

    def parts(self) -> Iterator[list[TraceEvent | dict[str, Any]]]:
        for part in self._file.typed_parts():
            used = [event for event in part if is_used(event)]
            room = max(0, self._most - self.used)
            self.used += len(used)
            yield used[:room]
            self.last_ns = max(self.last_ns, *map(start_of, used[room:]), 0)


def _until(file: TraceFile, first_ns: int, last_ns: int, share: float) -> tuple[int, float]:
    """Return the moment at which the window ends, and its share of the trace's time."""
    steps = read_events(event for event in file.typed_events() if is_used(event) and _is_step(event)).ranges
    steps = tuple(span for span in steps if is_step(span))
    if not steps:
        if share < _LEAST_SHARE:
            raise TraceTooLarge(name=file.path, events=f"{file.events:,}")
        return first_ns + round((last_ns - first_ns) * share), share
    fitting = int(len(steps) * share)
    if not fitting:
        raise TraceTooLarge(name=file.path, events=f"{file.events:,}")
    whole_ns = sum(span.duration_ns for span in steps)
    return steps[fitting - 1].end_ns, sum(span.duration_ns for span in steps[:fitting]) / max(whole_ns, 1)


def _is_step(event: TraceEvent | dict[str, Any]) -> bool:
    name = event.name if isinstance(event, TraceEvent) else event.get("name")
    return isinstance(name, str) and name.startswith(("fa:step:", "ProfilerStep#"))
