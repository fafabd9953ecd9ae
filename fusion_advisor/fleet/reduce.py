"""Reduces one trace to its part: chains, classes and shares of time, a few kB of Parquet for up to 2 GB of JSON."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import os
import re
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import fsspec
from isal import igzip, isal_zlib

from fusion_advisor.capture.trace.chrome_trace import TraceFile, Unpacker
from fusion_advisor.capture.trace.kernels import Work
from fusion_advisor.errors import AdvisorError, CannotWrite, UnreadableTrace
from fusion_advisor.fleet.identity import clean, identify
from fusion_advisor.fleet.parts import part_path, read_part, write_part
from fusion_advisor.fleet.shares import is_collective, split
from fusion_advisor.fleet.task import Reduced, Task
from fusion_advisor.fleet.window import read_window
from fusion_advisor.fuse.modes.trace_profile import join_trace, rank_trace, span_ns
from fusion_advisor.records import TraceChain, TraceReport
from fusion_advisor.records.trace import ClassTime, FleetChain, TracePart, TraceSource
from fusion_advisor.runtime.gc_pause import collector_paused

COMMUNICATION = "communication"
LEAST_SHARE = 0.001
"""Chains with a smaller share of a trace's busy time are left out of its part."""
REACHED_SHARE = (0.78, 0.94)
"""Share of the memory limit that library kernels reach: 10th percentile and median of the 234 rows of
``reports/examples/kernels-h200/bench.json`` that move a MB or more. The upper bound takes the limit itself."""
_BUG = "bug"
_BLOCK = 1 << 20
_IGZIP = Unpacker(lambda file: igzip.IGzipFile(fileobj=file), (gzip.BadGzipFile, cast("type[Exception]", isal_zlib.error)))
"""Takes 0.4 of zlib's time."""


def reduce_trace(task: Task) -> Reduced:
    """Read a trace, write its part, and say what that took; see :func:`_reduced`."""
    began = time.process_time_ns()
    result = _reduced(task)
    return replace(result, cpu_ns=time.process_time_ns() - began, peak_bytes=_peak_bytes())


def _peak_bytes() -> int:
    """Return the most memory that this process has used: ``ru_maxrss`` would count its parent's at the start."""
    status = Path("/proc/self/status")
    if status.is_file():
        found = re.search(r"^VmHWM:\s*(\d+) kB", status.read_text(), re.MULTILINE)
        return int(found[1]) * 1024 if found else 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _reduced(task: Task) -> Reduced:
    """Read a trace and write its part.

    A trace that cannot be ranked gives a part with its error, so that it is not read again. A file that cannot be opened gives
    none: it may be there the next time.

    Raises:
        CannotWrite: the part could not be written.
    """
    source = task.source
    try:
        with _local(source) as path:
            digest = _digest(path)
            if part_path(task.parts, digest).is_file():
                part = read_part(task.parts, digest)
                return Reduced(source=source, digest=digest, error_code=part.error_code, error=part.error, is_known=True)
            part = _part(task, path, digest)
    except OSError as error:
        return Reduced(source=source, digest="", error_code=UnreadableTrace.code, error=clean(error.strerror or str(error)))
    try:
        write_part(task.parts, part)
    except OSError as error:
        raise CannotWrite(path=task.parts, detail=error.strerror or str(error)) from error
    return Reduced(source=source, digest=digest, json_bytes=part.json_bytes, error_code=part.error_code, error=part.error)


def _part(task: Task, path: Path, digest: str) -> TracePart:
    known = TracePart(
        digest=digest, url=task.source.url, size_bytes=task.source.size_bytes, version=task.source.version, json_bytes=0
    )
    file = TraceFile(path, unpacker=_IGZIP)
    try:
        return _ranked(task, file, known)
    except AdvisorError as error:
        code, text = error.code, str(error).replace(str(path), task.source.url)
    except MemoryError:
        code, text = UnreadableTrace.code, "it does not fit into memory"
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 - one hostile trace must not end the run; its row carries the place of the fault
        place = traceback.extract_tb(error.__traceback__)[-1]
        code, text = _BUG, f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
    return TracePart(
        digest=known.digest,
        url=known.url,
        size_bytes=known.size_bytes,
        version=known.version,
        json_bytes=file.read_bytes,
        error_code=code,
        error=clean(text),
    )


@collector_paused()
def _ranked(task: Task, file: TraceFile, known: TracePart) -> TracePart:
    window = read_window(file, task.most_events)
    found = join_trace(file, window.trace)
    report = rank_trace(found, task.sequences, min_share=LEAST_SHARE, top=10_000)
    times = split(found.work)
    who = identify(file.facts, known.url)
    return TracePart(
        digest=known.digest,
        url=known.url,
        size_bytes=known.size_bytes,
        version=known.version,
        json_bytes=file.read_bytes,
        job=who.job,
        model=who.model,
        rank=who.rank,
        world_size=who.world_size,
        gpu=who.gpu,
        versions=who.versions,
        taken_at_ns=who.taken_at_ns,
        steps=report.steps,
        read_share=window.read_share,
        launches=report.launches,
        span_ns=_spans(found.work),
        compute_ns=times.compute_ns,
        communication_ns=times.communication_ns,
        collectives_ns=times.collectives_ns,
        has_shapes=report.has_shapes,
        classes=_classes(found.work),
        chains=tuple(_chain(chain) for chain in report.chains if _is_whole_number(report)),
    )


def _is_whole_number(report: TraceReport) -> bool:
    return report.busy_ns < 1 << 60  # a hostile clock: times that no column holds


def _spans(work: Sequence[Work]) -> int:
    """Return the time from the first to the last kernel, each device by itself."""
    devices = {item.queue[0] for item in work}
    return sum(span_ns([item for item in work if item.queue[0] == device]) for device in devices)


def _classes(work: Sequence[Work]) -> tuple[ClassTime, ...]:
    sums: dict[str, tuple[int, int]] = {}
    for item in work:
        category = COMMUNICATION if is_collective(item.kernel_name) else item.category
        count, ns = sums.get(category, (0, 0))
        sums[category] = count + 1, ns + item.busy_ns
    rows = sorted(sums.items(), key=lambda row: -row[1][1])
    return tuple(ClassTime(category=category, kernels=count, device_ns=ns) for category, (count, ns) in rows)


def _chain(chain: TraceChain) -> FleetChain:
    """Return a chain with what one kernel per site would save: at the limit, and at what library kernels reach of it.

    A chain that no library kernel computes may also not be fusible at all, so its lower bound is 0.
    """
    kernel = chain.kernel if chain.is_whole else ""
    low = middle = high = None
    if chain.saving_bound_ns is not None:
        high = chain.saving_bound_ns
        limit_ns = chain.device_ns - high
        low, middle = (max(0, chain.device_ns - round(limit_ns / share)) for share in REACHED_SHARE)
        low = low if kernel else 0
    return FleetChain(
        ops=" → ".join(map(clean, chain.ops)),
        kernel=kernel,
        sites=chain.sites,
        launches=chain.launches,
        device_ns=chain.device_ns,
        saving_low_ns=low,
        saving_ns=middle,
        saving_high_ns=high,
    )


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _local(source: TraceSource) -> Iterator[Path]:
    """Give the trace as a local file; one that lies elsewhere is copied for as long as it is read."""
    if "://" not in source.url:
        path = Path(source.url)
        if not path.is_file():
            raise OSError(2, "it is no file", source.url)
        yield path
        return
    handle, name = tempfile.mkstemp(prefix="fusion-advisor-", suffix=".trace")
    try:
        with os.fdopen(handle, "wb") as target, fsspec.open(source.url, "rb", compression=None) as remote:
            shutil.copyfileobj(remote, target, _BLOCK)
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)
