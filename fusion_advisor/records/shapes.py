"""Ranges of sizes that one plan serves: their pieces, and what was measured at points of them."""

from __future__ import annotations

from dataclasses import dataclass

from fusion_advisor.records.chain import Match
from fusion_advisor.records.rewrite import RenderedKernel
from fusion_advisor.records.run import Timing


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeRange:
    """The sizes that a named dim of the inputs may have."""

    name: str
    """``batch``, ``seq`` …"""
    least: int
    most: int

    def holds(self, size: int) -> bool:
        """Whether a size lies in it."""
        return self.least <= size <= self.most

    @property
    def text(self) -> str:
        """``batch=1..16``; ``batch=1`` where there is one size."""
        return f"{self.name}={self.least}" if self.least == self.most else f"{self.name}={self.least}..{self.most}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeFusion:
    """A chain with its kernel, at all sizes of a piece."""

    match: Match
    kernel: str
    """Name of one of the piece's kernels."""
    sites: tuple[tuple[int, ...], ...]
    """Op indices of each site, in the piece's graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapePoint:
    """What stays near one point of a piece, and the step's times there."""

    sizes: tuple[tuple[str, int], ...]
    """Of each dim that may vary."""
    rewrites: tuple[str, ...] = ()
    """Kernels and ids of graph passes that stay."""
    fusions: tuple[ShapeFusion, ...] = ()
    """The kernels among them, with their sites."""
    passes: tuple[str, ...] = ()
    """The graph passes among them."""
    dropped: tuple[tuple[str, str], ...] = ()
    """What paid here and cannot serve a range, with the reason; a CUDA graph that could not be recorded among it."""
    eager: Timing | None = None
    """The original step; None where nothing was timed."""
    ours: Timing | None = None
    in_graph: bool = False
    """Whether ``ours`` is of replays of one CUDA graph of the whole call. A size's first call is launched."""
    rel_l2: float | None = None
    """Relative L2 error of the outputs against the oracle."""
    eager_rel_l2: float | None = None
    reason: str = ""
    """Why the original ops run near this point; empty where rewrites do."""
    carried_from: tuple[tuple[str, int], ...] = ()
    """Sizes of the point of the same piece whose rewrites were taken over; empty where they were decided here."""
    pads: bool = False
    """Whether calls near this point may run in the CUDA graph of rounded up sizes."""
    in_segments: bool = False
    """Whether parts of a step on a growing cache may run as CUDA graphs: what does not depend on the cache's length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapePiece:
    """A part of the ranges that one graph serves."""

    ranges: tuple[SizeRange, ...]
    call: str = ""
    """``prefill``, ``decode``, ``padded prefill`` or ``padded decode`` of ``generate``; empty for calls like the example's."""
    points: tuple[ShapePoint, ...] = ()
    refusal: str = ""
    """Why the original ops run in all of it."""
    kernels: tuple[RenderedKernel, ...] = ()
    """Of all points, each once."""
    layouts: tuple[str, ...] = ()
    """Ids of rewrites that changed the graph before chains were found."""
    padded: tuple[str, ...] = ()
    """Sizes that may be rounded up, so that calls of several shapes share a CUDA graph: running both gave the same results."""
    capacities: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """What each of them is rounded up to, in rising order."""
    masked: tuple[str, ...] = ()
    """Those along which masks are padded with zeros."""
    not_padded: tuple[tuple[str, str], ...] = ()
    """Other sizes with the reason; sizes near a point, where it would not pay there."""
    padding_seconds: float = 0.0
    """What finding that out took."""
    graph: str = ""
    """Hash of the piece's graph: another one is served by no saved plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeRanges:
    """Everything about ``--shapes``."""

    asked: tuple[SizeRange, ...]
    dims: tuple[tuple[str, tuple[str, ...]], ...]
    """By path of each tensor the names of its dims; empty names are fixed dims."""
    pieces: tuple[ShapePiece, ...]
    exact: Timing | None = None
    """The example call through the plan of exactly its sizes; None where its sizes lie in no piece."""
    general: Timing | None = None
    """The same call through what serves its sizes in the ranges."""
    is_replayed: bool = False
    """Both ran in CUDA graphs, as far as such calls do; else launch by launch."""
    seconds: float = 0.0
    """What tracing, deciding and building took."""
