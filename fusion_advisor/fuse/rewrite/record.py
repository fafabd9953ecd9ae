"""What a rewrite is: one record with a stable id, a title, its place in the order, and how it is found, applied and predicted.

A kind of rewrite is a class here, and the loop knows kinds alone: it tries, predicts and saves each record by its kind. A new
rewrite of a kind is one file in :mod:`fusion_advisor.fuse.passes` and one line in its registry.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch.fx import Graph

from fusion_advisor.capture.graph.tracer import Region
from fusion_advisor.fuse.rewrite.graph_rewriter import GraphPass
from fusion_advisor.fuse.rewrite.price import PassEffect
from fusion_advisor.fuse.rewrite.region_copy import ChangedRegion
from fusion_advisor.records import RewriteStage
from fusion_advisor.runtime.torch_internals.symbolic_sizes import Symbols


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rewrite:
    """A change of the captured step that is tried, kept or dropped as a whole."""

    id: str
    """A word in kebab case. Reports, saved plans and ``--skip`` know the rewrite by it, so it never changes."""
    title: str
    """A short noun for people. Nothing is looked up by it."""
    after: Mapping[str, str] = field(default_factory=dict)
    """Ids of rewrites that must come earlier, each with the reason."""
    stage: ClassVar[RewriteStage]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassRewrite(Rewrite):
    """A graph pass that keeps every layout: it is timed like a fusion, and a saved plan runs it again."""

    apply: GraphPass
    predict: Callable[[PassEffect], int] = lambda effect: effect.saved_ns
    """Expected saving of one step, in ns."""
    held_bytes: Callable[[Graph], int] = lambda _: 0
    """Memory that a rewritten graph holds for it."""
    needs_freeze: bool = False
    """Whether it is tried under ``--freeze`` alone."""
    is_in_trace: bool = False
    """Whether the trace was made with it in place: then the trace says nothing of its saving, which is timed instead."""
    reads_off: Callable[[Graph, Symbols], Hashable] | None = None
    """What it reads off at the sizes of the captured call and goes by: it serves a range where that is equal at all ends."""
    stage: ClassVar[RewriteStage] = RewriteStage.PASS


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PointRewrite(Rewrite):
    """A change of graphs with open sizes: it keeps every layout, and stays near points where a call is no slower with it."""

    stage: ClassVar[RewriteStage] = RewriteStage.PASS


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRoom:
    """Whether copies of weights may be made."""

    may_copy: bool = False
    free_bytes: int = 0
    """Of the device."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayoutRewrite(Rewrite):
    """A change of layouts or sizes inside the regions: the kept kernels are bound, and checked, on the changed graphs."""

    change: Callable[[Sequence[Region], CopyRoom], Iterable[Sequence[ChangedRegion]]]
    """Returns copies of all regions, changed, the preferred way first: the next is taken where a kept kernel cannot follow."""
    suffix: str
    """Of the files of kernels that are built for the new layouts."""
    copies_weights: bool = False
    """Whether some sites need a copy of weights; the report then says how many bytes the copies take."""
    serves_other_shapes: bool = False
    """Whether a call of another shape is changed too."""
    stage: ClassVar[RewriteStage] = RewriteStage.ON_TOP


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EpilogueRewrite(Rewrite):
    """Ops that the library's GEMM computes in its epilogue: every site gets a call of that GEMM."""

    find: Callable[..., Any]
    """Finds sites in a graph and says why others were left alone."""
    stage: ClassVar[RewriteStage] = RewriteStage.ON_TOP


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KernelRewrite(Rewrite):
    """Linear layers as kernels of ours: every kind of site has a row and a verdict of its own, like a fusion."""

    find: Callable[..., Any]
    """Finds sites in a graph."""
    stage: ClassVar[RewriteStage] = RewriteStage.ON_TOP


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScanRewrite(Rewrite):
    """Unrolled recurrences as kernels of ours: loops that one kernel computes have a row and a verdict of their own."""

    stage: ClassVar[RewriteStage] = RewriteStage.ON_TOP


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CollectiveRewrite(Rewrite):
    """Sums over ranks with the ops after them as kernels of ours: calls of one size have a row and a verdict of their own."""

    stage: ClassVar[RewriteStage] = RewriteStage.ON_TOP


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepRewrite(Rewrite):
    """A change of a training step's graph before it is split into two passes: it is judged by the gradients of the whole step."""

    stage: ClassVar[RewriteStage] = RewriteStage.PASS


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CallRewrite(Rewrite):
    """A change of how the whole call is launched: it is judged by wall time, after everything else."""

    stage: ClassVar[RewriteStage] = RewriteStage.CALL
