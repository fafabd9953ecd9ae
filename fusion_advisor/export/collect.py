"""A saved plan put together again on its model, as what an export is printed from.

The graph is rebuilt when a run is exported, and not recorded when it is applied. So a run folder (capture, report) is enough,
whichever version made it. The model is captured anew, and its ops are compared with the run's. Every kernel is checked on the
tensors of its first site. The model is needed anyway: parameters have their names from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch.fx import GraphModule, Node

from fusion_advisor.capture.graph.side_effects import kept_as_it_is
from fusion_advisor.codegen.common.site import is_empty
from fusion_advisor.errors import CannotExport, PlanMismatch
from fusion_advisor.export.kernel_ops import KernelOps, kernel_ops, with_copies
from fusion_advisor.export.linear_ops import why_not, with_linears, with_odd_rows
from fusion_advisor.export.parameters import is_joined_operand
from fusion_advisor.fuse.decide.session import Bench, BuiltLinear
from fusion_advisor.fuse.live.restore_plan import Restored, put_together
from fusion_advisor.fuse.live.saved_plan import SavedPlan
from fusion_advisor.fuse.passes.cuda_graph import CUDA_GRAPH
from fusion_advisor.fuse.passes.gemm_epilogue import EpilogueCall
from fusion_advisor.fuse.passes.registry import kept_passes
from fusion_advisor.fuse.plan.progress import PhaseClock, Progress
from fusion_advisor.fuse.rewrite.layout_copy import PlainCopy
from fusion_advisor.fuse.rewrite.odd_width_gemm import OddRows
from fusion_advisor.ir.program import nests
from fusion_advisor.records import Status
from fusion_advisor.runtime.deep_stack import in_one_piece
from fusion_advisor.runtime.gc_pause import collector_paused
from fusion_advisor.workload.device import current_device
from fusion_advisor.workload.load import LoadedWorkload

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewritten:
    """A rewritten graph with all that its export needs.

    Attributes:
        module: the graph; its attributes are its constants.
        names: one for each placeholder.
        ops: the kernels in it.
        origins: by a kernel's result, the model's own op that had it.
        output: what the call returns.
        values: what the graph returned in that call, by its results.
        assigned: object of the call, attribute and value, for each attribute that the call sets.
        left_out: kept rewrites that the package does not have, as sentences.
    """

    module: GraphModule
    names: tuple[str, ...]
    ops: KernelOps
    origins: Mapping[Node, Node]
    output: Any
    values: tuple[tuple[Node, Any], ...]
    assigned: tuple[tuple[Any, str, Any], ...]
    left_out: tuple[str, ...]


def rewritten(loaded: LoadedWorkload, saved: SavedPlan) -> Rewritten:
    """Capture a model again, put the plan's rewrites into its graph, and run it once.

    Args:
        loaded: the model and the call of the run.
        saved: the plan.

    Raises:
        PlanMismatch: the model gives another graph than that of the run, or a kernel's numbers do not pass any more.
        CannotExport: the call is several graphs.
    """
    return in_its_place(loaded, saved, lambda: _collected(loaded, saved))


def in_its_place(loaded: LoadedWorkload, saved: SavedPlan, work: Callable[[], Found]) -> Found:
    """Do something with a plan on its model's device, and leave the model and its call as they were.

    Args:
        loaded: the model and the call of the run.
        saved: the plan.
        work: to be done.

    Raises:
        PlanMismatch: the model is on a device of another kind than the run's.
    """
    kind = torch.device(loaded.record.device).type
    wanted = saved.capture.environment.device_kind
    if kind != wanted:
        raise PlanMismatch(run=saved.run_dir.name, detail=f"it was made on {wanted}, this is {kind}")
    device = torch.device(loaded.record.device)
    with current_device(device), collector_paused(), kept_as_it_is(loaded.model, loaded.args, loaded.kwargs):
        return in_one_piece(work)


def _collected(loaded: LoadedWorkload, saved: SavedPlan) -> Rewritten:
    restored = put_together(loaded, saved, PhaseClock(Progress()))
    if len(restored.bench.live.regions) != 1 or not restored.live.is_whole():
        count = len(restored.bench.live.regions)
        raise CannotExport(detail=f"the model is captured as {count} graphs with Python between them, not as one")
    linears = [one for one in restored.linears if not why_not(one)]
    empty = [one for one in restored.plan.fusions if all(is_empty(part.program) for part in nests(one.planned.program))]
    full = tuple(one for one in restored.plan.fusions if one not in empty)
    restored = replace(restored, plan=replace(restored.plan, fusions=full))
    # In the graph's order: the report's, by time, is another in each run.
    fusions = sorted(
        restored.plan.fusions, key=lambda one: min((index for site in one.sites for index in site.members), default=0)
    )
    ops = with_linears(kernel_ops(restored.bench, fusions), restored.bench, linears)
    module, left_out = _module(restored, saved, ops, linears)
    ops = with_odd_rows(ops, module.graph)
    module.recompile()
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    written = restored.live.written
    if written.modules or written.contents:
        raise CannotExport(detail="its call sets attributes of modules, or changes lists of theirs")
    output, values, assigned = _run(loaded, restored, module)
    names = restored.bench.live.regions[0].names
    assert len(names) == len(placeholders)
    return Rewritten(
        module=module, names=names, ops=with_copies(ops, module.graph),
        origins=_origins(module, restored.bench), output=output, values=values, assigned=assigned,
        left_out=(*(f"{one.planned.id} {one.kernel.name}: it has no elements to compute" for one in empty), *left_out),
    )  # fmt: skip


def _module(
    restored: Restored, saved: SavedPlan, ops: KernelOps, linears: Sequence[BuiltLinear]
) -> tuple[GraphModule, tuple[str, ...]]:
    """Build the graph with every rewrite that the package can hold; return it, and sentences about the others."""
    rows = {row.id: row for row in saved.report.rewrites}
    left_out = [_CUDA_GRAPH] if CUDA_GRAPH.id in saved.rewrites else []
    refused = {one.id: reason for one in restored.linears if (reason := why_not(one))}
    left_out += [f"{row.id} {row.kernel}: {refused[row.id]}" for row in (*saved.linears, *saved.sums) if row.id in refused]
    passes: list[str] = []
    build = _builder(restored, linears)
    for name in kept_passes(saved.report.rewrites):
        if _foreign(build([*passes, name]), ops):
            left_out.append(f"{name} ({rows[name].name}): it runs Python of fusion_advisor's own")
        else:
            passes.append(name)
    module = build(passes)
    if foreign := _foreign(module, ops):
        raise CannotExport(detail=f"its graph calls `{foreign[0]}`, which is no op of torch and no kernel of a chain")
    return module, tuple(left_out)


_CUDA_GRAPH = "the CUDA graph around the step is not recorded unless asked for: apply(model, cuda_graph=True)"


def _builder(restored: Restored, linears: Sequence[BuiltLinear]) -> Callable[[Sequence[str]], GraphModule]:
    return lambda passes: restored.bench.build(restored.plan.fusions, passes, linears).modules[0]


def _foreign(module: GraphModule, ops: KernelOps) -> list[str]:
    """Return what a graph calls that is neither an op of torch's nor a kernel of the package."""
    return [
        getattr(node.target, "__name__", str(node.target))
        for node in module.graph.nodes
        if node.op not in ("placeholder", "output", "get_attr", "call_function")
        or (
            node.op == "call_function"
            and ops.of(node.target) is None
            and not isinstance(node.target, EpilogueCall | PlainCopy | OddRows)
            and not is_joined_operand(node.target)
            and not isinstance(node.target, torch._ops.OpOverload)
            and getattr(node.target, "__module__", "") != "_operator"
        )
    ]


def _run(
    loaded: LoadedWorkload, restored: Restored, module: GraphModule
) -> tuple[Any, tuple[tuple[Node, Any], ...], tuple[tuple[Any, str, Any], ...]]:
    """Make the captured call with the rewritten graph in it; return its output, the graph's results and what it sets."""
    live = restored.live
    route = live.regions[0].route
    assert route is not None
    assert live.compiled is not None
    seen: list[Any] = []

    def forward(*args: Any) -> Any:
        seen.append(module(*args))
        return seen[-1]

    before, route.forward = route.forward, forward
    try:
        with torch.no_grad():
            output = live.compiled.call(*loaded.args, **loaded.kwargs)
            assigned = tuple((owner, name, getattr(owner, name, None)) for owner, name, _ in live.written.attributes)
    finally:
        route.forward = before
        live.written.restore()
    if not seen:
        raise PlanMismatch(run="this run", detail="dynamo did not run the graph that it captured")
    returned = next(node for node in module.graph.nodes if node.op == "output").args[0]
    nodes = returned if isinstance(returned, list | tuple) else [returned]
    values = seen[0] if isinstance(seen[0], list | tuple) else [seen[0]]
    return output, tuple((node, value) for node, value in zip(nodes, values, strict=True) if isinstance(node, Node)), assigned


def _origins(module: GraphModule, bench: Bench) -> dict[Node, Node]:
    """Return the model's own op of each kernel's result, for its name."""
    own = {node.name: node for node in bench.live.regions[0].graph.graph.nodes}
    found: dict[Node, Node] = {}
    for node in module.graph.nodes:
        names = node.meta.get("replaces", ())
        if len(names) == 1 and names[0] in own:
            found[node] = own[names[0]]
        for user in node.users if len(names) > 1 else ():
            place = user.args[1] if len(user.args) > 1 else None
            if isinstance(place, int) and place < len(names) and names[place] in own:
                found[user] = own[names[place]]
    return found


def is_kept(saved: SavedPlan) -> bool:
    """Whether a plan has a kernel: of a chain, a linear layer or a recurrence.

    Args:
        saved: the plan.
    """
    return bool(saved.linears or saved.scans) or any(row.status is Status.KEPT and row.chain_id for row in saved.report.fusions)
