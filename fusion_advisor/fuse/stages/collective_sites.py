"""Sums over ranks that a residual add and a norm follow: found in the graphs, bound to a kernel, and checked.

The chain after the sum is one that the library knows (``fuse.stages.after_sums``). With the sum it becomes one launch on each
rank. The new residual is one of the call's results, because later layers read it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fusion_advisor.capture.graph.fx_nodes import first_reader, is_written_between
from fusion_advisor.codegen.common.interface import Launcher
from fusion_advisor.collectives.group_kernels import GroupKernels, NormCall
from fusion_advisor.collectives.launch_shape import Way
from fusion_advisor.fuse.decide.session import Bench, BuiltLinear
from fusion_advisor.fuse.rewrite.collective_kernels import LAYER_TITLE, TITLE, GroupCall
from fusion_advisor.fuse.rewrite.graph_rewriter import SiteRewrite, fused_call
from fusion_advisor.fuse.stages.after_sums import Followers, Left
from fusion_advisor.fuse.stages.gemm_sites import Place
from fusion_advisor.records import Numerics, OpNode, Ref, RenderedKernel, Tolerance
from fusion_advisor.verify.check_chain import SCALES, check_calls, random_like, with_special_rows
from fusion_advisor.verify.subgraph_oracle import OriginalChain, original_chain

_SUM, _WAIT = "_c10d_functional.all_reduce.default", "_c10d_functional.wait_tensor.default"


@dataclass(frozen=True, slots=True, kw_only=True)
class SumPlace:
    """One site by op indices.

    Attributes:
        place: members in order, and what the call reads: what is summed, the residual, the weight, a LayerNorm's shift, the
            bias of the linear.
        outputs: ops whose results the call makes, by the kernel's name: ``out``, and ``total`` where somebody reads it.
    """

    place: Place
    outputs: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SumKind:
    """Sites of one size and norm, which share a kernel and a verdict."""

    call: NormCall
    group_name: str
    sites: tuple[SumPlace, ...]

    @property
    def places(self) -> list[Place]:
        """Of all sites."""
        return [site.place for site in self.sites]

    @property
    def title(self) -> str:
        """Name of its kernel in reports and saved plans."""
        return LAYER_TITLE if self.call.norm == "layer" else TITLE


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftSum:
    """A sum over ranks that stays as it is, by its op's index."""

    index: int
    reason: str


def find_kinds(bench: Bench, taken: Collection[int] = ()) -> tuple[list[SumKind], list[LeftSum]]:
    """Return the sums over ranks that a kernel could compute with what follows, by size and norm, and those that stay.

    Args:
        bench: over the graphs as they are now.
        taken: ops that other calls have taken in.
    """
    sums = [index for index, op in enumerate(bench.ops) if op.target == _SUM]
    if not sums:
        return [], []
    after = Followers(bench)
    found: dict[tuple[NormCall, str], list[SumPlace]] = {}
    left: list[LeftSum] = []
    gone = set(taken)
    for index in sums:
        try:
            call, group_name, site = _site(bench, index, after, gone)
        except Left as reason:
            left.append(LeftSum(index=index, reason=str(reason)))
            continue
        gone.update(site.place.members)
        found.setdefault((call, group_name), []).append(site)
    kinds = [SumKind(call=call, group_name=group, sites=tuple(sites)) for (call, group), sites in found.items()]
    return kinds, left


def _site(bench: Bench, index: int, after: Followers, taken: Collection[int]) -> tuple[NormCall, str, SumPlace]:
    """Return the site of one sum.

    Raises:
        Left: it has none.
    """
    op = bench.ops[index]
    summed, reduction, group_name = op.args[:3]
    assert isinstance(summed, Ref) and isinstance(group_name, str)
    if reduction != "sum":
        raise Left(f"it takes the {reduction} over the ranks, not the sum")
    waits = after.readers(index)
    if len(waits) != 1 or bench.ops[waits[0]].target != _WAIT:
        raise Left("more than one op reads what is under way")
    waited = waits[0]
    tail = after.tail(waited)
    members = tuple(sorted({index, waited, *tail.members}))
    if not set(members).isdisjoint(taken):
        raise Left("another call took in what follows")
    result, inputs = bench.ops[waited].outputs[0], (summed.index, *tail.inputs)
    call = NormCall(
        rows=math.prod(result.shape[:-1]), cols=result.shape[-1], dtype=getattr(torch, result.dtype), eps=tail.eps,
        norm=tail.norm, has_offset=tail.has_offset,
    )  # fmt: skip
    _refuse_layouts(bench, call, inputs, [at for _, at in tail.outputs])
    if is_written_between([after.node(summed.index)], after.node(min(members)), first_reader(after.node(tail.outputs[-1][1]))):
        raise Left("what is summed is written to before it would be read")
    place = Place(region=bench.ops[waited].region, members=members, inputs=inputs)
    return call, group_name, SumPlace(place=place, outputs=tail.outputs)


def _refuse_layouts(bench: Bench, call: NormCall, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Raise Left where tensors are no plain rows of one dtype."""
    metas = [bench.ops[index].outputs[0] for index in (*inputs, *outputs)]
    dtypes = {meta.dtype for meta in metas}
    if len(dtypes) > 1:
        raise Left(f"it mixes {' and '.join(sorted(dtypes))}: the kernel reads and writes one dtype")
    rows = (0, 1, *range(len(inputs), len(metas)))  # what is summed, the residual, the results; the others are vectors
    shapes = [(call.rows, call.cols) if number in rows else (call.cols,) for number in range(len(metas))]
    for meta, shape in zip(metas, shapes, strict=True):
        is_rows = math.prod(meta.shape) == math.prod(shape) and meta.shape[-1:] == shape[-1:]
        if not is_rows or meta.stride != _packed(meta.shape):
            raise Left("its tensors are no rows without holes")


def _packed(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[number + 1 :]) for number in range(len(shape)))


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeSum:
    """A kernel bound to the size of a kind, in one way to sum."""

    kernel: RenderedKernel
    launch: Launcher
    kernels: GroupKernels
    way: Way


def build(kind: SumKind, kernels: GroupKernels, way: Way, path: Path) -> MadeSum:
    """Compile the kernel for a kind.

    Args:
        kind: what to compute.
        kernels: of the group.
        way: to sum.
        path: of its source; its suffix is the backend's in the end.

    Raises:
        KernelBuildFailed: it does not compile.
    """
    rendered = kernels.rendered(kind.call)
    path = path.with_suffix(rendered.suffix)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(rendered.file_text)
    launch = kernels.launcher(kind.call, way)
    kernel = RenderedKernel(
        name=rendered.entry, backend=rendered.backend, path=f"kernels/{path.name}", source=rendered.file_text,
        origin="written by hand, for ranks of one host", tuning=tuning_of(kind, kernels, way),
    )  # fmt: skip
    return MadeSum(kernel=kernel, launch=launch, kernels=kernels, way=way)


def tuning_of(kind: SumKind, kernels: GroupKernels, way: Way) -> str:
    """Return how a kernel is launched; a saved plan reads the first words again."""
    return f"{way} over {kernels.world_size} ranks, {kernels.words(kind.call)}"


def read_tuning(tuning: str) -> tuple[Way, int]:
    """Return the way and the number of ranks of a saved kernel.

    Args:
        tuning: from :func:`tuning_of`.

    Raises:
        ValueError: it is no such text.
    """
    way, over, ranks, *_ = [*tuning.split(), "", "", ""]
    if over != "over" or not ranks.isdigit():
        raise ValueError(f"no way to sum in `{tuning[:60]}`")
    return ("two-shot" if way == "two-shot" else "one-shot"), int(ranks)


def original_sum(bench: Bench, site: SumPlace) -> tuple[OriginalChain, list[torch.Tensor]]:
    """Return a site's original ops, which meet the other ranks, and its own tensors; the bench has observed them."""
    place = site.place
    index_of = bench.index_of[place.region]
    chain = original_chain(bench.ops, index_of, place.members, place.inputs, [index for _, index in site.outputs])
    return chain, [bench.values[index] for index in place.inputs]


def bound(bench: Bench, site: SumPlace, made: MadeSum, *, is_poisoned: bool = False) -> GroupCall:
    """Return the call that takes a site's place."""
    names = [name for name, _ in site.outputs]
    layouts = [bench.ops[index].outputs[0] for index in site.place.inputs]
    results = [bench.ops[index].outputs[0] for _, index in site.outputs]
    call = fused_call(made.kernel.name, _in_order(made.launch, names), layouts, results, is_poisoned=is_poisoned)
    return GroupCall(made.kernel.name, call, made.kernels)


def _in_order(launch: Launcher, names: Sequence[str]) -> Launcher:
    """Return what takes the results in a chain's order; a total that nobody reads gets memory of its own."""

    def call(*tensors: torch.Tensor) -> None:
        given, results = tensors[: -len(names)], tensors[-len(names) :]
        by_name = dict(zip(names, results, strict=True))
        total, out = by_name.get("total"), by_name.get("out")
        residual = given[1]
        launch(*given, torch.empty_like(residual) if total is None else total, torch.empty_like(residual) if out is None else out)

    return call


def check(
    bench: Bench, kind: SumKind, made: MadeSum, *, tolerance: Tolerance | None, worst: Callable[[Numerics], str]
) -> tuple[Numerics, str]:
    """Compare a kernel with the ops it replaces, on all ranks together: the ops and the kernel meet the other ranks.

    Args:
        bench: has observed the sites.
        kind: the sites.
        made: the kernel.
        tolerance: the user's limit instead of eager's own error.
        worst: given what this rank found, says what is wrong on any rank; empty where nothing is.

    Returns:
        What this rank found, and what is wrong on any.
    """
    sites = [(*original_sum(bench, site), bound(bench, site, made, is_poisoned=True)) for site in kind.sites]
    first, own, call = sites[0]
    fresh = [_fresh(own, number, scale, made.kernels.rank) for number, scale in enumerate(SCALES)]
    trials: list[tuple[OriginalChain, Callable[..., Any], Sequence[torch.Tensor]]] = [
        (chain, one, roots) for chain, roots, one in sites
    ]
    trials += [(first, call, roots) for roots in fresh]
    words = f"the own tensors of {len(sites)} sites; random rows ×2, ×32 and ×0.001 in magnitude, other ones on each rank"
    numerics = check_calls(trials, inputs=f"{words}; the worst is shown", tolerance=tolerance)
    if problem := worst(numerics):
        return numerics, problem
    numerics = with_special_rows(numerics, first, call, own, rows=(0,), tolerance=tolerance)
    return numerics, worst(numerics)


def _fresh(own: Sequence[torch.Tensor], number: int, scale: float, rank: int) -> list[torch.Tensor]:
    """Return random rows: each rank's part is its own, the residual is equal on all."""
    (part,), (residual,) = random_like(own[:1], 1000 * (rank + 1) + number, scale), random_like(own[1:2], number, scale)
    return [part, residual, *own[2:]]


def check_first(bench: Bench, kind: SumKind, made: MadeSum, *, tolerance: Tolerance | None) -> Numerics:
    """Compare a kernel that passed :func:`check` before with the ops, on the first site's own tensors."""
    chain, roots = original_sum(bench, kind.sites[0])
    call = bound(bench, kind.sites[0], made, is_poisoned=True)
    return check_calls([(chain, call, roots)], inputs="the first site's own tensors", tolerance=tolerance)


def install(bench: Bench, kind: SumKind, made: MadeSum, *, name: str) -> BuiltLinear:
    """Return a kernel's calls as they go into graphs."""
    sites = [
        SiteRewrite(
            fusion_id=name, members=site.place.members, inputs=site.place.inputs,
            outputs=tuple(index for _, index in site.outputs), call=bound(bench, site, made),
        )
        for site in kind.sites
    ]  # fmt: skip
    return BuiltLinear(id=name, sites=tuple(sites))


def ops_of(bench: Bench, kind: SumKind) -> list[OpNode]:
    """Return the ops that a kind's calls replace."""
    return [bench.ops[index] for place in kind.places for index in place.members]
