"""Records of a captured graph's ops: class, layouts, source line, and which op's memory each one reads, shares or writes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from fusion_advisor.capture.graph.fx_nodes import module_path, source_of, storages, tensors_of, written_storages
from fusion_advisor.capture.graph.op_classes import base_name, class_of
from fusion_advisor.capture.graph.tracer import Region
from fusion_advisor.ir.sized_int import SizedInt
from fusion_advisor.records import Arg, OpClass, OpNode, Ref, TensorMeta
from fusion_advisor.runtime.torch_internals import symbolic_sizes


def describe(
    region: Region,
    first_index: int = 0,
    *,
    symbols: symbolic_sizes.Symbols | None = None,
    leaves: dict[Any, int] | None = None,
) -> tuple[list[OpNode], dict[Node, int]]:
    """Turn a live graph into records.

    Args:
        region: its placeholders must have been named (``capture_regions`` does).
        first_index: index of the region's first record.
        symbols: of a graph with open sizes, the size that each symbol stands for in the records.
        leaves: gets each expression of open sizes with its place; the records' numbers then remember which they are
            (:class:`~fusion_advisor.ir.sized_int.SizedInt`).

    Returns:
        The records in execution order and the index of each fx node.
    """
    ops: list[OpNode] = []
    index_of: dict[Node, int] = {}
    number = SizeNumbers(symbols or {}, leaves)
    owner: dict[int, int] = {}  # storage -> index of the op that made it
    sharers: dict[int, list[int]] = {}  # storage -> all inputs of the region that lie in it
    shown: dict[Node, int] = {}  # a value -> the input of the region that it is a view of
    placeholder = 0
    for node in region.graph.graph.nodes:
        index = first_index + len(ops)
        index_of[node] = index
        metas = tensor_metas(node, number)
        if node.op == "placeholder":
            role = region.roles[placeholder] if region.roles else "input"
            target = region.names[placeholder] if region.names else str(node.target)
            placeholder += 1
            op = OpNode(index=index, region=region.index, target=target, op_class=OpClass.INPUT, outputs=metas, role=role)
            shown[node] = index
            for key in storages(node):
                sharers.setdefault(key, []).append(index)
        elif node.op == "get_attr":
            op = OpNode(
                index=index, region=region.index, target=str(node.target), op_class=OpClass.INPUT, outputs=metas, role="constant"
            )
        elif node.op == "output":
            op = OpNode(
                index=index,
                region=region.index,
                target="output",
                op_class=OpClass.OTHER,
                args=tuple(_encode(argument, index_of, number) for argument in node.args),
                role="output",
            )
        else:
            op = _describe_op(node, index, region.index, index_of, owner, sharers, shown, metas, number)
        # A list owns nothing: what it holds belongs to the item that is taken out of it, which a kernel can be given.
        if isinstance(node.meta.get("val"), torch.Tensor):
            for key in storages(node):
                owner.setdefault(key, index)
        ops.append(op)
    return ops, index_of


def _describe_op(
    node: Node,
    index: int,
    region: int,
    index_of: dict[Node, int],
    owner: dict[int, int],
    sharers: Mapping[int, list[int]],
    shown: dict[Node, int],
    metas: tuple[TensorMeta, ...],
    number: SizeNumbers,
) -> OpNode:
    target = _target_name(node)
    own_storages = storages(node)
    written = [key for key in written_storages(node) if key in owner]
    mutates = tuple(sorted({found for key in written for found in (owner[key], *sharers.get(key, ()))}))
    owners = [_owner_of(node, key, owner, sharers, shown) for key in own_storages]
    is_alias = bool(own_storages) and all(found is not None for found in owners)
    if is_alias and owners[0] is not None:
        shown[node] = owners[0]
    is_view = is_alias and not mutates
    file, line, text = source_of(node)
    return OpNode(
        index=index,
        region=region,
        target=target,
        op_class=OpClass.VIEW if is_view or target == "getitem" else _computed_class(target),
        args=tuple(_encode(argument, index_of, number) for argument in node.args),
        kwargs=tuple((name, _encode(value, index_of, number)) for name, value in node.kwargs.items()),
        outputs=metas,
        alias_of=owners[0] if is_alias else None,
        mutates=mutates,
        module_path=module_path(node),
        source_file=file,
        source_line=line,
        source_text=text,
    )


def _owner_of(
    node: Node, key: int, owner: Mapping[int, int], sharers: Mapping[int, list[int]], shown: Mapping[Node, int]
) -> int | None:  # fmt: skip
    """Return which op made the storage that a value lies in; of inputs that share one, the one that the value is a view of.

    The first of these inputs may be the smallest. And another call may give each of them memory of its own: what a forward pass
    keeps goes through hooks (``save_on_cpu``), and the two were views of one tensor only when the pass was traced.
    """
    if len(sharers.get(key, ())) > 1:
        for source in node.all_input_nodes:
            if source in shown and key in storages(source):
                return shown[source]
    return owner.get(key)


def _computed_class(target: str) -> OpClass:
    # A view op that did not return a view (reshape of a strided tensor, a contiguous() that copied) moved memory.
    found = class_of(base_name(target))
    return OpClass.MEMORY if found is OpClass.VIEW else found


def _target_name(node: Node) -> str:
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target)
    return getattr(node.target, "__name__", str(node.target))


class SizeNumbers:
    """Turns sizes into numbers, each expression of open ones once.

    Args:
        symbols: the size of each symbol.
        leaves: gets the expressions, each with its place; numbers then remember how they are computed.
    """

    def __init__(self, symbols: symbolic_sizes.Symbols, leaves: dict[Any, int] | None = None) -> None:
        self._symbols = symbols
        self._leaves = leaves
        self._known: dict[Any, Any] = {}

    def __call__(self, size: Any) -> Any:
        """Return the number of a size; any other value as it is."""
        expression = symbolic_sizes.expression_of(size)
        return size if expression is size else self.of(expression)

    def of(self, expression: Any) -> Any:
        """Return the number of an expression of open sizes."""
        if expression not in self._known:
            value = symbolic_sizes.at_sizes(expression, self._symbols)
            if self._leaves is not None and type(value) is int:
                value = SizedInt(value, ("size", self._leaves.setdefault(expression, len(self._leaves))))
            self._known[expression] = value
        return self._known[expression]


def tensor_metas(node: Node, number: SizeNumbers) -> tuple[TensorMeta, ...]:
    """Return the layouts of the tensors that a node returns.

    Args:
        node: of a graph.
        number: turns its sizes into numbers.
    """
    return tuple(
        TensorMeta(
            shape=tuple(map(number, value.shape)),
            stride=tuple(map(number, value.stride())),
            dtype=str(value.dtype).removeprefix("torch."),
            offset=number(value.storage_offset()),
            device=value.device.type,
        )
        for value in tensors_of(node.meta.get("val"))
    )


def _encode(value: Any, index_of: Mapping[Node, int], number: SizeNumbers) -> Arg:
    if isinstance(value, Node):
        size = value.meta.get("val")
        return number(size) if isinstance(size, torch.SymInt) else Ref(index=index_of[value])
    if symbolic_sizes.is_size(value):
        return number(value)
    if isinstance(value, list | tuple):
        return tuple(_encode(item, index_of, number) for item in value)
    if isinstance(value, dict):
        return tuple(_encode(item, index_of, number) for item in value.values())
    if isinstance(value, torch.dtype):
        return f"dtype:{str(value).removeprefix('torch.')}"
    if isinstance(value, torch.device):
        return f"device:{value.type}"
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return f"{type(value).__name__}:{value}"


def hash_of(ops: Sequence[OpNode]) -> str:
    """Return what is equal for equal graphs, wherever in their memory the model's tensors begin: ``lay_out_weights`` moves them.

    Args:
        ops: of a graph.
    """
    return hashlib.sha256(repr([_without_place(op) for op in ops]).encode()).hexdigest()[:32]


def _without_place(op: OpNode) -> OpNode:
    is_held = op.role in ("parameter", "buffer")
    outputs = tuple(replace(one, offset=0) for one in op.outputs) if is_held else op.outputs
    return replace(op, source_file="", source_line=0, source_text="", module_path="", outputs=outputs)
