"""Sequences of fusible kernels that repeat in a trace: chains as far as a trace shows them, without the graph.

In: a trace's work, each kernel joined to its op. Out: chains with all their places.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fusion_advisor.capture.trace.kernels import Work
from fusion_advisor.chains.trace_repeats import find_repeats
from fusion_advisor.records import OpClass

_MOST_BETWEEN = 4
"""Kernels of one GEMM call at most: itself, a fill of its workspace, a split's sum."""

Site = tuple[Work, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeated:
    """A chain and all its places."""

    sites: tuple[Site, ...]
    gemm_at: int = 0
    """A GEMM runs before the kernel of this number, in each site; 0: none does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Fusible work between two kernels that are none, in one queue and one step."""

    work: Site
    is_before_gemm: bool
    """One GEMM call is all that stands between it and the next run."""


def repeated_sites(
    work: Sequence[Work], sequences: Mapping[tuple[str, ...], str], *, least_ns: float
) -> tuple[list[Repeated], float]:
    """Return the chains that repeat, and the share of time that was searched.

    First two runs around one GEMM whose ops together are a library kernel's (SwiGLU runs ``silu``, the other projection,
    ``mul``), then sequences of neighbours.

    Args:
        work: of a trace, in order of time.
        sequences: op names of library kernels.
        least_ns: chains that take less together are left out.
    """
    runs = list(_runs(work))
    tokens = [_tokens(run.work) for run in runs]
    around: dict[tuple[Any, ...], list[tuple[int, Site]]] = {}
    for number, (run, after) in enumerate(itertools.pairwise(runs)):
        if run.is_before_gemm and (*_calls(tokens[number]), *_calls(tokens[number + 1])) in sequences:
            around.setdefault((tokens[number], tokens[number + 1]), []).append((number, run.work + after.work))
    found: list[Repeated] = []
    taken: set[int] = set()
    for (before, _), places in around.items():
        free = [(number, site) for number, site in places if not {number, number + 1} & taken]
        if len(free) > 1 and sum(item.busy_ns for _, site in free for item in site) >= least_ns:
            taken.update(place for number, _ in free for place in (number, number + 1))
            found.append(Repeated(sites=tuple(site for _, site in free), gemm_at=len(before)))
    kept = [number for number in range(len(runs)) if number not in taken]
    left = [runs[number].work for number in kept]
    costs = [[item.busy_ns for item in run] for run in left]
    repeats = find_repeats([tokens[number] for number in kept], costs, least_cost=least_ns)
    for repeat in repeats.found:
        length = len(repeat.items)
        found.append(Repeated(sites=tuple(left[run][start : start + length] for run, start in repeat.places)))
    return found, repeats.searched_share


def _runs(work: Sequence[Work]) -> Iterator[_Run]:
    queues: dict[tuple[tuple[int, int], int], list[Work]] = {}
    for item in work:
        queues.setdefault((item.queue, item.step), []).append(item)
    for queue in queues.values():
        parts = [(is_fusible, tuple(part)) for is_fusible, part in itertools.groupby(queue, key=lambda item: item.is_fusible)]
        for number, (is_fusible, part) in enumerate(parts):
            if is_fusible:
                has_next = number + 2 < len(parts)
                yield _Run(work=part, is_before_gemm=has_next and _is_one_gemm(parts[number + 1][1]))


def _is_one_gemm(between: Site) -> bool:
    gemms = [item for item in between if item.category == OpClass.GEMM]
    others = [item for item in between if item.category != OpClass.GEMM and not item.kernel_name.startswith("Memset")]
    return bool(gemms) and not others and len(between) <= _MOST_BETWEEN and len({item.call for item in gemms}) == 1


def _tokens(site: Site) -> tuple[tuple[str, int], ...]:
    """Name each kernel by its op call's label and its number within that call: the second of one call is no op of its own."""
    tokens: list[tuple[str, int]] = []
    before = None
    for item in site:
        is_same = before is not None and item.call >= 0 and item.call == before.call
        tokens.append((item.label, tokens[-1][1] + 1 if is_same else 0))
        before = item
    return tuple(tokens)


def labels(site: Site) -> tuple[str, ...]:
    """Return the op names of a site, one for each op call."""
    return _calls(_tokens(site))


def _calls(tokens: Iterable[tuple[str, int]]) -> tuple[str, ...]:
    return tuple(label for number, (label, place) in enumerate(tokens) if place == 0 or number == 0)
