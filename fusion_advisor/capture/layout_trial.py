"""Times the copies that give values another layout, before kernels are made for the layouts that follow from them.

The captured step runs with a rule's copies and without, interleaved, in CUDA graphs where these can hold it. Copies with which
the step is slower go for good: what follows is captured as the model lays it out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from fusion_advisor.capture.graph.layout_copies import LAID_OUT, keep_copies, kinds_of, take_copies_out, undo
from fusion_advisor.capture.graph.tracer import LiveCapture
from fusion_advisor.runtime.torch_internals import cuda_state
from fusion_advisor.timing import interleaving
from fusion_advisor.timing.host_timer import HostTimer
from fusion_advisor.timing.interleaving import Difference

_ROUNDS = 30
_BUDGET_S = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutTrial:
    """What a rule's copies change.

    Attributes:
        sites: copies.
        change: the step with them minus the step without, ns; None where it was not timed.
        is_kept: whether they stay.
    """

    sites: int
    change: Difference | None
    is_kept: bool


def settle_layouts(
    live: LiveCapture,
    wanted: Collection[str] | None,
    *,
    on_cuda: bool,
    timer: HostTimer,
    note: Callable[[str], None] = lambda _: None,
    difference: Callable[..., Difference] | None = None,
) -> dict[str, LayoutTrial]:
    """Keep the copies that pay, and take the others out of the captured graphs.

    Args:
        live: of a step.
        wanted: rules whose copies are timed; None: all. The copies of others go.
        on_cuda: whether the step runs on a GPU.
        timer: of steps on a CPU.
        note: gets a sentence on each rule.
        difference: times two ways to run the step against each other; left out, the clock does.

    Returns:
        By rule what was found.
    """
    measure = difference or _difference
    kinds = dict.fromkeys(kind for region in live.regions for kind in kinds_of(region.graph.graph))
    found = {}
    for kind in kinds:
        nodes = [node for region in live.regions for node in region.graph.graph.nodes]
        sites = sum(node.meta.get(LAID_OUT) == kind for node in nodes)
        change = None
        if wanted is None or kind in wanted:
            change = measure(_step(live, kind), _step(live, None), live=live, on_cuda=on_cuda, timer=timer)
            found[kind] = LayoutTrial(sites=sites, change=change, is_kept=change.median_ns <= 0)
            note(f"{kind}: {sites} copies, {'kept' if found[kind].is_kept else 'slower and taken out'}")
        if change is None or change.median_ns > 0:
            drop_layouts(live, {kind})
    return found


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


def _difference(
    before: Callable[[], Any], after: Callable[[], Any], *, live: LiveCapture, on_cuda: bool, timer: HostTimer
) -> Difference:
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
