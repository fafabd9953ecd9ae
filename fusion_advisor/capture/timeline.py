"""One profiled step as raw events: kernels, the calls that launched them, CPU ops and our own ranges.

The events come from the chrome trace that torch.profiler exports (its one public, complete form): ``key_averages()`` counts
device time twice, and its op rows hide which kernel ran. Times taken under the profiler are only ever used as shares.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_RUNTIME = frozenset({"cuda_runtime", "cuda_driver"})
_LAUNCHING = ("LaunchKernel", "GraphLaunch", "Memcpy", "Memset")
_NS_PER_US = 1000
_MARKER = b"USDT:"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event of a trace; times in nanoseconds on the trace's own clock."""

    name: str
    start_ns: int
    duration_ns: int
    thread: str
    correlation: int = -1
    """Joins a kernel to the call that launched it."""
    external: int = -1
    """Joins a kernel to the innermost CPU op it was launched from."""
    stream: int = 0
    grid: tuple[int, ...] = ()
    block: tuple[int, ...] = ()

    @property
    def end_ns(self) -> int:
        """End of the event."""
        return self.start_ns + self.duration_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The events of one or more steps, each list in order of time."""

    kernels: tuple[Event, ...]
    launches: tuple[Event, ...]
    ranges: tuple[Event, ...]
    """Our own ``fa:`` ranges."""
    cpu_ops: tuple[Event, ...]


def record(
    step: Callable[[], object],
    *,
    steps: int,
    on_cuda: bool,
    save_to: Path | None = None,
    before: Callable[[], object] = lambda: None,
) -> Trace:
    """Run ``step`` under torch.profiler ``steps`` times, each in a range ``fa:step:<n>``.

    Args:
        step: the work; it must have been warmed up.
        steps: how many times it is recorded.
        on_cuda: record device activity.
        save_to: keep the raw trace here, gzipped (it opens in Perfetto).
        before: called ahead of each step, outside its range (it puts back what a step moves on).
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if on_cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profiler = torch.profiler.profile(activities=activities, acc_events=True)
    with markers_logged():
        profiler.start()
    try:
        for number in range(steps):
            before()
            if on_cuda:
                torch.cuda.synchronize()
            with torch.profiler.record_function(f"fa:step:{number}"):
                step()
                if on_cuda:
                    torch.cuda.synchronize()
    finally:
        with markers_logged():
            profiler.stop()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        if save_to is not None:
            save_to.parent.mkdir(parents=True, exist_ok=True)
            with path.open("rb") as raw, gzip.open(save_to, "wb", compresslevel=4) as packed:
                shutil.copyfileobj(raw, packed)
        return read_events(json.loads(path.read_text(encoding="utf-8", errors="replace"), strict=False)["traceEvents"])


@contextlib.contextmanager
def markers_logged() -> Iterator[None]:
    """Send Kineto's ``USDT:`` lines to the log instead of the terminal; whatever else is written to stderr still gets there.

    Kineto writes them to file descriptor 2 at a level above its errors, so its own switch (``KINETO_LOG_LEVEL``) would hide both.
    """
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    try:
        terminal = os.dup(2)
    except OSError:  # no stderr at all
        yield
        return
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(terminal, 2)
            os.close(terminal)
            held.seek(0)
            for line in held.read().splitlines(keepends=True):
                if line.startswith(_MARKER):
                    _log.debug(line.decode(errors="replace").rstrip())
                else:
                    os.write(2, line)


def read_events(raw_events: list[dict[str, Any]]) -> Trace:
    """Sort a chrome trace's events; annotations mirrored onto the device are left out (they count twice)."""
    kernels: list[Event] = []
    launches: list[Event] = []
    ranges: list[Event] = []
    cpu_ops: list[Event] = []
    for raw in raw_events:
        category = raw.get("cat")
        if raw.get("ph") != "X" or category is None:
            continue
        if category in _DEVICE:
            kernels.append(_event(raw))
        elif category in _RUNTIME:
            if any(word in raw["name"] for word in _LAUNCHING):
                launches.append(_event(raw))
        elif category == "user_annotation":
            if raw["name"].startswith("fa:"):
                ranges.append(_event(raw))
        elif category == "cpu_op":
            cpu_ops.append(_event(raw))
    for events in (kernels, launches, ranges, cpu_ops):
        events.sort(key=lambda event: (event.start_ns, -event.duration_ns))
    return Trace(kernels=tuple(kernels), launches=tuple(launches), ranges=tuple(ranges), cpu_ops=tuple(cpu_ops))


def _event(raw: dict[str, Any]) -> Event:
    arguments = raw.get("args", {})
    return Event(
        name=str(raw["name"]),
        start_ns=round(float(raw["ts"]) * _NS_PER_US),
        duration_ns=round(float(raw.get("dur", 0)) * _NS_PER_US),
        thread=f"{raw.get('pid')}/{raw.get('tid')}",
        correlation=int(arguments.get("correlation", -1)),
        external=int(arguments.get("External id", -1)),
        stream=int(arguments.get("stream", 0)) if str(arguments.get("stream", 0)).isdigit() else 0,
        grid=tuple(arguments.get("grid", ())),
        block=tuple(arguments.get("block", ())),
    )
