"""Estimates bytes from a trace's recorded shapes: ``Input Dims`` hold what an op reads, never what it writes.

Both figures lean to one side on purpose, so that a bound on a saving stays an upper bound: the floor counts only what one kernel
could not do without, and the rate counts all that a kernel may have moved.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from fusion_advisor.records import TensorMeta
from fusion_advisor.records.op_facts import ROWS_OPERAND, item_bytes

Inputs = tuple[TensorMeta | None, ...] | None
_SAME_SHAPE = frozenset({"layer_norm", "rms_norm", "softmax", "log_softmax", "safe_softmax", "group_norm"})
"""Reductions whose result is as large as their first input."""
_NARROW = frozenset({"to", "eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "logical_and", "logical_or", "logical_not"})
"""Ops whose result may have one byte per element, whatever they read."""


def read_bytes(tensor: TensorMeta) -> int:
    """Return what a tensor holds; dims that are expanded (stride 0) hold one element."""
    strides = tensor.stride if len(tensor.stride) == len(tensor.shape) else (1,) * len(tensor.shape)
    return math.prod(
        size for size, stride in zip(tensor.shape, strides, strict=True) if stride or not size
    ) * item_bytes(tensor.dtype)  # fmt: skip


def moved_bytes(category: str, label: str, inputs: Inputs) -> int | None:
    """Return what a pointwise op's kernel read and wrote at most; None where its shapes do not tell."""
    if category != "pointwise" or label == "to" or not inputs or inputs[0] is None:
        return None
    tensors = [tensor for tensor in inputs if tensor is not None]
    shape = _broadcast(tensors)
    if shape is None:
        return None
    return sum(map(read_bytes, tensors)) + math.prod(shape) * max(item_bytes(tensor.dtype) for tensor in tensors)


def floor_bytes(ops: Sequence[tuple[str, str, Inputs]]) -> int | None:
    """Return what one kernel for a sequence of ops must move at least.

    Counted are the first op's inputs, later inputs of a shape and dtype that nothing before had (so that no op of the sequence
    made them), and the last op's result where its shape follows from its inputs. Equal shapes count once: they may be one tensor.

    Args:
        ops: (category, label, inputs) in order.

    Returns:
        None where the first op's inputs are not recorded.
    """
    first = ops[0][2]
    if not first or not any(first):
        return None
    seen: set[tuple[tuple[int, ...], str]] = set()
    made: set[tuple[int, ...]] = set()
    is_known = True
    total = 0
    for number, (category, label, inputs) in enumerate(ops):
        tensors = _tensors(inputs)
        for tensor in tensors:
            is_outer = number == 0 or (is_known and tensor.shape not in made)
            if is_outer and (tensor.shape, tensor.dtype) not in seen and label not in ROWS_OPERAND:
                total += read_bytes(tensor)
            seen.add((tensor.shape, tensor.dtype))
        result = _result(category, label, tensors)
        is_known &= result is not None  # a result of any shape: from here on a tensor may be it
        made.add(result or ())
    category, label, inputs = ops[-1]
    result, widths = _result(category, label, _tensors(inputs)), [item_bytes(one.dtype) for one in _tensors(inputs) if one.shape]
    item = 1 if label in _NARROW or not widths else min(widths)
    return total + (math.prod(result) * item if result is not None else 0)


def _tensors(inputs: Inputs) -> list[TensorMeta]:
    return [tensor for tensor in inputs or () if tensor is not None]


def _result(category: str, label: str, tensors: Sequence[TensorMeta]) -> tuple[int, ...] | None:
    if label in _SAME_SHAPE and tensors:
        return tensors[0].shape
    return _broadcast(tensors) if tensors and (category == "pointwise" or label == "to") else None


def _broadcast(tensors: Sequence[TensorMeta]) -> tuple[int, ...] | None:
    dims = []
    for sizes in itertools.zip_longest(*(reversed(tensor.shape) for tensor in tensors), fillvalue=1):
        large = {size for size in sizes if size != 1}
        if len(large) > 1:
            return None
        dims.append(large.pop() if large else 1)
    return tuple(reversed(dims))
