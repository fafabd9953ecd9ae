"""Traces of a run inside its HTML page, so that one file holds everything; what would make it too large stays out, and why."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fusion_advisor import units
from fusion_advisor.records import Report
from fusion_advisor.report.baseline_rows import is_unchanged

BEFORE, AFTER = "trace.before.json.gz", "trace.after.json.gz"
MAX_BYTES = 13_500_000
"""Of all traces of a page, compressed: as base64 a third more, which with the rest of the page stays below 25 MB."""
LARGE_PAGE_BYTES = 8_000_000
"""A larger page is slow to open and to send, so a warning gives its size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedTrace:
    """One trace, or why it is not in the page."""

    name: str
    step: str
    """The traced step, in words."""
    data: bytes = b""
    """As on disk: gzipped JSON."""
    refusal: str = ""
    """One sentence; empty where ``data`` is there."""


def read_traces(directory: Path, report: Report, *, max_bytes: int = MAX_BYTES) -> tuple[EmbeddedTrace, ...]:
    """Read the traces that a report's run has written.

    Args:
        directory: of the run.
        report: of the run; where nothing was kept there is one trace only.
        max_bytes: of all traces together. A trace that does not fit is left out; a smaller later trace may still fit.
    """
    wanted = [(BEFORE, "the eager step")]
    if report.after is not None and not is_unchanged(report):
        wanted.append((AFTER, "the step with its kept rewrites"))
    found: list[EmbeddedTrace] = []
    left = max_bytes
    for name, step in wanted:
        path = directory / name
        size = path.stat().st_size if path.is_file() else None
        if size is None:
            refusal = f"{name} is not embedded: the run directory does not hold it"
        elif size > left:
            taken = f", of which {units.size(max_bytes - left)} are taken" if left < max_bytes else ""
            refusal = (
                f"{name} is not embedded: it has {units.size(size)}, and a page takes {units.size(max_bytes)} of traces{taken}; "
                "it lies in the run directory"
            )
        else:
            found.append(EmbeddedTrace(name=name, step=step, data=path.read_bytes()))
            left -= size
            continue
        found.append(EmbeddedTrace(name=name, step=step, refusal=f"{refusal}."))
    return tuple(found)


def warnings(traces: tuple[EmbeddedTrace, ...], page_bytes: int) -> list[str]:
    """Return warnings about a page with embedded traces: traces that were left out, and its size."""
    said = [trace.refusal for trace in traces if trace.refusal]
    if traces and page_bytes > LARGE_PAGE_BYTES:
        said.append(f"report.html has {units.size(page_bytes)} with its traces.")
    return said
