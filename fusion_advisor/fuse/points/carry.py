"""A further point of a piece takes over what was decided at another: its kernels are checked at its own sizes, and it is timed.

What rewrites there are, and which of them pay, is not found out again. What depends on the sizes is: each kernel's numbers on the
site's own tensors and on random ones, its masked edges and the memory behind its outputs, the whole graph against fp64, and the
time of the call against the original one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusion_advisor.capture.graph.tracer import LiveCapture
from fusion_advisor.capture.sizes.one_size import at_one_size
from fusion_advisor.capture.sizes.open_capture import Sizes
from fusion_advisor.codegen.common.interface import KernelBuildFailed
from fusion_advisor.fuse.decide.session import Bench, BuiltFusion
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.fuse.points.decide import Decided, RangeWork, checked, text_of, timed
from fusion_advisor.fuse.rewrite.first_call import call_in_child
from fusion_advisor.fuse.rewrite.graph_rewriter import fused_call
from fusion_advisor.fuse.shapes.sized_fusion import Point, Workpiece
from fusion_advisor.ir.sized_program import NoOneProgram
from fusion_advisor.records import Numerics
from fusion_advisor.verify import check_chain
from fusion_advisor.verify.known.passed_checks import CheckedSite, PassedChecks
from fusion_advisor.verify.subgraph_oracle import original_chain


def carried(work: RangeWork, workpiece: Workpiece, from_: Decided, sizes: Sizes) -> Decided:
    """Return what becomes of a point that takes over another's rewrites.

    Args:
        work: on the piece's call.
        workpiece: the piece.
        from_: the other point, where rewrites stay.
        sizes: of this point.
    """
    work.progress.note(f"at {text_of(sizes)}, with what stays at {text_of(from_.served.sizes)}")
    row = replace(
        from_.row, sizes=tuple(sizes.items()), carried_from=from_.row.sizes, dropped=(), eager=None, ours=None, rel_l2=None,
        eager_rel_l2=None,
    )  # fmt: skip
    one = replace(from_, served=replace(from_.served, sizes=sizes), row=row)
    given, written = work.graph_call(workpiece.opened, sizes)
    live = at_one_size(workpiece.opened, given, written)
    point = tuple(sizes[name] for name in workpiece.names)
    wrong = wrong_kernel(workpiece, live, from_.fusions, point, work.options, work.passed, on_cuda=work.on_cuda)
    written.restore()
    if wrong:
        return one.refused(wrong)
    return timed(work, workpiece, checked(work, workpiece, one, given, written))


def wrong_kernel(
    workpiece: Workpiece, live: LiveCapture, fusions: Sequence[BuiltFusion], point: Point, options: ApplyOptions,
    passed: PassedChecks, *, on_cuda: bool,
) -> str:  # fmt: skip
    """Say which kernel is wrong at some sizes of a piece; empty where all are right.

    Args:
        workpiece: the piece.
        live: its graph at these sizes.
        fusions: for all sizes of the piece.
        point: the sizes.
        options: the user's tolerance.
        passed: checks that no size decides; gets those that pass here.
        on_cuda: whether the tensors are on a GPU.
    """
    bench = Bench(live, on_cuda=on_cuda)
    firsts = [fusion.planned.sites[0] for fusion in fusions]
    if fusions:
        bench.observe_values({index for site in firsts for index in site.given}, set())
    for seed, fusion in enumerate(fusions):
        try:
            numerics = _numerics(workpiece, bench, fusion, point, options, passed, seed)
        except (NoOneProgram, KernelBuildFailed) as error:
            return f"{fusion.planned.match.kernel}: {error}"
        if not numerics.is_passed:
            return f"{fusion.planned.match.kernel}: {check_chain.why_wrong(numerics, options.tolerance)}"
    return ""


def _numerics(
    workpiece: Workpiece, bench: Bench, fusion: BuiltFusion, point: Point, options: ApplyOptions, passed: PassedChecks, seed: int
) -> Numerics:
    planned, site = fusion.planned, fusion.planned.sites[0]
    members = planned.chain.sites[0].op_indices
    program = workpiece.program(members, site.outputs, model=planned.program).at(workpiece.leaves(point))
    chain = original_chain(bench.ops, bench.index_of[0], members, site.given, site.outputs)
    roots = [bench.values[index] for index in site.given]
    inputs, outputs = [*map(check_chain.layout_of, roots)], [bench.ops[index].outputs[0] for index in site.outputs]
    call_in_child(fusion.built, program, roots, inputs, outputs, in_place=chain.in_place)
    launch = fusion.built.bind(program)
    call = fused_call(fusion.kernel.name, launch, inputs, outputs, in_place=chain.in_place, is_poisoned=True)
    where = CheckedSite(chain=chain, roots=roots, program=program, entry=fusion.kernel.name, tuning=fusion.built.tuning)
    return passed.check(where, call, seed=seed, fast_math=fusion.kernel.fast_math, tolerance=options.tolerance)
