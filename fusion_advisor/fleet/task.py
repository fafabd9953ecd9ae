"""What an engine hands to a worker, and what it gets back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fusion_advisor.records.trace import TraceSource

MOST_EVENTS = 800_000
"""Events of a trace that a worker holds: about 700 MB as objects."""
WORKER_DIED = "worker-died"
"""In place of an error's code: the process that read the trace was killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One trace to reduce."""

    source: TraceSource
    parts: Path
    sequences: Mapping[tuple[str, ...], str]
    """Op names of library kernels, found once for all workers: the references run for 0.6 s."""
    most_events: int = MOST_EVENTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """One trace is done."""

    source: TraceSource
    digest: str
    """Empty: the file could not be read, so there is no part."""
    json_bytes: int = 0
    error_code: str = ""
    error: str = ""
    is_known: bool = False
    """Its part was there."""
    cpu_ns: int = 0
    """Processor time that it took."""
    peak_bytes: int = 0
    """Most memory that its worker has used so far."""


Reduce = Callable[[Task], Reduced]
