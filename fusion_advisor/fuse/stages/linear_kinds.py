"""Kinds of linear layers in a step: the sites that one kernel computes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from torch.fx import Node

from fusion_advisor.codegen.gemm.problem import GemvProblem
from fusion_advisor.fuse.decide.session import Bench
from fusion_advisor.fuse.passes.linear_sites import LINEAR_KERNELS, GemvSite
from fusion_advisor.fuse.stages.gemm_sites import Place, own_classes

_DTYPES = ("float16", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Sites that one kernel computes."""

    title: str
    """``rmsnorm_gate_up``: the library's name, or what is in it."""
    problem: GemvProblem
    places: tuple[Place, ...]


def find_kinds(bench: Bench, taken: Collection[int] = ()) -> list[Kind]:
    """Return the sites of all regions by problem: those with a norm first, then by the bytes of their weights.

    Args:
        bench: over the graphs as they are now.
        taken: ops that other calls keep; a linear is found without its norm where that is among them.
    """
    found: dict[tuple[str, GemvProblem], list[Place]] = {}
    for region, index_of in zip(bench.live.regions, bench.index_of, strict=True):
        for whole in LINEAR_KERNELS.find(region.graph.graph):
            site = _without(whole, index_of, taken)
            if site is None or not _is_of_one_dtype(site) or own_classes(region, site.operands):
                continue
            place = Place(
                region=region.index,
                members=tuple(index_of[node] for node in site.members),
                inputs=tuple(index_of[node] for node in site.operands),
            )
            found.setdefault((_title(site), _problem(site)), []).append(place)
    kinds = [Kind(title=title, problem=problem, places=tuple(places)) for (title, problem), places in found.items()]
    return sorted(kinds, key=lambda kind: (not kind.problem.has_norm, -kind.problem.weight_bytes * len(kind.places)))


def _without(site: GemvSite, index_of: Mapping[Node, int], taken: Collection[int]) -> GemvSite | None:
    """Return a site as it is where none of its ops is taken, without its norm where only that is, and None otherwise."""
    for left in (site, replace(site, norm=None)):
        if not any(index_of[node] in taken for node in left.members):
            return left
    return None


def _is_of_one_dtype(site: GemvSite) -> bool:
    """Whether all tensors are contiguous and of one 16-bit dtype: float32 GEMMs are no GEMV's, they run in TF32 or in full."""
    values = [node.meta["val"] for node in (*site.operands, site.result)]
    dtypes = {str(value.dtype).removeprefix("torch.") for value in values}
    return len(dtypes) == 1 and dtypes.pop() in _DTYPES and all(value.is_contiguous() for value in values)


def _title(site: GemvSite) -> str:
    parts = ("rmsnorm" * (site.norm is not None), "gate_up" if site.is_gated else "linear", "bias" * site.has_bias)
    return "_".join(part for part in (*parts, "residual" * (site.residual is not None)) if part)


def _problem(site: GemvSite) -> GemvProblem:
    return GemvProblem(
        m=site.rows,
        n=site.columns,
        k=site.inner,
        dtype=str(site.result.meta["val"].dtype).removeprefix("torch."),
        has_norm=site.norm is not None,
        eps=site.norm.eps if site.norm is not None else 0.0,
        has_bias=site.has_bias,
        is_gated=site.is_gated,
        has_residual=site.residual is not None,
    )
