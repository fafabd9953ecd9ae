"""Times the copies that give values another layout, before kernels are made for the layouts that follow from them.

The captured step runs with a rule's copies and without, interleaved, in CUDA graphs where these can hold it. Copies with which
the step is slower get a second look where the caller gives one (``fuse.layouts``), for eager's norms, pools and copies may lose
in a layout in which our kernels gain. What is slower then too goes for good: what follows is captured as the model lays it out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fusion_advisor.capture.graph.layout_copies import LAID_OUT, keep_copies, kinds_of, take_copies_out, undo
from fusion_advisor.capture.graph.tracer import LiveCapture
from fusion_advisor.runtime.torch_internals import cuda_state
from fusion_advisor.timing import interleaving
from fusion_advisor.timing.host_timer import HostTimer
from fusion_advisor.timing.interleaving import Difference

_ROUNDS = 30
_BUDGET_S = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Fused:
    """What a second look, with kernels, says of a rule's copies.

    Attributes:
        change: the step with them minus the step without, ns; None where it was not timed.
        reason: in words, to follow the times without kernels: why it was not timed, or what was.
    """

    change: Difference | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutTrial:
    """What a rule's copies change.

    Attributes:
        sites: copies.
        change: the step with them minus the step without, ns; None where it was not timed.
        is_kept: whether they stay.
        fused: the second look; None where the first decided, or nobody gave one.
    """

    sites: int
    change: Difference | None
    is_kept: bool
    fused: Fused | None = None


SecondLook = Callable[[LiveCapture, LiveCapture], Fused]
"""Given the step with a rule's copies and without, compares the two with kernels."""


def settle_layouts(
    live: LiveCapture,
    wanted: Collection[str] | None,
    *,
    on_cuda: bool,
    timer: HostTimer,
    note: Callable[[str], None] = lambda _: None,
    difference: Callable[..., Difference] | None = None,
    second_look: SecondLook | None = None,
) -> dict[str, LayoutTrial]:
    """Keep the copies that pay, and take the others out of the captured graphs.

    Args:
        live: of a step.
        wanted: rules whose copies are timed; None: all. The copies of others go.
        on_cuda: whether the step runs on a GPU.
        timer: of steps on a CPU.
        note: gets a sentence on each rule.
        difference: times two ways to run the step against each other; left out, the clock does.
        second_look: at copies with which the step is slower.

    Returns:
        By rule what was found.
    """
    measure = difference or time_difference
    kinds = dict.fromkeys(kind for region in live.regions for kind in kinds_of(region.graph.graph))
    found = {}
    for kind in kinds:
        nodes = [node for region in live.regions for node in region.graph.graph.nodes]
        sites = sum(node.meta.get(LAID_OUT) == kind for node in nodes)
        if wanted is None or kind in wanted:
            change = measure(_step(live, kind), _step(live, None), live=live, on_cuda=on_cuda, timer=timer)
            fused = second_look(live, without(live, kind)) if second_look is not None and change.median_ns > 0 else None
            decisive = change if fused is None or fused.change is None else fused.change
            found[kind] = LayoutTrial(sites=sites, change=change, is_kept=decisive.median_ns <= 0, fused=fused)
            note(f"{kind}: {sites} copies, {'kept' if found[kind].is_kept else 'slower and taken out'}")
        if kind not in found or not found[kind].is_kept:
            drop_layouts(live, {kind})
    return found


def without(live: LiveCapture, kind: str) -> LiveCapture:
    """Return the capture as it would be without a rule's copies; the given one stays as it is.

    Args:
        live: of a step.
        kind: the rule.
    """
    regions = []
    for region in live.regions:
        graph, made = Graph(), dict[Node, Node]()
        output = graph.output(graph.graph_copy(region.graph.graph, made))
        output.meta = dict(next(node for node in region.graph.graph.nodes if node.op == "output").meta)
        module = GraphModule(region.graph, graph)
        undo(module, kind)
        regions.append(replace(region, graph=module))
    return replace(live, regions=regions)


def drop_layouts(live: LiveCapture, kinds: Collection[str] | None = None, *, but: Collection[str] = ()) -> None:
    """Take rules' copies out of the captured graphs for good.

    Args:
        live: of a step.
        kinds: of these rules; None: of all.
        but: of these all the same not.
    """
    for region in live.regions:
        for kind in kinds_of(region.graph.graph):
            if (kinds is None or kind in kinds) and kind not in but:
                undo(region.graph, kind)


def _step(live: LiveCapture, without: str | None) -> Callable[[], Any]:
    """Return the captured step, without a rule's copies where one is named."""
    modules = []
    for region in live.regions:
        graph = Graph()
        graph.output(graph.graph_copy(region.graph.graph, {}))
        if without is not None:
            take_copies_out(graph, without)
        for kind in kinds_of(graph):
            keep_copies(graph, kind)
        modules.append(GraphModule(region.graph, graph, class_name="LaidOut"))

    def run() -> None:
        with torch.no_grad():
            for one in live.in_order():
                modules[one.place](*one.args)

    return run


def time_difference(
    before: Callable[[], Any], after: Callable[[], Any], *, live: LiveCapture, on_cuda: bool, timer: HostTimer
) -> Difference:
    """Time two ways to run a step against each other, in CUDA graphs where these can hold both.

    Args:
        before: runs the step.
        after: runs it in the other way.
        live: of the step; what it moves on is put back before each run.
        on_cuda: whether the step runs on a GPU.
        timer: of steps on a CPU.

    Returns:
        The second minus the first.
    """
    calls = [before, after]
    rewind = live.written.rewind
    if on_cuda:
        try:
            pool = torch.cuda.graph_pool_handle()
            around = cuda_state.own_gemm_workspace
            calls = [interleaving.recorded(call, pool=pool, before=rewind, around=around) for call in calls]
        except interleaving.CannotRecord:
            calls = [before, after]
    one, other = interleaving.interleave(
        calls, rounds=_ROUNDS, budget_s=_BUDGET_S, on_cuda=on_cuda, before=rewind, timer=timer
    )  # fmt: skip
    return interleaving.difference(one, other)
