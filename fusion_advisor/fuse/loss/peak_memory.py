"""How much memory a training step takes at its peak, by the lifetimes of the tensors in its two graphs.

Weights and inputs are not counted: they are there before and after. What the forward pass keeps counts until the backward pass
has read it for the last time, as autograd frees it. Caches and alignment of the allocator are not seen.

A loss of logits and its gradient are one kernel each, which write no log-softmax and no gradient of one. So these count for
nothing where only ops of the same kernel read them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.fx import GraphModule, Node

from fusion_advisor.capture.graph.fx_nodes import storages, tensors_of

_ATEN = torch.ops.aten
_OF_LOSS = frozenset([
    _ATEN._log_softmax.default, _ATEN.nll_loss_forward.default, _ATEN.nll_loss_backward.default,
    _ATEN._log_softmax_backward_data.default,
])  # fmt: skip
_VIEWS = frozenset([_ATEN.view.default, _ATEN._unsafe_view.default, _ATEN.alias.default, _ATEN.detach.default])
_GIVEN = "primals"
"""How AOTAutograd names weights and inputs, in both graphs."""


def step_peak_bytes(
    forward: GraphModule, backward: GraphModule, inside: Callable[[Node], int] = lambda _: 0
) -> int:  # fmt: skip
    """Return the most bytes that are alive at once in either pass.

    Args:
        forward: AOTAutograd's graph, with the fake results of its nodes.
        backward: likewise.
        inside: says what an op holds while it runs and does not return.
    """
    return max(_peak_bytes(forward, inside), _peak_bytes(backward, inside))


def _peak_bytes(module: GraphModule, inside: Callable[[Node], int]) -> int:
    nodes = list(module.graph.nodes)
    last: dict[int, int] = {}
    for at, node in enumerate(nodes):
        for source in (node, *_read_by(node)):
            last.update(dict.fromkeys(storages(source), at))
    ignored = {key for node in nodes if node.op == "placeholder" and _GIVEN in str(node.target) for key in storages(node)}
    ignored |= {key for node in nodes if _is_unwritten(node) for key in storages(node)}
    alive: dict[int, int] = {}
    peak = 0
    for at, node in enumerate(nodes):
        if node.op == "output":
            continue
        for key, value in zip(storages(node), tensors_of(node.meta.get("val")), strict=True):
            if key not in ignored:
                alive.setdefault(key, value.untyped_storage().nbytes())
        peak = max(peak, sum(alive.values()) + inside(node))
        alive = {key: size for key, size in alive.items() if last[key] > at}
    return peak


def _read_by(node: Node) -> Iterator[Node]:
    """What an op reads, and what the rest of its kernel reads for it."""
    for source in node.all_input_nodes:
        yield source
        if source.target in _VIEWS or _is_unwritten(source):
            yield from _read_by(source)


def _is_unwritten(node: Node) -> bool:
    """Whether an op of a loss's kernel, or a cast next to one, makes a tensor that only the rest of the kernel reads."""
    if node.target is _ATEN._to_copy.default:
        is_inside = any(one.target in _OF_LOSS for one in _readers(node))
    else:
        is_inside = node.target in _OF_LOSS and node.target is not _ATEN.nll_loss_forward.default
    return is_inside and all(one.target in _OF_LOSS or one.target is _ATEN._to_copy.default for one in _readers(node))


def _readers(node: Node) -> set[Node]:
    """The ops that read a value or a view of it."""
    found: set[Node] = set()
    for user in node.users:
        found |= _readers(user) if user.target in _VIEWS else {user}
    return found


def is_op(node: Node, name: str) -> bool:
    """Whether a node calls an op of torch's.

    Args:
        node: of a graph of ops.
        name: with its namespace, without its overload.
    """
    return isinstance(node.target, torch._ops.OpOverload) and node.target.name() == name
