"""Finds ``logsumexp`` of the logits that a cross-entropy reads: of it models make a z-loss (PaLM, OLMo).

What is made of it, squares, masks, means and factors, stays the model's own: it has one number for each row.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node
from torch.nn import functional

from fusion_advisor.fuse.loss.row_steps import is_step

_LABEL_METHODS = frozenset(["view", "reshape", "flatten", "contiguous", "clone", "long", "to"])
_LABEL_FUNCTIONS = (operator.getitem, functional.pad, torch.reshape, torch.flatten)


@dataclass(frozen=True, slots=True)
class LogSums:
    """``logsumexp`` of the rows that a loss reads.

    Attributes:
        nodes: the calls of ``logsumexp``, in the graph's order.
        steps: from the logits to them, apart from the loss's own steps.
        refusal: why they cannot be computed with the loss; empty where they can.
    """

    nodes: tuple[Node, ...] = ()
    steps: tuple[Node, ...] = ()
    refusal: str = ""


def find_log_sums(linear: Node, steps: Sequence[Node], loss: Node) -> LogSums:
    """Return every ``logsumexp`` over the classes that reads the logits, directly or after casts, views and slices.

    Args:
        linear: makes the logits.
        steps: from them to the loss.
        loss: the cross-entropy.
    """
    path, found = [linear, *steps], dict[Node, bool]()
    own = dict[Node, None]()
    for place, node in enumerate(path):
        is_cut_later = any(step.target is operator.getitem for step in steps[place:])
        for user in node.users:
            if user in (*steps, loss):
                continue
            branch = list(_branch(user))
            if branch and branch[-1] is not None:
                ends = [one for one in branch if one is not None and _is_log_sum(one)]
                between = [one for one in branch if one is not None and one not in ends]
                is_same = not is_cut_later and not any(one.target is operator.getitem for one in between)
                found |= dict.fromkeys(ends, is_same)
                own |= dict.fromkeys(between)
    order = {node: number for number, node in enumerate(linear.graph.nodes)}
    nodes = tuple(sorted(found, key=order.__getitem__))
    refusal = "" if all(found.values()) else "`logsumexp` reads other rows of the logits than the loss"
    return LogSums(nodes, tuple(sorted(own, key=order.__getitem__)), refusal)


def _branch(node: Node) -> Iterator[Node | None]:
    """Yield a node and what comes of it up to ``logsumexp``; at last None where it comes to anything else."""
    if _is_log_sum(node):
        yield node
        return
    if not is_step(node) or not node.users:
        yield None
        return
    yield node
    for user in node.users:
        for one in _branch(user):
            yield one
            if one is None:
                return


def _is_log_sum(node: Node) -> bool:
    """Whether a node is ``logsumexp`` over the last dim alone."""
    is_function = node.op == "call_function" and node.target in (torch.logsumexp, torch.special.logsumexp)
    if not is_function and not (node.op == "call_method" and node.target == "logsumexp"):
        return False
    source = node.args[0] if node.args else None
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if not isinstance(source, Node) or "out" in node.kwargs:
        return False
    if isinstance(dims, Sequence) and len(dims) == 1:
        (dims,) = dims
    return dims in (-1, source.meta["example_value"].dim() - 1)


def why_no_log_sums(log_sums: LogSums, loss: Node, labels: Node) -> str:
    """Say why a loss and its ``logsumexp`` cannot be computed together; empty where they can, or there is none.

    Args:
        log_sums: of the loss.
        loss: the cross-entropy.
        labels: of it.
    """
    if not log_sums.nodes or log_sums.refusal:
        return log_sums.refusal
    late = made_late(log_sums, loss, labels)
    if all(_is_of_labels(node) for node in late):
        return ""
    return "the labels are computed after `logsumexp`"


def place_of(log_sums: LogSums, loss: Node) -> Node:
    """Return the first of a loss and its ``logsumexp``: there both have to be known.

    Args:
        log_sums: of the loss.
        loss: the cross-entropy.
    """
    wanted = {loss, *log_sums.nodes}
    return next(node for node in loss.graph.nodes if node in wanted)


def made_late(log_sums: LogSums, loss: Node, labels: Node) -> list[Node]:
    """Return what the labels are made of after the place of :func:`place_of`, in the graph's order.

    Args:
        log_sums: of the loss.
        loss: the cross-entropy.
        labels: of it.
    """
    place, needed, found = place_of(log_sums, loss), {labels}, list[Node]()
    node = loss.prev
    while node is not place and place is not loss:
        if node in needed:
            found.insert(0, node)
            needed.update(node.all_input_nodes)
        node = node.prev
    return found if place not in needed else [place]


def _is_of_labels(node: Node) -> bool:
    """Whether a node moves labels or fills them up: it may as well come earlier."""
    return (node.op == "call_method" and node.target in _LABEL_METHODS) or node.target in _LABEL_FUNCTIONS
