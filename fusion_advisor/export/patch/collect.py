"""The kept sites of a run, each expressed in the model's source or with the reason why it is not."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch.fx import Node

from fusion_advisor.capture.graph.fx_nodes import is_idle_dropout, module_path
from fusion_advisor.codegen.registry import backend
from fusion_advisor.export.kernel_ops import KernelOp, KernelOps, kernel_ops
from fusion_advisor.export.patch.express import Expressed, SiteOps, express
from fusion_advisor.export.patch.frames import Frame, NotExpressed, SharedCall, frames_of, shared_call
from fusion_advisor.export.patch.observe import Observed, Watched, observe
from fusion_advisor.export.patch.statements import Statements, find_statements
from fusion_advisor.fuse.decide.session import Bench, BuiltFusion
from fusion_advisor.fuse.live.restore_plan import put_together
from fusion_advisor.fuse.live.saved_plan import SavedPlan
from fusion_advisor.fuse.plan.progress import PhaseClock, Progress
from fusion_advisor.fuse.rewrite.graph_rewriter import SiteRewrite
from fusion_advisor.records import OpClass, Status
from fusion_advisor.records.op_facts import overload_free
from fusion_advisor.verify.subgraph_oracle import original_chain
from fusion_advisor.workload.load import LoadedWorkload


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchSite:
    """A kept site.

    Attributes:
        fusion_id: ``F1`` …
        kernel: its name.
        module: path of the module that its ops lie in.
        file: that its statements are in; empty where it is not expressed.
        statements: that compute it.
        expressed: how.
        reason: why it is not expressed; empty where it is.
        op: its kernel; None where it cannot be an op.
    """

    fusion_id: str
    kernel: str
    module: str
    file: str = ""
    statements: Statements | None = None
    expressed: Expressed | None = None
    reason: str = ""
    op: KernelOp | None = None


@dataclass(frozen=True, slots=True)
class _Place:
    file: str
    statements: Statements
    module: str


def in_own_layout(saved: SavedPlan) -> SavedPlan:
    """Return a plan's kernels of chains alone, for the graph as the model's source has it.

    Merged GEMMs and other rewrites change what a chain reads; in the source there is none of them.

    Args:
        saved: the plan.
    """
    kept = {row.chain_id: row for row in saved.report.fusions if row.chain_id and row.status is Status.KEPT}
    fusions = tuple(one for one in saved.fusions if one.chain.id in kept)
    rows = []
    for planned in fusions:
        kernel = kept[planned.chain.id].rendered[0]
        one = backend(kernel.backend).render(
            planned.program, planned.header, tuning=kernel.parameters, fast_math=kernel.fast_math
        )
        rendered = replace(kernel, name=one.entry, source=one.text)
        rows.append(replace(kept[planned.chain.id], rendered=(rendered,)))
    return replace(saved, report=replace(saved.report, fusions=tuple(rows), rewrites=()), fusions=fusions)


def patch_sites(loaded: LoadedWorkload, saved: SavedPlan) -> list[PatchSite]:
    """Return the kept sites of a run, in the order of the report.

    Args:
        loaded: the model and the call of the run.
        saved: the plan, in the model's own layout.

    Raises:
        PlanMismatch: the model gives another graph than the run's.
    """
    restored = put_together(loaded, saved, PhaseClock(Progress()), with_lines=True)
    bench = restored.bench
    writing = [one for one in restored.plan.fusions if any(bench.ops[at].mutates for site in one.sites for at in site.outputs)]
    ops = kernel_ops(bench, [one for one in restored.plan.fusions if one not in writing])
    found = [
        PatchSite(fusion_id=site.fusion_id, kernel=one.planned.match.kernel, module=_module(bench, site),
                  reason="it writes into a tensor that it was given")
        for one in writing for site in one.sites
    ]  # fmt: skip
    sites = [(one, site) for one in restored.plan.fusions if one not in writing for site in one.sites]
    places: dict[int, list[_Place]] = {}
    reasons: dict[int, str] = {}
    trees: dict[str, ast.Module] = {}
    for number, (_, site) in enumerate(sites):
        try:
            places[number] = _places(bench, site, trees)
        except NotExpressed as reason:
            reasons[number] = str(reason)
    watched = {
        2 * number + way: Watched(one.file, one.statements, one.module)
        for number, ways in places.items()
        for way, one in enumerate(ways)
    }
    observed = observe(loaded, watched)
    restored.live.written.restore()
    for number, (fusion, site) in enumerate(sites):
        ways = [(one, observed.get(2 * number + way)) for way, one in enumerate(places.get(number, ()))]
        found.append(_site(bench, ops, fusion, site, ways, reasons.get(number, "")))
    return sorted(found, key=lambda one: int(one.fusion_id[1:]) if one.fusion_id[1:].isdigit() else 0)


def _site(
    bench: Bench, ops: KernelOps, fusion: BuiltFusion, site: SiteRewrite, ways: Sequence[tuple[_Place, Observed | None]],
    reason: str,
) -> PatchSite:  # fmt: skip
    """Return a site by the first of its places that computes it."""
    op = ops.of(site.call)
    assert op is not None
    bare = PatchSite(fusion_id=site.fusion_id, kernel=fusion.planned.match.kernel or op.name, module=_module(bench, site), op=op)
    region = bench.ops[site.members[0]].region
    chain = original_chain(bench.ops, bench.index_of[region], site.members, site.inputs, site.outputs)
    given = tuple(bench.ops[index] for index in site.inputs)
    for place, seen in ways:
        if seen is None:
            reason = f"its ops lie in several calls of {place.statements.function.name}, one after the other"
            continue
        try:
            expressed = express(op, SiteOps(chain=chain, given=given), place.statements, seen)
        except NotExpressed as why:
            reason = str(why)
            continue
        return replace(bare, file=place.file, statements=place.statements, expressed=expressed)
    return replace(bare, reason=reason)


def _module(bench: Bench, site: SiteRewrite) -> str:
    paths = [bench.ops[index].module_path.split(".") for index in site.members]
    shared: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


def _places(bench: Bench, site: SiteRewrite, trees: dict[str, ast.Module]) -> list[_Place]:
    """Return the statements whose ops are a site's: a whole function that ends with them, and the fewest that hold them."""
    index_of = bench.index_of[bench.ops[site.members[0]].region]
    frames = {node: frames_of(node) for node in index_of if node.op == "call_function"}
    members = set(site.members)
    shared = shared_call([frames[node] for node, index in index_of.items() if index in members and node in frames])
    if shared.file not in trees:
        trees[shared.file] = _parsed(shared.file)
    module = _module(bench, site)
    fewest = find_statements(trees[shared.file], shared.function, shared.lines)
    others = _others(bench, index_of, frames, shared, fewest, members, module)
    if others:
        name = overload_free(bench.ops[others[0]].target)
        where = f"lines {fewest.first_line} to {fewest.last_line}" if len(fewest.body) > 1 else f"line {fewest.first_line}"
        verb = "also compute" if len(fewest.body) > 1 else "also computes"
        raise NotExpressed(f"{where} of {Path(shared.file).name} {verb} {name}, which is no op of the chain")
    found = [_Place(shared.file, fewest, module)]
    if fewest.is_return:
        try:
            whole = find_statements(trees[shared.file], shared.function, shared.lines, from_start=True)
        except NotExpressed:
            return found
        if whole.body != fewest.body and not _others(bench, index_of, frames, shared, whole, members, module):
            found.insert(0, _Place(shared.file, whole, module))
    return found


def _others(
    bench: Bench, index_of: Mapping[Node, int], frames: Mapping[Node, tuple[Frame, ...]], shared: SharedCall,
    statements: Statements, members: set[int], module: str,
) -> Sequence[int]:  # fmt: skip
    """Return ops of the same call that come from the statements, run a kernel and are not the site's."""
    found = []
    for node, index in index_of.items():
        line = shared.line_of(frames.get(node, ()))
        if index in members or not statements.first_line <= line <= statements.last_line or is_idle_dropout(node):
            continue
        path = module_path(node)
        is_inside = not module or path == module or path.startswith(f"{module}.")
        op = bench.ops[index]
        is_view = op.op_class in (OpClass.VIEW, OpClass.INPUT) or (op.alias_of is not None and not op.mutates)
        if is_inside and not is_view:
            found.append(index)
    return found


def _parsed(file: str) -> ast.Module:
    try:
        return ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as error:
        raise NotExpressed(f"the source of its function is not a file ({Path(file).name})") from error
