"""A further point of a piece takes over what was decided at another: its kernels are checked at its own sizes, and it is timed.

What kernels there are, and which of them pay, is not found out again. What depends on the sizes is: each kernel's numbers on the
site's own tensors and on random ones, its masked edges and the memory behind its outputs, the whole graph against fp64, and the
time of the call against the original one. At the largest sizes graph passes are tried that did not pay at the other point: KV
heads that are copied for every query head cost nothing in a short cache, and most of a step in a long one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fusion_advisor.capture.graph.tracer import LiveCapture
from fusion_advisor.capture.sizes.one_size import at_one_size
from fusion_advisor.capture.sizes.open_capture import Sizes
from fusion_advisor.codegen.common.interface import KernelBuildFailed
from fusion_advisor.fuse.decide.session import Bench, BuiltFusion
from fusion_advisor.fuse.passes.registry import PASSES, REWRITES
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.fuse.points.decide import Decided, RangeWork, module_at, text_of
from fusion_advisor.fuse.points.first_use import settled
from fusion_advisor.fuse.points.near_point import finished
from fusion_advisor.fuse.points.time_graphs import time_graphs
from fusion_advisor.fuse.rewrite.first_call import call_in_child
from fusion_advisor.fuse.rewrite.graph_rewriter import fused_call
from fusion_advisor.fuse.shapes.sized_fusion import Point, Workpiece, build
from fusion_advisor.ir.sized_program import NoOneProgram
from fusion_advisor.records import Numerics
from fusion_advisor.verify import check_chain
from fusion_advisor.verify.known.passed_checks import CheckedSite, PassedChecks
from fusion_advisor.verify.subgraph_oracle import original_chain


def carried(work: RangeWork, workpiece: Workpiece, from_: Decided, sizes: Sizes, *, tries_passes: bool = False) -> Decided:
    """Return what becomes of a point that takes over another's rewrites.

    Args:
        work: on the piece's call.
        workpiece: the piece.
        from_: the other point, where rewrites stay.
        sizes: of this point.
        tries_passes: try graph passes that the other point has not.

    Raises:
        LooksAtSizes: a graph pass took one size for all.
    """
    work.progress.note(f"at {text_of(sizes)}, with what stays at {text_of(from_.served.sizes)}")
    row = replace(
        from_.row, sizes=tuple(sizes.items()), carried_from=from_.row.sizes, dropped=(), eager=None, ours=None, rel_l2=None,
        eager_rel_l2=None, in_graph=False,
    )  # fmt: skip
    one = replace(from_, served=replace(from_.served, sizes=sizes), row=row)
    given, written = work.graph_call(workpiece.opened, sizes)
    live = at_one_size(workpiece.opened, given, written)
    point = tuple(sizes[name] for name in workpiece.names)
    wrong = wrong_kernel(workpiece, live, from_.fusions, point, work.options, work.passed, on_cuda=work.on_cuda)
    written.restore()
    if wrong:
        return one.refused(wrong)
    if tries_passes and work.options.is_timed and not work.options.exact:
        one = with_more_passes(work, workpiece, one, live, given)
    return settled(work, workpiece, one, given, written)


def with_more_passes(
    work: RangeWork, workpiece: Workpiece, one: Decided, live: LiveCapture, given: tuple[Any, ...]
) -> Decided:  # fmt: skip
    """Add graph passes that make a point's rewritten graph faster.

    Args:
        work: on the piece's call.
        workpiece: the piece.
        one: the point, with what it has.
        live: the piece's graph at its sizes.
        given: what that graph is called with.

    Raises:
        LooksAtSizes: a pass took one size for all.
    """
    options, sizes = work.options, one.served.sizes
    left_out = work.refused | workpiece.by_one_size
    open_to_all = [
        name for name, rewrite in PASSES.items()
        if options.wants(name) and name not in left_out and (options.freeze or not rewrite.needs_freeze)
    ]  # fmt: skip
    changed = Bench(live, on_cuda=work.on_cuda).with_passes(open_to_all).changed
    for name in open_to_all:
        if not changed[name] or name in one.row.passes:
            continue
        passes = tuple(other.id for other in REWRITES if other.id in (*one.row.passes, name))
        module = build(workpiece, one.fusions, passes)
        served = finished(workpiece, module, sizes, passes)
        ways = [module_at(workpiece, either, given).forward for either in (one.served, served)]
        before, after = time_graphs(work, workpiece.opened, ways, given, live.written, budget_s=work.budget_s / 2)
        if after.ci_high_ns < before.ci_low_ns * (1 - options.min_gain):
            work.progress.note(f"{PASSES[name].title} at {text_of(sizes)} as well")
            row = replace(one.row, passes=passes, rewrites=(*one.row.rewrites, name))
            one = replace(one, served=served, row=row, is_right_elsewhere=False)
    return one


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
    program = workpiece.program(members, site, model=planned.program).at(workpiece.leaves(point))
    chain = original_chain(bench.ops, bench.index_of[0], members, site.given, site.outputs)
    roots = [bench.values[index] for index in site.given]
    inputs, outputs = [*map(check_chain.layout_of, roots)], [bench.ops[index].outputs[0] for index in site.outputs]
    call_in_child(fusion.built, program, roots, inputs, outputs, in_place=chain.in_place)
    launch = fusion.built.bind(program)
    call = fused_call(fusion.kernel.name, launch, inputs, outputs, in_place=chain.in_place, is_poisoned=True)
    where = CheckedSite(chain=chain, roots=roots, program=program, entry=fusion.kernel.name, tuning=fusion.built.tuning)
    return passed.check(where, call, seed=seed, fast_math=fusion.kernel.fast_math, tolerance=options.tolerance)
