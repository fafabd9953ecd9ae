"""Where the graph of a model differs from the graph of a saved plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusion_advisor.fuse.plan.plan import PlannedFusion
from fusion_advisor.records import OpNode, TensorMeta


def first_difference(before: tuple[OpNode, ...], now: list[OpNode]) -> tuple[int, str] | None:
    """Say where two captured graphs differ, or None when they are the same ops on the same layouts.

    The offset of a model's own tensor in its storage is no part of its layout: a weight may share a storage with others.

    Returns:
        The op's index and a sentence.
    """
    for old, new in zip(before, now, strict=False):
        if not _calls_alike(old, new) or _layouts(before, old) != _layouts(now, new):
            what = [_shown(old), _shown(new)]
            if what[0] == what[1]:
                what = [f"{op.target}{op.args} {dict(op.kwargs) or ''}".rstrip() for op in (old, new)]
            return new.index, f"op {new.index}{_place(new)} is {what[1]}, the plan has {what[0]}"
    if len(before) != len(now):
        return min(len(before), len(now)) - 1, f"this graph has {len(now)} ops, the plan's has {len(before)}"
    return None


def _calls_alike(old: OpNode, new: OpNode) -> bool:
    calls = [(op.target, op.args, op.kwargs, op.alias_of) for op in (old, new)]
    return calls[0] == calls[1] or repr(calls[0]) == repr(calls[1])  # NaN is not equal to itself


def _shown(op: OpNode) -> str:
    results = ", ".join(f"{meta.dtype}{list(meta.shape)} with strides {list(meta.stride)}" for meta in op.outputs)
    return f"{op.target} -> {results}" if results else op.target


def _place(op: OpNode) -> str:
    where = " at ".join(part for part in (op.module_path, f"{op.source_file}:{op.source_line}" if op.source_file else "") if part)
    return f" ({where})" if where else ""


def named_site(fusions: Sequence[PlannedFusion], index: int, difference: str) -> str:
    """Return a difference with the kept fusion, and its site, that an op of the plan belongs to.

    Args:
        fusions: of the plan.
        index: of the op.
        difference: a sentence.
    """
    for fusion in fusions:
        for number, site in enumerate(fusion.chain.sites, start=1):
            if index in site.op_indices:
                where = f"{fusion.id} {fusion.match.kernel}, site {number} of {len(fusion.chain.sites)}"
                return f"{difference}; that is in {where}{f' ({site.module_path})' if site.module_path else ''}"
    return difference


def _layouts(ops: Sequence[OpNode], op: OpNode) -> list[TensorMeta]:
    owner = op if op.alias_of is None else ops[op.alias_of]
    begins = owner.outputs[0].offset if owner.outputs else 0
    return [replace(meta, offset=meta.offset - begins) for meta in op.outputs]
