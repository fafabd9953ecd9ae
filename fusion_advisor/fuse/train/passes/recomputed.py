"""What a memory budget has the backward pass compute again: which ops, what is no longer kept, and what the ops take.

Torch's partitioner chooses (``activation_memory_budget``). Both partitions are of one graph, so an op has one name in both of
their forward passes, and again in a backward pass that computes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from fusion_advisor.capture.graph.fx_nodes import module_path, storages, tensors_of
from fusion_advisor.capture.graph.op_classes import base_name
from fusion_advisor.capture.training import layers_folded
from fusion_advisor.records import Capture, Recomputed

_Key = tuple[str, str]
"""Op and module, layers folded."""
_LAST_NUMBER = re.compile(r"\.\d+$")


@dataclass(slots=True)
class _Row:
    again: int = 0
    saved_bytes: int = 0


def recomputed(
    before: Mapping[str, GraphModule], after: Mapping[str, GraphModule], forward: Capture | None
) -> tuple[Recomputed, ...]:  # fmt: skip
    """Return the ops of the forward pass that the backward pass computes again, largest saving first.

    Args:
        before: both passes by name, with all that torch keeps by default.
        after: the same with the budget.
        forward: the traced forward pass with the budget; None where none was traced.
    """
    kept, still = kept_bytes(before), kept_bytes(after)
    again = _run_in(after["backward"]) - _run_in(before["backward"])
    rows: dict[_Key, _Row] = {}
    for node in before["forward"].graph.nodes:
        saved = kept.get(node.name, 0) - still.get(node.name, 0)
        if node.op == "call_function" and (saved or node.name in again):
            row = rows.setdefault(_key(base_name(str(node.target)), module_path(node)), _Row())
            row.again += node.name in again
            row.saved_bytes += saved
    times = {} if forward is None else _mean_ns(forward)
    found = [
        Recomputed(
            op=op,
            module=module,
            ops=row.again,
            saved_bytes=row.saved_bytes,
            again_ns=round(times.get((op, module), 0) * row.again),
        )
        for (op, module), row in rows.items()
    ]
    return tuple(
        sorted((row for row in found if row.saved_bytes or row.again_ns), key=lambda row: (-row.saved_bytes, -row.again_ns))
    )


def _run_in(graph_module: GraphModule) -> set[str]:
    return {node.name for node in graph_module.graph.nodes if node.op == "call_function"}


def kept_bytes(passes: Mapping[str, GraphModule]) -> dict[str, int]:
    """Return what the forward pass keeps for the backward pass: bytes of each tensor, by the name of the op that made it.

    Weights and inputs do not count, and views of one tensor count once.

    Args:
        passes: both by name.
    """
    forward = passes["forward"].graph
    given = {str(node.target) for node in passes["backward"].graph.nodes if node.op == "placeholder"}
    made: dict[int, tuple[Node, int]] = {}
    for node, key, size in _tensors(forward.nodes):
        made.setdefault(key, (node, size))
    kept = {key for node in forward.nodes if node.name in given for key in storages(node)}
    found: dict[str, int] = {}
    for node, size in (made[key] for key in kept):
        if node.op == "call_function":
            found[node.name] = found.get(node.name, 0) + size
    return found


def _tensors(nodes: Iterable[Node]) -> Iterator[tuple[Node, int, int]]:
    for node in nodes:
        if node.op != "output":
            for key, value in zip(storages(node), tensors_of(node.meta.get("val")), strict=True):
                yield node, key, value.untyped_storage().nbytes()


def _key(op: str, module: str) -> _Key:
    """An op's row; residual additions belong to the layer itself, ``model.layers.3``."""
    return op, _LAST_NUMBER.sub(".*", layers_folded(module))


def _mean_ns(capture: Capture) -> dict[_Key, float]:
    """Return what an op of each kind takes in a traced pass."""
    spent: dict[int, int] = {}
    for launch in capture.launches:
        if launch.op_index is not None:
            spent[launch.op_index] = spent.get(launch.op_index, 0) + launch.duration_ns
    by_key: dict[_Key, list[int]] = {}
    for op in capture.ops:
        if op.role == "op":
            by_key.setdefault(_key(base_name(op.target), op.module_path), []).append(spent.get(op.index, 0))
    return {key: sum(times) / len(times) for key, times in by_key.items()}
