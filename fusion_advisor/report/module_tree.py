"""Kernel time by module, then chain, before and after: a tree whose sums are the two traced steps.

A report knows the module of a chain's sites; GEMMs, attention and ops outside every chain it knows by category alone, so each of
these is one branch. Both sides are traced, so they may be compared with each other and not with wall times.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from fusion_advisor.records import Chain, Fusion, Report, Site, Status, StepProfile
from fusion_advisor.report import shared_rows
from fusion_advisor.report.escape import visible

_OWN = ("gemm", "attention", "convolution")
"""Categories that no chain holds: a branch each."""
_FUSED = "fused"


@dataclass(frozen=True, slots=True)
class Branch:
    """A module, a chain or a category, with its kernel time on both sides."""

    name: str
    before_ns: int
    after_ns: int | None
    """None where the after-trace does not tell this branch's kernels from others."""
    children: tuple[Branch, ...] = ()
    anchor: str = ""
    """The chain's row or the fusion's card."""
    note: str = ""
    kind: str = "module"
    """``module``, ``chain`` or a category."""


@dataclass(frozen=True, slots=True)
class Tree:
    """Both steps by branch, largest first; each side's branches add up to its step."""

    before: str
    after: str
    """The two steps' names; the second is empty in a profile."""
    before_ns: int
    after_ns: int
    branches: tuple[Branch, ...]


@dataclass(slots=True)
class _Node:
    """A module while the tree is built."""

    children: dict[str, _Node] = field(default_factory=dict)
    chains: list[Branch] = field(default_factory=list)


def tree(report: Report) -> Tree | None:
    """Build the tree; None where nothing was traced."""
    before = report.captured or report.before
    after = None if shared_rows.is_unchanged(report) else report.after
    if not before.device_ns:
        return None
    fused_ns = _fused_times(report, after)
    root = _Node()
    for chain in report.chains:
        fusion = _kept(report, chain)
        for path, sites in _by_path(chain.sites):
            node = root
            for part in path:
                node = node.children.setdefault(part, _Node())
            node.chains.append(_leaf(chain, sites, fusion, fused_ns))
    modules = tuple(_branch(name, child) for name, child in root.children.items())
    loose = (*modules, *root.chains, *_linears(report, fused_ns), *_categories(before, after))
    whole_before, whole_after = _sums(loose)
    device_after = after.device_ns if after else 0
    rest = Branch(
        "outside every chain",
        max(0, before.device_ns - whole_before),
        max(0, device_after - whole_after) if after else None,
        note="pointwise, reduction and memory kernels, chains without a kept fusion among them after",
        kind="other",
    )
    shown = (*loose, *((rest,) if rest.before_ns or rest.after_ns else ()))
    return Tree(before.label, after.label if after else "", before.device_ns, device_after, _ranked(shown))


def layers(report: Report) -> tuple[tuple[int, int, int], ...]:
    """Return kernel time of the chains by layer: (layer, before, after) in ns; empty with fewer than two layers.

    Only chains with a kept fusion count. After, a site's time is its own launch where the trace has one for each site, else an
    equal part.
    """
    found: dict[int, list[int]] = {}
    after = None if shared_rows.is_unchanged(report) else report.after
    fused_ns = _fused_times(report, after)
    for chain in report.chains:
        fusion = _kept(report, chain)
        if fusion is None or fusion.id not in fused_ns:
            continue
        ordered = sorted(chain.sites, key=lambda site: site.op_indices[:1])
        own_ns = _site_times(after, fusion, ordered, fused_ns)
        for site, after_ns in zip(ordered, own_ns, strict=True):
            layer = _layer(site.module_path)
            if layer is not None:
                row = found.setdefault(layer, [0, 0])
                row[0] += site.device_ns
                row[1] += after_ns
    return tuple((layer, found[layer][0], found[layer][1]) for layer in sorted(found)) if len(found) > 1 else ()


def folded_path(path: str) -> tuple[str, ...]:
    """Split a module path with equal layers as one part: ``model.layers.3.mlp`` → ``model``, ``layers.*``, ``mlp``."""
    parts: list[str] = []
    for part in path.split(".") if path else []:
        if part.isdecimal() and parts:
            parts[-1] += ".*"
        else:
            parts.append(visible(part, 60))
    return tuple(parts) or ("(top level)",)


def _layer(path: str) -> int | None:
    number = re.search(r"(?:^|\.)(\d{1,4})(?:\.|$)", path)
    return int(number[1]) if number else None


def _by_path(sites: Iterable[Site]) -> list[tuple[tuple[str, ...], list[Site]]]:
    found: dict[tuple[str, ...], list[Site]] = {}
    for site in sites:
        found.setdefault(folded_path(site.module_path), []).append(site)
    return list(found.items())


def _kept(report: Report, chain: Chain) -> Fusion | None:
    fusion = shared_rows.fusion_by_chain(report).get(chain.id)
    return fusion if fusion is not None and fusion.status is Status.KEPT else None


def _fused_times(report: Report, after: StepProfile | None) -> dict[str, int]:
    """Kernel time after, by the id of the kept fusion; fusions of one kernel share it by their sites' own times."""
    if after is None:
        return {}
    kept = [fusion for fusion in report.fusions if fusion.status is Status.KEPT and fusion.rendered]
    by_kernel: dict[str, list[Fusion]] = {}
    for fusion in kept:
        by_kernel.setdefault(fusion.rendered[0].name, []).append(fusion)
    traced = {name: ns for name, _, _, ns in after.kernels}
    found: dict[str, int] = {}
    for name, members in by_kernel.items():
        weights = [max(1, row.chain_after.median_ns if row.chain_after else 1) * row.receipt.sites_replaced for row in members]
        whole, left = traced.get(name, 0), traced.get(name, 0)
        for row, weight in zip(members[:-1], weights[:-1], strict=True):
            found[row.id] = whole * weight // max(sum(weights), 1)
            left -= found[row.id]
        found[members[-1].id] = left
    return {name: ns for name, ns in found.items() if ns}


def _leaf(chain: Chain, sites: list[Site], fusion: Fusion | None, fused_ns: dict[str, int]) -> Branch:
    before_ns = sum(site.device_ns for site in sites)
    after_ns = None
    if fusion is not None and fusion.id in fused_ns:
        after_ns = fused_ns[fusion.id] * len(sites) // max(len(chain.sites), 1)
    ops = " → ".join(visible(op, 24) for op in chain.ops)
    name = f"{fusion.id} {visible(fusion.kernel, 60)}" if fusion else chain.id
    count = f"{len(sites)} site{'s' if len(sites) > 1 else ''}: {ops}"
    return Branch(name, before_ns, after_ns, anchor=fusion.id if fusion else f"chain-{chain.id}", note=count, kind="chain")


def _linears(report: Report, fused_ns: dict[str, int]) -> list[Branch]:
    """Kernels that took GEMMs in: they stand for no chain, so what they replaced is in the categories before."""
    rows = [row for row in report.fusions if not row.chain_id and row.id in fused_ns]
    note = "a GEMM with its neighbours; before, its time is in the categories"
    return [
        Branch(f"{row.id} {visible(row.kernel, 60)}", 0, fused_ns[row.id], anchor=row.id, note=note, kind=_FUSED) for row in rows
    ]


def _categories(before: StepProfile, after: StepProfile | None) -> list[Branch]:
    sides = [{name: ns for name, _, ns in step.categories} if step else {} for step in (before, after)]
    return [
        Branch(name, sides[0].get(name, 0), sides[1].get(name, 0) if after else None, note="by category", kind=name)
        for name in _OWN
        if any(name in side for side in sides)
    ]


def _branch(name: str, node: _Node) -> Branch:
    children = _ranked((*(_branch(part, child) for part, child in node.children.items()), *node.chains))
    if len(children) == 1 and children[0].kind == "module":
        only = children[0]
        return replace(only, name=f"{name}.{only.name}")
    before_ns, after_ns = _sums(children)
    known = any(child.after_ns is not None for child in children)
    return Branch(name, before_ns, after_ns if known else None, children)


def _sums(branches: Iterable[Branch]) -> tuple[int, int]:
    rows = list(branches)
    return sum(row.before_ns for row in rows), sum(row.after_ns or 0 for row in rows)


def _ranked(branches: Iterable[Branch]) -> tuple[Branch, ...]:
    return tuple(sorted(branches, key=lambda row: -max(row.before_ns, row.after_ns or 0)))


def _site_times(after: StepProfile | None, fusion: Fusion, sites: list[Site], fused_ns: dict[str, int]) -> list[int]:
    equal = [fused_ns[fusion.id] // max(len(sites), 1)] * len(sites)
    if after is None or after.timeline is None:
        return equal
    places = {at for at, row in enumerate(after.kernels) if row[0] == fusion.rendered[0].name}
    own = [ns for at, ns in zip(after.timeline.kernel, after.timeline.duration_ns, strict=True) if at in places]
    return own if len(own) == len(sites) else equal
