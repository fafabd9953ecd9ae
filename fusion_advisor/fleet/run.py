"""Runs a fleet: finds the traces, reads those that are new, ranks all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fusion_advisor.errors import CannotWrite
from fusion_advisor.fleet import local_engine, ray_engine
from fusion_advisor.fleet.find import find_traces
from fusion_advisor.fleet.parts import whole_parts
from fusion_advisor.fleet.rank import Question, rank_fleet, read_job_pattern
from fusion_advisor.fleet.reduce import reduce_trace
from fusion_advisor.fleet.task import MOST_EVENTS, Reduced, Task
from fusion_advisor.fleet.weights import read_weights
from fusion_advisor.library.trace_hints import library_sequences
from fusion_advisor.records.trace import FailedTrace, FleetReport, TraceSource

PARTS = "parts"


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """What the command line says."""

    patterns: tuple[str, ...]
    output: Path
    engine: str = "local"
    address: str = ""
    processes: int = 0
    """0: one for each core."""
    min_share: float = 0.001
    most_events: int = MOST_EVENTS
    kernel_dirs: tuple[Path, ...] = ()
    top: int = 30
    job_pattern: str = ""
    weights: Path | None = None
    tool: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """How far a run is."""

    done: int
    traces: int
    failed: int
    json_bytes: int
    done_bytes: int
    """Of the files, as they lie there."""
    all_bytes: int
    cpu_ns: int
    """Processor time of all traces."""
    peak_bytes: int
    """Most memory that a worker used."""


def run_fleet(options: FleetOptions, say: Callable[[State], None] = lambda _: None) -> FleetReport:
    """Reduce the traces that are new and rank all that the patterns name.

    Args:
        options: of the run.
        say: is given the state after each trace.

    Raises:
        NoTraces: no file matches.
        CannotWrite: the disk is full.
        BadWeights: the file of --weights cannot be used.
        EngineLost: Ray went away.
        UsageError: ``--job`` is no regular expression; nothing was read.
    """
    job_pattern = read_job_pattern(options.job_pattern)
    weights = read_weights(options.weights) if options.weights else None
    sources = find_traces(options.patterns)
    parts = options.output / PARTS
    try:
        parts.mkdir(parents=True, exist_ok=True)
        for rest in parts.glob(".*.tmp"):
            rest.unlink(missing_ok=True)
    except OSError as error:
        raise CannotWrite(path=parts, detail=error.strerror or str(error)) from error
    digests, unread = _known(parts, sources)
    failed = _read(options, parts, sources, unread, digests, say)
    question = Question(
        parts=parts,
        digests=digests,
        failed=tuple(failed),
        weights=weights,
        patterns=options.patterns,
        job_pattern=job_pattern,
        min_share=options.min_share,
        top=options.top,
        tool=options.tool,
    )
    return rank_fleet(question)


def _read(
    options: FleetOptions,
    parts: Path,
    sources: Sequence[TraceSource],
    unread: Sequence[TraceSource],
    digests: dict[str, str],
    say: Callable[[State], None],
) -> list[FailedTrace]:
    """Reduce what is unread, add to ``digests`` what has a part, and return what has none."""
    sequences = library_sequences(options.kernel_dirs) if unread else {}
    tasks = [
        Task(source=source, parts=parts.absolute(), sequences=sequences, most_events=options.most_events) for source in unread
    ]
    all_bytes = sum(source.size_bytes for source in sources)
    failed: list[FailedTrace] = []
    state = State(
        done=len(sources) - len(tasks),
        traces=len(sources),
        failed=0,
        json_bytes=0,
        done_bytes=all_bytes - sum(source.size_bytes for source in unread),
        all_bytes=all_bytes,
        cpu_ns=0,
        peak_bytes=0,
    )
    for result in _results(options, tasks):
        if result.digest:
            digests[result.source.url] = result.digest
        else:
            failed.append(FailedTrace(url=result.source.url, code=result.error_code, error=result.error))
        state = replace(
            state,
            done=state.done + 1,
            failed=state.failed + bool(result.error_code),
            json_bytes=state.json_bytes + result.json_bytes,
            done_bytes=state.done_bytes + result.source.size_bytes,
            cpu_ns=state.cpu_ns + result.cpu_ns,
            peak_bytes=max(state.peak_bytes, result.peak_bytes),
        )
        say(state)
    return failed


def _known(parts: Path, sources: Sequence[TraceSource]) -> tuple[dict[str, str], list[TraceSource]]:
    """Return the digests of the traces that have a part, and the traces that must be read."""
    known = {(url, size, version): digest for digest, url, size, version in whole_parts(parts)}
    digests: dict[str, str] = {}
    unread = []
    for source in sources:
        digest = known.get((source.url, source.size_bytes, source.version)) if source.version else None
        if digest is None:
            unread.append(source)
        else:
            digests[source.url] = digest
    return digests, unread


def _results(options: FleetOptions, tasks: Sequence[Task]) -> Iterator[Reduced]:
    if not tasks:
        return iter(())
    if options.engine == "ray":
        return ray_engine.run(tasks, reduce_trace, address=options.address)
    return local_engine.run(tasks, reduce_trace, processes=options.processes)
