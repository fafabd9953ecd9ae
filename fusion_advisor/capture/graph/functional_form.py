"""Forms that mean the same in a captured graph, of which chains and layouts can only be found in one.

- **In-place ops.** ``scores += bias`` writes to a value that the graph made itself. Where nobody reads that memory afterwards
  except by way of the op's own result, the op that makes a new tensor gives the same numbers, and can be fused with its readers.
- **Numbers in tensors of the host.** ``x / torch.sqrt(torch.tensor(64.0))`` divides by a tensor of one number, which no kernel on
  a GPU can read. Torch itself takes such a tensor as a number; where code spells it out, the graph gets the number.
- **Padding by name.** ``conv2d(x, weight, padding="same")`` is another op than the one with numbers, and calls it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from fusion_advisor.capture.graph.fx_nodes import storages
from fusion_advisor.capture.graph.op_classes import base_name, class_of
from fusion_advisor.records import OpClass
from fusion_advisor.runtime.torch_internals import fake_mode


def put_numbers_in(graph_module: GraphModule) -> int:
    """Give pointwise ops the numbers of tensors that the model's code spells out, in place of these; returns how many."""
    known = _numbers(graph_module)
    changed = 0
    for node in graph_module.graph.nodes:
        found = [source for source in node.all_input_nodes if source in known]
        if node in known or not found or len(found) == len(node.all_input_nodes) or not _is_pointwise(node):
            continue
        if any(argument in known for argument in node.args[:1]):  # `self` must be a tensor
            continue
        before = node.args
        node.args = tuple(known[one].item() if isinstance(one, Node) and one in known else one for one in node.args)
        if _is_as_before(graph_module, node):
            changed += 1
        else:
            node.args = before
    if changed:
        graph_module.graph.eliminate_dead_code()
        graph_module.recompile()
    return changed


_PADDED_BY_NAME = {
    torch.ops.aten.conv1d.padding: torch.ops.aten.conv1d.default,
    torch.ops.aten.conv2d.padding: torch.ops.aten.conv2d.default,
    torch.ops.aten.conv3d.padding: torch.ops.aten.conv3d.default,
}


def pad_by_numbers(graph_module: GraphModule) -> int:
    """Give convolutions whose padding has a name the numbers that it stands for; returns how many.

    An even window's ``same`` puts more on one side than on the other, which no numbers say; such a convolution stays.
    """
    changed = 0
    for node in graph_module.graph.nodes:
        if node.target not in _PADDED_BY_NAME or not all("val" in source.meta for source in node.all_input_nodes):
            continue
        names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
        given = dict(zip(names, node.args, strict=False)) | node.kwargs
        window = given["weight"].meta["val"].shape[2:]
        name, stride, dilation = (given.get(name) for name in ("padding", "stride", "dilation"))
        stride, dilation = ([1] * len(window) if one is None else one for one in (stride, dilation))
        each = dilation if len(dilation) == len(window) else [*dilation] * len(window)
        around = [by * (int(size) - 1) for by, size in zip(each, window, strict=True)]
        if name == "same" and any(total % 2 for total in around):
            continue
        padding = [total // 2 if name == "same" else 0 for total in around]
        node.target = _PADDED_BY_NAME[node.target]
        node.args = (
            given["input"], given["weight"], given.get("bias"), stride, padding, dilation, given.get("groups", 1),
        )  # fmt: skip
        node.kwargs = {}
        changed += 1
    if changed:
        graph_module.recompile()
    return changed


def write_out_of_place(graph_module: GraphModule) -> int:
    """Let ops that write to a value of the graph's own make a new one, where nobody can tell; returns how many."""
    order = {node: number for number, node in enumerate(graph_module.graph.nodes)}
    sharing = _Sharing(order)
    lasting = {key for node in order if node.op in ("placeholder", "get_attr") for key in storages(node)}
    changed = 0
    for node, at in order.items():
        functional = _functional(node)
        if functional is None or not lasting.isdisjoint(storages(node)) or _is_seen_elsewhere(node, sharing, order):
            continue
        target, value = node.target, node.meta["val"]
        node.target = functional
        made = fake_mode.fake_result(graph_module, node)
        if (made.shape, made.dtype, made.stride()) != (value.shape, value.dtype, value.stride()):
            node.target = target
            continue
        later = [other for other in sharing.of(node) if order[other] > at and other.op == "call_function"]
        sharing.set(node, made)
        for other in later:
            sharing.set(other, fake_mode.fake_result(graph_module, other))
        changed += 1
    if changed:
        graph_module.recompile()
    return changed


class _Sharing:
    """Which nodes lie in one memory: asked for each in-place op, of which an unrolled loop has hundreds."""

    def __init__(self, order: dict[Node, int]) -> None:
        self._order = order
        self._nodes: dict[int, set[Node]] = {}
        for node in order:
            self._add(node)

    def of(self, node: Node) -> list[Node]:
        """Return the nodes in the memory of one, in order."""
        return sorted(set().union(*(self._nodes[key] for key in storages(node))), key=self._order.__getitem__)

    def set(self, node: Node, value: Any) -> None:
        """Give a node another value."""
        for key in storages(node):
            self._nodes[key].discard(node)
        node.meta["val"] = value
        self._add(node)

    def _add(self, node: Node) -> None:
        for key in storages(node):
            self._nodes.setdefault(key, set()).add(node)


def _numbers(graph_module: GraphModule) -> dict[Node, torch.Tensor]:
    """Return the values of what is one number in the host's memory and follows from the code alone."""
    found: dict[Node, torch.Tensor] = {}
    for node in graph_module.graph.nodes:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dim() or value.device.type != "cpu":
            continue
        if node.op == "get_attr":
            found[node] = getattr(graph_module, str(node.target))
        elif node.all_input_nodes and all(source in found for source in node.all_input_nodes) and _is_pure(node):
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), found.__getitem__)
            with torch.no_grad():
                result = node.target(*args, **kwargs)
            if isinstance(result, torch.Tensor):
                found[node] = result
    return found


def _is_pure(node: Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return not node.target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in node.target.tags


def _is_pointwise(node: Node) -> bool:
    is_op = node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)
    return is_op and class_of(base_name(str(node.target))) is OpClass.POINTWISE


def _is_as_before(graph_module: GraphModule, node: Node) -> bool:
    """Whether an op with other arguments returns a tensor of the same dtype and layout."""
    was = node.meta["val"]
    try:
        now = fake_mode.fake_result(graph_module, node)
    except (RuntimeError, TypeError):
        return False
    return isinstance(now, torch.Tensor) and (was.shape, was.dtype, was.stride()) == (now.shape, now.dtype, now.stride())


def _functional(node: Node) -> Any:
    """Return the op that makes a new tensor of what a pointwise op writes to its first argument; None for any other op."""
    if not _is_pointwise(node) or not isinstance(node.meta.get("val"), torch.Tensor):
        return None
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return None
    assert isinstance(node.target, torch._ops.OpOverload)
    space, _, name = node.target._schema.name.partition("::")
    written = [one for one in node.target._schema.arguments if one.alias_info is not None and one.alias_info.is_write]
    if space != "aten" or not name.endswith("_") or name.endswith("__") or len(written) != 1 or node.kwargs:
        return None
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
    overload = node.target._overloadname or "default"
    if packet is None or overload not in packet.overloads():
        return None
    functional = getattr(packet, overload)
    same = [one.name for one in functional._schema.arguments] == [one.name for one in node.target._schema.arguments]
    return functional if same and not functional._schema.is_mutable else None


def _is_seen_elsewhere(node: Node, sharing: _Sharing, order: dict[Node, int]) -> bool:
    """Whether anything that lay in an op's memory before it is read after it."""
    at = order[node]
    before = (other for other in sharing.of(node) if order[other] < at)
    return any(order.get(user, at) > at for other in before for user in other.users)
