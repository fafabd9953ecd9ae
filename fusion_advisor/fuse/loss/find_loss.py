"""Finds linear layers whose result is read by a cross-entropy alone, in dynamo's graph of a training step.

Dynamo's graph and not AOTAutograd's two: there the loss is one op, its rows and labels are still the model's own, and what the
backward pass needs follows from the one op that takes its place. In the two graphs it is a dozen ops that the partitioner has
spread over both, other ones for each reduction, label smoothing and dtype.

Between the two layers there may be casts to a wider dtype, views and slices of rows. The last two are then made of the linear
layer's input. Next to the loss ``logsumexp`` may read the same rows, for a z-loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.nn import functional

from fusion_advisor.fuse.loss.chunked_loss import MEAN, SUM
from fusion_advisor.fuse.loss.find_log_sums import LogSums, find_log_sums, why_no_log_sums
from fusion_advisor.fuse.loss.row_steps import is_step

_LINEAR, _LOSS = torch.nn.functional.linear, functional.cross_entropy
_REDUCTIONS = {"mean": MEAN, "sum": SUM}
_SIGNATURE = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
_DEFAULTS = {"ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSite:
    """A linear layer and the cross-entropy that reads it.

    Attributes:
        linear: makes the logits.
        steps: from the logits to the loss's input, in order.
        loss: the cross-entropy.
        given: its arguments by name.
        returned: logits that the graph returns, as they are or after some of the steps.
        log_sums: reads the logits too, each row's logarithm of the sum of exponentials.
        refusal: why the pair cannot be computed in chunks; empty where it can, apart from what is returned.
    """

    linear: Node
    steps: tuple[Node, ...]
    loss: Node
    given: dict[str, Any]
    returned: tuple[Node, ...] = ()
    log_sums: LogSums = field(default_factory=LogSums)
    refusal: str = ""

    @property
    def logits_bytes(self) -> int:
        """Of the linear layer's result."""
        value = self.linear.meta["example_value"]
        return math.prod(value.shape) * value.element_size()

    @property
    def reduction(self) -> int:
        """ATen's number."""
        return _REDUCTIONS[self.given["reduction"]]


def find_losses(graph: Graph) -> list[LossSite]:
    """Return every cross-entropy whose input comes from a linear layer.

    Args:
        graph: dynamo's, with the fake results of its nodes.
    """
    return [site for node in graph.nodes if node.target is _LOSS and (site := _site_of(node)) is not None]


def _site_of(loss: Node) -> LossSite | None:
    given = dict(_DEFAULTS) | dict(zip(_SIGNATURE, loss.args, strict=False)) | dict(loss.kwargs)
    steps: list[Node] = []
    node = given["input"]
    while isinstance(node, Node) and node.target is not _LINEAR:
        if not is_step(node):
            return None if not _comes_from_linear(node) else _refused(node, steps, loss, given)
        steps.insert(0, node)
        node = node.args[0]
    if not isinstance(node, Node):
        return None
    path, log_sums = [node, *steps], find_log_sums(node, steps, loss)
    known = {*steps, loss, *log_sums.steps, *log_sums.nodes}
    readers = [(one, user) for one in path for user in one.users if user not in known]
    returned = tuple(dict.fromkeys(one for one, user in readers if user.op == "output"))
    site = LossSite(linear=node, steps=tuple(steps), loss=loss, given=given, returned=returned, log_sums=log_sums)
    return replace(site, refusal=_why_not(site, [user for _, user in readers if user.op != "output"]))


def _comes_from_linear(node: Node) -> bool:
    """Whether a value is a linear layer's after a few ops of one operand: then the report says which op is in the way."""
    for _ in range(4):
        if node.target is _LINEAR:
            return True
        if len(node.all_input_nodes) != 1:
            return False
        node = node.all_input_nodes[0]
    return node.target is _LINEAR


def _refused(node: Node, steps: Sequence[Node], loss: Node, given: dict[str, Any]) -> LossSite:
    linear, op = node, _name(node)
    while linear.target is not _LINEAR:
        linear = linear.all_input_nodes[0]
    return LossSite(
        linear=linear, steps=tuple(steps), loss=loss, given=given, refusal=f"`{op}` changes the logits before the loss"
    )


def _name(node: Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _why_not(site: LossSite, readers: Sequence[Node]) -> str:
    given, labels = site.given, site.given["target"]
    if readers:
        return f"`{_name(readers[0])}` reads the logits too"
    if given.get("weight") is not None or given.get("size_average") is not None or given.get("reduce") is not None:
        return "the loss weighs its classes, or is reduced by an argument that torch has replaced"
    if given["reduction"] not in _REDUCTIONS:
        return "the loss is not reduced to one number"
    last = (site.steps or (site.linear,))[-1].meta["example_value"]
    if last.dim() != 2:
        return "the loss's input has not the classes in the second of two dims"
    if (
        not isinstance(labels, Node)
        or labels.meta["example_value"].dtype != torch.int64
        or labels.meta["example_value"].dim() != 1
    ):
        return "the labels are not one int64 for each row"
    if any(not isinstance(given[name], int | float) for name in ("ignore_index", "label_smoothing")):
        return "an argument of the loss is computed"
    if written := next(_writes_between(site.linear, site.loss), None):
        return f"`{_name(written)}` stands between the logits and the loss"
    return why_no_log_sums(site.log_sums, site.loss, labels)


def _writes_between(first: Node, last: Node) -> Iterator[Node]:
    """Ops between two nodes that may write what the first one read, or that switch gradients on or off."""
    node = first.next
    while node is not last:
        name = _name(node)
        is_dunder = name.startswith("__") and name.endswith("__")
        if node.op in ("call_method", "call_function") and (
            (name.endswith("_") and not is_dunder) or name in ("_set_grad_enabled", "iadd", "isub", "imul", "itruediv", "setitem")
        ):
            yield node
        node = node.next
