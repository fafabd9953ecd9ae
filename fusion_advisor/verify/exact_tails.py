"""Exact results where eager's formula keeps no digits, even in fp64: the tail of the normal distribution in GELU.

``1 + erf(u)`` cancels for u below -2: at -5.9 fp64 has no digit left and gives 0, where the result is 7e-17. A kernel that
computes ``erfc(-u)`` has those digits, and is not to be refused by an oracle that has not.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Node

_GELU, _ERF = torch.ops.aten.gelu.default, torch.ops.aten.erf.default
_ADDS = (torch.ops.aten.add.Tensor, torch.ops.aten.add.Scalar)


def _upper_tail(u: torch.Tensor) -> torch.Tensor:
    return torch.erfc(-u)


def exactly(node: Node, values: Mapping[Node, Any]) -> Callable[[], torch.Tensor] | None:
    """Return what computes an op of the oracle exactly; None where the op itself does.

    Args:
        node: the op.
        values: in fp64, of the ops before it.
    """
    source = node.args[0] if node.args else None
    if node.target is _GELU and isinstance(source, Node) and node.kwargs.get("approximate", "none") == "none":
        x = values[source]
        return lambda: torch.erfc(-x * math.sqrt(0.5)) * (0.5 * x)
    if node.target not in _ADDS or len(node.args) != 2 or node.kwargs:
        return None
    for one, other in (node.args, node.args[::-1]):
        is_one = isinstance(one, int | float) and one == 1
        if is_one and isinstance(other, Node) and other.target is _ERF and isinstance(u := other.args[0], Node):
            return functools.partial(_upper_tail, values[u])
    return None
