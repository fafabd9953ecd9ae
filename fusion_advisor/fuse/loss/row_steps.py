"""Ops between a linear layer and its loss that change no row: casts to a wider dtype, views, slices of rows."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

_CASTS = frozenset(["float", "double", "to", "type"])
_SAME = frozenset(["contiguous", "clone"])
_VIEWS = frozenset(["view", "reshape", "flatten"])
_VIEW_FUNCTIONS = (torch.reshape, torch.flatten)


def is_step(node: Node) -> bool:
    """Whether an op can be made of the linear layer's input instead: it moves whole rows, or casts to a wider dtype.

    Args:
        node: of dynamo's graph.
    """
    source = node.args[0] if node.args and isinstance(node.args[0], Node) else None
    if source is None or not isinstance(before := source.meta.get("example_value"), torch.Tensor):
        return False
    after = node.meta.get("example_value")
    if not isinstance(after, torch.Tensor) or after.dim() == 0 or after.shape[-1] != before.shape[-1]:
        return False
    if node.op == "call_method" and node.target in _CASTS:
        is_wider = after.is_floating_point() and after.element_size() >= before.element_size()
        return is_wider and after.shape == before.shape and after.device == before.device
    if after.dtype != before.dtype:
        return False
    if node.op == "call_method" and node.target in _SAME:
        return True
    if (node.op == "call_method" and node.target in _VIEWS) or node.target in _VIEW_FUNCTIONS:
        return True
    return node.target is operator.getitem and _takes_whole_rows(node.args[1], before.dim())


def _takes_whole_rows(index: Any, dims: int) -> bool:
    """Whether an index takes slices of the leading dims and all of the last."""
    items = index if isinstance(index, tuple) else (index,)
    if any(item is not Ellipsis and not isinstance(item, slice) for item in items):
        return False
    if any(isinstance(bound, Node) for item in items if isinstance(item, slice) for bound in (item.start, item.stop, item.step)):
        return False
    if Ellipsis not in items:
        items = (*items, Ellipsis)
    at = items.index(Ellipsis)
    every = (*items[:at], *(slice(None),) * (dims - len(items) + 1), *items[at + 1 :])
    return len(every) == dims and every[-1] == slice(None)
