"""The kernels of a saved plan, built again as they were rendered, and checked again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from fusion_advisor.codegen.common.interface import BuiltKernel, KernelBuildFailed, Rendered
from fusion_advisor.codegen.gemm.problem import GemvConfig, entry_of
from fusion_advisor.codegen.registry import backend as backend_named
from fusion_advisor.errors import PlanMismatch
from fusion_advisor.files.safe_name import path_inside
from fusion_advisor.fuse.decide.session import Bench, BuiltFusion, BuiltLinear, LinearSource
from fusion_advisor.fuse.live.saved_plan import SavedPlan
from fusion_advisor.fuse.plan.plan import PlannedFusion
from fusion_advisor.fuse.rewrite.first_call import call_in_child
from fusion_advisor.fuse.rewrite.graph_rewriter import fused_call
from fusion_advisor.fuse.stages import epilogue_sites
from fusion_advisor.fuse.stages.linear_kernels import Made, build, check_first, header_of, install
from fusion_advisor.fuse.stages.linear_kinds import Kind
from fusion_advisor.records import Fusion, GraphRewrite, RenderedKernel
from fusion_advisor.verify.check_chain import check_calls, layout_of, why_wrong, widest, with_special_rows

if TYPE_CHECKING:  # what few plans hold is imported where it is built
    from fusion_advisor.collectives.group_kernels import GroupKernels
    from fusion_advisor.collectives.launch_shape import Way
    from fusion_advisor.fuse.stages.collective_sites import SumKind


def build_fusions(bench: Bench, fusions: Sequence[PlannedFusion], saved: SavedPlan) -> list[BuiltFusion]:
    """Build the kernels again as they were rendered, and check each on its first site's own tensors and on special rows.

    Nothing is chosen here: launch parameters and fast math are those of the run, whatever this machine has tuned since.

    Raises:
        PlanMismatch: a kernel is not to be had, its numbers do not pass, or it has no place where the plan has one.
    """
    rows = {row.chain_id: row for row in saved.report.fusions}
    made: dict[str, BuiltKernel] = {}
    built = []
    for planned in fusions:
        row = rows[planned.chain.id]
        try:
            kernel, rendered = _rendered(planned, row.rendered)
            if rendered.source not in made:
                made[rendered.source] = backend_named(kernel.backend).build(rendered, path_inside(saved.run_dir, kernel.path))
            one = made[rendered.source]
            chain, roots = bench.first_site(planned)
            outputs = [bench.ops[index].outputs[0] for index in planned.sites[0].outputs]
            launch, inputs = one.bind(planned.program), list(map(layout_of, roots))
            call_in_child(one, planned.program, roots, inputs, outputs, in_place=chain.in_place)
            call = fused_call(rendered.entry, launch, inputs, outputs, in_place=chain.in_place, is_poisoned=True)
            numerics = check_calls(
                [(chain, call, roots)],
                inputs="the first site's own tensors",
                fast_math=kernel.fast_math,
                tolerance=saved.report.tolerance,
            )
            numerics = with_special_rows(
                numerics, chain, call, roots, rows=widest(roots, chain), most_runs=1, fast_math=kernel.fast_math,
                tolerance=saved.report.tolerance,
            )  # fmt: skip
        except KernelBuildFailed as failure:
            raise PlanMismatch(run=saved.run_dir.name, detail=str(failure)) from failure
        if not numerics.is_passed:
            why = why_wrong(numerics, saved.report.tolerance)
            raise PlanMismatch(run=saved.run_dir.name, detail=f"{row.id} {row.kernel}: its numbers no longer pass: {why}")
        installed = bench.install(planned, kernel, one)
        for refusal in installed.refusals:
            if refusal not in row.receipt.refusals:
                detail = f"{row.id} {row.kernel} has no place at {refusal}; the other sites were left alone too"
                raise PlanMismatch(run=saved.run_dir.name, detail=detail)
        built.append(installed)
    return built


def _rendered(planned: PlannedFusion, kernels: Sequence[RenderedKernel]) -> tuple[RenderedKernel, Rendered]:
    """Render a fusion's kernel again; a fusion whose sites differ in layout has several, which differ in name."""
    found = [
        backend_named(kernel.backend).render(
            planned.program, planned.header, tuning=kernel.parameters, fast_math=kernel.fast_math
        )
        for kernel in kernels
    ]
    found = [replace(one, text=kernel.source) for kernel, one in zip(kernels, found, strict=True)]
    pairs = list(zip(kernels, found, strict=True))
    return next((pair for pair in pairs if pair[0].name == pair[1].entry), pairs[0])


def find_epilogues(
    bench: Bench, fusions: Sequence[PlannedFusion], saved: SavedPlan, row: GraphRewrite
) -> tuple[list[epilogue_sites.Placed], bool]:
    """Find the activations that the plan moved into GEMMs, and whether it took one GELU for the other.

    Raises:
        PlanMismatch: other activations would be moved here.
    """
    for fast_math in (False, True):
        placed, refusals = epilogue_sites.find_places(bench, fusions, fast_math=fast_math)
        if len(placed) == row.sites:
            return placed, fast_math
    why = f": {refusals[0]}" if refusals else ""
    raise PlanMismatch(run=saved.run_dir.name, detail=f"activations that it moved into GEMMs cannot be moved here{why}")


def build_epilogues(
    bench: Bench, placed: Sequence[epilogue_sites.Placed], saved: SavedPlan, *, fast_math: bool
) -> list[BuiltLinear]:
    """Return the calls of GEMMs with activations, checked on the first place's own tensors.

    Raises:
        PlanMismatch: their numbers no longer pass.
    """
    if not placed:
        return []
    if not epilogue_sites.check_first(bench, placed, fast_math=fast_math, tolerance=saved.report.tolerance).is_passed:
        raise PlanMismatch(run=saved.run_dir.name, detail=f"{placed[0].call.__name__}: its numbers no longer pass")
    return [epilogue_sites.built_of(placed)]


def build_linears(bench: Bench, kinds: Sequence[Kind], saved: SavedPlan, build: Callable[..., Made] = build) -> list[BuiltLinear]:
    """Build the kernels of linears again, with the configurations that were chosen, and check their numbers."""
    found: list[BuiltLinear] = []
    for kind in kinds:
        header = header_of(kind.title)
        for row in (row for row in saved.linears if row.kernel == kind.title):
            kernel = row.rendered[0]
            config = GemvConfig.read(kernel.tuning)
            # A kernel is named after all that is constant in it.
            if entry_of(kind.problem, header, config) != kernel.name:
                continue
            try:
                path = path_inside(saved.run_dir, f"kernels/{row.id}_{kind.title}")
                made = build(kind.problem, header, config, path, tuning=kernel.tuning)
                numerics = check_first(bench, kind, made, tolerance=saved.report.tolerance)
            except KernelBuildFailed as failure:
                raise PlanMismatch(run=saved.run_dir.name, detail=str(failure)) from failure
            if not numerics.is_passed:
                raise PlanMismatch(run=saved.run_dir.name, detail=f"{kind.title}: its numbers no longer pass")
            source = LinearSource(problem=kind.problem, config=config, header=header)
            found.append(replace(install(bench, kind, made, name=row.id), source=source))
    missing = [row.kernel for row in saved.linears if row.id not in {gemv.id for gemv in found}]
    if missing:
        raise PlanMismatch(run=saved.run_dir.name, detail=f"this model has no linears for {', '.join(missing)}")
    return found


def build_scans(bench: Bench, saved: SavedPlan, device: torch.device, taken: Iterable[int]) -> list[BuiltLinear]:
    """Build the kernels of recurrences again and check their numbers.

    Args:
        bench: over the graphs as the plan left them.
        saved: the plan.
        device: where they run.
        taken: ops that other kernels have taken in.

    Raises:
        PlanMismatch: a kernel is not to be had, or its numbers no longer pass.
    """
    if not saved.scans:
        return []
    from fusion_advisor.fuse.stages import scan_kernels

    kinds = {f"S{number}": kind for number, kind in enumerate(scan_kernels.find_kinds(bench, taken)[0], start=1)}
    found = []
    for row in saved.scans:
        kind = kinds.get(row.id)
        if kind is None:
            raise PlanMismatch(run=saved.run_dir.name, detail=f"this model has no loop for {row.id} {row.kernel}")
        bench.observe((), also=kind.places[0].inputs)
        try:
            path = path_inside(saved.run_dir, f"kernels/{row.id}_{row.kernel}")
            made = scan_kernels.build(kind, device, path, backend=row.rendered[0].backend)
            numerics = scan_kernels.check_first(bench, kind, made, tolerance=saved.report.tolerance)
        except KernelBuildFailed as failure:
            raise PlanMismatch(run=saved.run_dir.name, detail=str(failure)) from failure
        if made.kernel.name != row.rendered[0].name or not numerics.is_passed:
            detail = f"{row.id} {row.kernel}: it is another kernel, or its numbers no longer pass"
            raise PlanMismatch(run=saved.run_dir.name, detail=detail)
        found.append(scan_kernels.install(bench, kind, made, name=row.id))
    return found


MakesKernels = Callable[[str, torch.device], "GroupKernels | str"]
"""Given a process group's name and a device, returns the kernels in which its ranks meet, or why there are none."""


def join_by_torch(group_name: str, device: torch.device) -> GroupKernels | str:
    """Return the kernels of a group whose ranks agree through the group itself: no run of ours is there to do it.

    Args:
        group_name: of the process group.
        device: of this rank.
    """
    from fusion_advisor.collectives.group_kernels import gathered, join_group

    return join_group(group_name, device, gathered)


def build_sums(
    bench: Bench,
    saved: SavedPlan,
    device: torch.device,
    taken: Iterable[int],
    make: MakesKernels,
) -> list[BuiltLinear]:
    """Build the kernels in which ranks sum together again and check their numbers; all ranks come here.

    Args:
        bench: over the graphs as the plan left them.
        saved: the plan.
        device: where they run.
        taken: ops that other kernels have taken in.
        make: the kernels of a group.

    Raises:
        PlanMismatch: this model has no such sums, the ranks have no such kernel, or its numbers no longer pass.
    """
    if not saved.sums:
        return []
    from fusion_advisor.fuse.stages import collective_sites

    kinds = {f"A{number}": kind for number, kind in enumerate(collective_sites.find_kinds(bench, list(taken))[0], start=1)}
    groups: dict[str, GroupKernels | str] = {}
    found = []
    for row in saved.sums:
        kind = kinds.get(row.id)
        if kind is None:
            raise PlanMismatch(run=saved.run_dir.name, detail=f"this model has no sum over ranks for {row.id} {row.kernel}")
        if kind.group_name not in groups:
            groups[kind.group_name] = make(kind.group_name, device)
        kernels = groups[kind.group_name]
        if isinstance(kernels, str):
            raise PlanMismatch(run=saved.run_dir.name, detail=f"{row.id} {row.kernel}: {kernels}")
        found.append(_built_sum(bench, saved, row, kind, kernels))
    return found


def _built_sum(bench: Bench, saved: SavedPlan, row: Fusion, kind: SumKind, kernels: GroupKernels) -> BuiltLinear:
    from fusion_advisor.fuse.stages import collective_sites

    refuse_other_ranks(saved, kernels.world_size)
    way, _ = ranks_of(saved, row)
    bench.observe((), also=kind.sites[0].place.inputs)
    try:
        path = path_inside(saved.run_dir, row.rendered[0].path)
        made = collective_sites.build(kind, kernels, way, path)
    except KernelBuildFailed as failure:
        raise PlanMismatch(run=saved.run_dir.name, detail=str(failure)) from failure
    numerics = collective_sites.check_first(bench, kind, made, tolerance=saved.report.tolerance)
    if made.kernel.name != row.rendered[0].name or not numerics.is_passed:
        detail = f"{row.id} {row.kernel}: it is another kernel, or its numbers no longer pass"
        raise PlanMismatch(run=saved.run_dir.name, detail=detail)
    return collective_sites.install(bench, kind, made, name=row.id)


def refuse_other_ranks(saved: SavedPlan, world_size: int) -> None:
    """Refuse a plan whose kernels sum over another number of ranks.

    Args:
        saved: the plan.
        world_size: number of ranks that run the step now.

    Raises:
        PlanMismatch: with both numbers.
    """
    for row in saved.sums:
        _, ranks = ranks_of(saved, row)
        if ranks != world_size:
            detail = f"its kernels sum over {ranks} ranks, and {world_size} run this"
            raise PlanMismatch(run=saved.run_dir.name, detail=detail)


def ranks_of(saved: SavedPlan, row: Fusion) -> tuple[Way, int]:
    """Return the way to sum and the number of ranks of a kernel's row.

    Args:
        saved: the plan.
        row: one of its ``sums``.

    Raises:
        PlanMismatch: the report does not say.
    """
    from fusion_advisor.fuse.stages.collective_sites import read_tuning

    try:
        return read_tuning(row.rendered[0].tuning if row.rendered else "")
    except ValueError as error:
        raise PlanMismatch(run=saved.run_dir.name, detail=f"{row.id} {row.kernel}: {error}") from error
