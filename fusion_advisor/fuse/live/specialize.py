"""Another shape of a model that is fused already: the kept kernels bound to its sizes, checked on its tensors, nothing timed.

Rendered kernels take sizes and strides as arguments, so one compiled kernel serves every length whose chains have its layout key.
A rewrite that pays at many rows need not pay at one (decode reads weights, prefill computes), so a plan is carried over within
its regime alone.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from fusion_advisor.capture.graph.tracer import Region, capture_regions
from fusion_advisor.capture.layout_trial import drop_layouts
from fusion_advisor.capture.loops.one_op import fold_loops
from fusion_advisor.chains.find import find_groups
from fusion_advisor.chains.group import Group
from fusion_advisor.codegen.common.interface import KernelBuildFailed, KernelCrashed
from fusion_advisor.codegen.registry import backend as backend_named
from fusion_advisor.errors import CannotSpecialize
from fusion_advisor.fuse.decide.session import Bench, BuiltFusion, BuiltLinear, members_of, replaced_sites
from fusion_advisor.fuse.live.saved_plan import FEW_ROWS, ReusablePlan, Specialised, gemm_rows
from fusion_advisor.fuse.passes.gemm_epilogue import GEMM_EPILOGUE
from fusion_advisor.fuse.passes.linear_sites import LINEAR_KERNELS
from fusion_advisor.fuse.passes.registry import LAYOUT_CHANGES, PASSES
from fusion_advisor.fuse.plan.plan import PlannedFusion, judge_with
from fusion_advisor.fuse.rewrite.first_call import call_in_child
from fusion_advisor.fuse.rewrite.graph_rewriter import fused_call
from fusion_advisor.fuse.rewrite.scan_kernels import SCAN_KERNELS, TITLE
from fusion_advisor.fuse.stages import epilogue_sites, scan_kernels
from fusion_advisor.fuse.stages.try_layout_change import change_for_other_shape
from fusion_advisor.ir.operand_names import named_like
from fusion_advisor.ir.program import Program, layout_key
from fusion_advisor.lowering.lower import Lowered, lower
from fusion_advisor.lowering.memo import asked_once
from fusion_advisor.records import Chain, OpNode, Site, Tolerance
from fusion_advisor.verify import check_chain


def specialise(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], plan: ReusablePlan | None
) -> tuple[list[Region], list[GraphModule], Specialised]:
    """Capture one more call of a model and rewrite it with kernels that exist.

    Args:
        model: fused or not; its own forward is captured.
        args: of the call.
        kwargs: of the call.
        plan: that was kept; None where the model was put together without one.

    Returns:
        The captured regions, what runs in their place, and what was done.

    Raises:
        CannotSpecialize: another regime, nothing to bind, or wrong numbers.
        CannotCapture: dynamo captured nothing.
    """
    if plan is None:
        raise CannotSpecialize(detail="this model was fused without keeping its plan")
    started = time.perf_counter()
    live = capture_regions(model, args, kwargs)
    fold_loops(live)
    drop_layouts(live, but=plan.rewrites)
    bench = _changed(Bench(live, on_cuda=plan.on_cuda), plan)
    rows = gemm_rows(bench.ops)
    if (rows <= FEW_ROWS) != (plan.rows <= FEW_ROWS):
        raise CannotSpecialize(detail=f"the plan was made for GEMMs of {plan.rows} rows, this call has {rows}")
    found = _sites(bench, plan)
    placed = _places(bench, [planned for planned, _ in found], plan)
    try:
        bench.observe([planned for planned, _ in found], also=[index for one in placed[:1] for index in one.place.inputs])
        built = [_bound(bench, planned, kernel, plan.tolerance) for planned, kernel in found]
        linears = _in_epilogues(bench, placed, plan)
        linears += _scans(bench, linears, plan)
    finally:
        live.written.restore()
    variant = bench.build(built, [name for name in plan.rewrites if name in PASSES], linears)
    replaced = replaced_sites(variant)
    sites: dict[str, int] = {}
    for fusion in built:
        sites[fusion.kernel.name] = sites.get(fusion.kernel.name, 0) + replaced.get(fusion.planned.id, 0)
    for one in placed:
        sites[one.call.__name__] = sites.get(one.call.__name__, 0) + 1
    has_kernels = bool(plan.fusions) or not {GEMM_EPILOGUE.id, LINEAR_KERNELS.id, SCAN_KERNELS.id}.isdisjoint(plan.rewrites)
    if has_kernels and not any(sites.values()):
        raise CannotSpecialize(detail="none of the kept kernels has a place in this call's graph")
    for scan in linears[bool(placed) :]:
        sites[TITLE] = sites.get(TITLE, 0) + len(scan.sites)
    seconds = time.perf_counter() - started
    return bench.live.regions, variant.modules, Specialised(sites=sites, passes=variant.changed, seconds=seconds)


def _changed(bench: Bench, plan: ReusablePlan) -> Bench:
    """Change layouts as the plan did, where a kept change serves other calls too: kernels were built for its slices."""
    for rewrite in LAYOUT_CHANGES.values():
        if rewrite.serves_other_shapes and rewrite.id in plan.rewrites:
            bench = change_for_other_shape(bench, rewrite)
    return bench


def _sites(bench: Bench, plan: ReusablePlan) -> list[tuple[PlannedFusion, BuiltFusion]]:
    """Find the chains of this graph that kept kernels compute, equal chains folded."""
    by_layout = {layout_key(fusion.planned.program): fusion for fusion in plan.fusions}
    folded: dict[str, list[tuple[Group, Lowered]]] = {}
    is_exact = any(fusion.planned.program.is_exact for fusion in plan.fusions)

    def has_kernel(members: tuple[int, ...], outputs: tuple[int, ...]) -> bool:
        return layout_key(lower(bench.ops, members, outputs, is_exact=is_exact).program) in by_layout

    groups = find_groups(
        bench.ops,
        asked_once(bench.ops, lambda members, outputs: judge_with(bench.ops, members, outputs, is_exact=is_exact)),
        has_kernel,
        lambda members, outputs: not has_kernel(members, outputs),
        has_kernel,
    )
    for group in groups:
        if group.verdict.is_fusible:
            folded.setdefault(group.verdict.key, []).append(
                (group, lower(bench.ops, group.members, group.outputs, is_exact=is_exact))
            )
    found: list[tuple[PlannedFusion, BuiltFusion]] = []
    for same in folded.values():
        program = same[0][1].program
        kernel = by_layout.get(layout_key(program))
        if kernel is None:
            continue
        program = named_like(program, kernel.planned.program)
        if not _is_same_kernel(program, kernel):
            continue
        found.append((_planned(bench.ops, same, program, kernel, f"S{len(found) + 1}"), kernel))
    return found


def _is_same_kernel(program: Program, kernel: BuiltFusion) -> bool:
    """Whether rendering for these sizes gives the kernel that is there: wide rows are walked by another one."""
    rendered = backend_named(kernel.kernel.backend).render(
        program, kernel.planned.header, tuning=kernel.kernel.parameters, fast_math=kernel.kernel.fast_math
    )
    return rendered.entry == kernel.kernel.name


def _planned(
    ops: Sequence[OpNode], same: Sequence[tuple[Group, Lowered]], program: Program, kernel: BuiltFusion, name: str
) -> PlannedFusion:
    sites = tuple(
        Site(
            op_indices=group.members, module_path=ops[group.members[-1]].module_path, source_file="", source_line=0,
            source_text="", device_ns=0,
        )
        for group, _ in same
    )  # fmt: skip
    before = kernel.planned.chain
    chain = Chain(
        id=name, ops=before.ops, sites=sites, launches=0, device_ns=0, share=0.0, moved_bytes=0,
        floor_bytes=program.moved_bytes * len(same), floor_ns=0, saving_bound_ns=0, is_reduction=before.is_reduction,
        dtype=before.dtype, shape=program.dims,
    )  # fmt: skip
    return PlannedFusion(
        id=name,
        chain=chain,
        match=kernel.planned.match,
        program=program,
        sites=tuple(lowered for _, lowered in same),
        header=kernel.planned.header,
    )


def _bound(bench: Bench, planned: PlannedFusion, kernel: BuiltFusion, tolerance: Tolerance | None) -> BuiltFusion:
    """Bind a kernel to new sizes and check its numbers on the first site's own tensors."""
    chain, roots = bench.first_site(planned)
    inputs = [check_chain.layout_of(root) for root in roots]
    outputs = [bench.ops[index].outputs[0] for index in planned.sites[0].outputs]
    launch = kernel.built.bind(planned.program)
    try:
        call_in_child(kernel.built, planned.program, roots, inputs, outputs, in_place=chain.in_place)
    except KernelCrashed as crash:
        raise CannotSpecialize(detail=str(crash)) from crash
    call = fused_call(kernel.kernel.name, launch, inputs, outputs, in_place=chain.in_place, is_poisoned=True)
    numerics = check_chain.check_chain(chain, call, roots, seed=0, fast_math=kernel.kernel.fast_math, tolerance=tolerance)
    if not numerics.is_passed:
        raise CannotSpecialize(detail=f"{planned.match.kernel} there: {check_chain.why_wrong(numerics, tolerance)}")
    return bench.install(planned, kernel.kernel, kernel.built)


def _places(bench: Bench, fusions: Sequence[PlannedFusion], plan: ReusablePlan) -> list[epilogue_sites.Placed]:
    return epilogue_sites.find_places(bench, fusions, fast_math=plan.fast_math)[0] if GEMM_EPILOGUE.id in plan.rewrites else []


def _scans(bench: Bench, linears: Sequence[BuiltLinear], plan: ReusablePlan) -> list[BuiltLinear]:
    """Put kernels in place of this call's unrolled loops, of another number of steps, and check each on a site's tensors."""
    if SCAN_KERNELS.id not in plan.rewrites:
        return []
    found = []
    kinds, _ = scan_kernels.find_kinds(bench, members_of(linears))
    for number, kind in enumerate(kinds, start=1):
        bench.observe((), also=kind.places[0].inputs)
        with tempfile.TemporaryDirectory(prefix="fusion-advisor-") as folder:
            try:
                made = scan_kernels.build(kind, bench.device, Path(folder) / TITLE)
            except KernelBuildFailed as failure:
                raise CannotSpecialize(detail=str(failure)) from failure
        numerics = scan_kernels.check_first(bench, kind, made, tolerance=plan.tolerance)
        if not numerics.is_passed:
            raise CannotSpecialize(detail=f"{TITLE} there: {check_chain.why_wrong(numerics, plan.tolerance)}")
        found.append(scan_kernels.install(bench, kind, made, name=f"S{number}"))
    return found


def _in_epilogues(bench: Bench, placed: Sequence[epilogue_sites.Placed], plan: ReusablePlan) -> list[BuiltLinear]:
    """Let GEMMs compute the activations after them in this call too; the numbers are checked on the first site's tensors."""
    if not placed:
        return []
    numerics = epilogue_sites.check_first(bench, placed, fast_math=plan.fast_math, tolerance=plan.tolerance)
    if not numerics.is_passed:
        raise CannotSpecialize(detail=f"{placed[0].call.__name__} there: {check_chain.why_wrong(numerics, plan.tolerance)}")
    return [epilogue_sites.built_of(placed)]
