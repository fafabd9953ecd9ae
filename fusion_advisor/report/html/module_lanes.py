"""Rows of modules under the strip of the rewritten step, one for each level.

A timeline names kernels, not modules. Where a fused kernel was launched once for each of its sites, the n-th launch is the n-th
site, whose module the report knows. A module's span reaches from its first such launch to its last.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from fusion_advisor.records import Report, Site, Status, Timeline
from fusion_advisor.report import shared_rows
from fusion_advisor.report.escape import visible

LEVELS = 4
MOST_SPANS = 600


@dataclass(frozen=True, slots=True)
class Span:
    """One run of one module."""

    level: int
    name: str
    """The module's own part of the path: ``layers.3``."""
    path: str
    start_ns: int
    end_ns: int


def spans(report: Report, timeline: Timeline) -> tuple[Span, ...]:
    """Return the spans of the step after, level by level; empty where no launch can be attributed to a site.

    Args:
        report: any report with a step after.
        timeline: of that step, on the scale on which it is drawn.
    """
    known = _known(report, timeline)
    found: list[Span] = []
    for level in range(LEVELS):
        for prefix, run in itertools.groupby(known, key=lambda row: row[1][: level + 1]):
            if len(prefix) > level:
                places = [place for place, _ in run]
                end = max(timeline.start_ns[place] + timeline.duration_ns[place] for place in places)
                found.append(Span(level, prefix[-1], ".".join(prefix), timeline.start_ns[places[0]], end))
    return tuple(found) if len(found) <= MOST_SPANS else ()


def _known(report: Report, timeline: Timeline) -> list[tuple[int, tuple[str, ...]]]:
    """Launches whose site is known: (place in the timeline, parts of the module's path), in order of start."""
    after = report.after
    if after is None or shared_rows.is_unchanged(report):
        return []
    chains = {chain.id: chain for chain in report.chains}
    sites: dict[str, list[Site]] = {}
    for fusion in report.fusions:
        if fusion.status is Status.KEPT and fusion.rendered and fusion.chain_id in chains:
            sites.setdefault(fusion.rendered[0].name, []).extend(chains[fusion.chain_id].sites)
    known: list[tuple[int, tuple[str, ...]]] = []
    for name, members in sites.items():
        rows = {at for at, kernel in enumerate(after.kernels) if kernel[0] == name}
        places = [place for place, at in enumerate(timeline.kernel) if at in rows]
        ordered = sorted(members, key=lambda site: site.op_indices[:1])
        if len(places) == len(ordered):
            known += [(place, _parts(site.module_path)) for place, site in zip(places, ordered, strict=True)]
    return sorted(known)


def _parts(path: str) -> tuple[str, ...]:
    """``model.layers.3.mlp`` → ``model``, ``layers.3``, ``mlp``."""
    parts: list[str] = []
    for part in path.split(".") if path else []:
        if part.isdecimal() and parts:
            parts[-1] += f".{part}"
        else:
            parts.append(visible(part, 40))
    return tuple(parts)
