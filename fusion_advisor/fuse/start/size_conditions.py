"""What dynamo asks of the sizes and strides of a call's tensors, in plain data, and the answer for another call.

Dynamo writes each such guard as an expression of Python: ``2 <= L['ids'].size()[1]``. It is parsed where it was made. A file
holds operations and places of tensors, and no text that is run.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fusion_advisor.fuse.start.described import CannotDescribe

_BINARY: dict[type, str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//", ast.Mod: "%", ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<",
    ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
}  # fmt: skip
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv, "%": operator.mod, "==": operator.eq,
    "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "not": operator.not_,
    "negative": operator.neg, "min": min, "max": max, "and": lambda *parts: all(parts), "or": lambda *parts: any(parts),
}  # fmt: skip
_MEASURES: dict[str, Callable[[torch.Tensor], Sequence[int]]] = {"size": torch.Tensor.size, "stride": torch.Tensor.stride}


def condition_of(asked: ast.expr, place_of: Callable[[ast.expr], int]) -> Any:
    """Return a guard on sizes as plain data.

    Args:
        asked: as dynamo wrote it.
        place_of: returns the place of a tensor among those of the call, given the way to it.

    Raises:
        CannotDescribe: it asks for something else.
    """

    def data(node: ast.expr) -> Any:
        if isinstance(node, ast.Constant) and type(node.value) in (bool, int):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
            return [_BINARY[type(node.op)], data(node.left), data(node.right)]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
            return ["not" if isinstance(node.op, ast.Not) else "negative", data(node.operand)]
        if isinstance(node, ast.BoolOp):
            return ["and" if isinstance(node.op, ast.And) else "or", *map(data, node.values)]
        if isinstance(node, ast.Compare) and all(type(op) in _BINARY for op in node.ops):
            sides = [data(side) for side in (node.left, *node.comparators)]
            pairs = zip(node.ops, sides, sides[1:], strict=False)
            return ["and", *([_BINARY[type(op)], left, right] for op, left, right in pairs)]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
            return [node.func.id, *map(data, node.args)]
        measured = _measured(node)
        if measured is None:
            raise CannotDescribe(f"dynamo asks `{ast.unparse(asked):.80}`")
        word, tensor, dim = measured
        return [word, place_of(tensor), dim]

    return data(asked)


def _measured(node: ast.expr) -> tuple[str, ast.expr, int] | None:
    """Return what ``tensor.size()[dim]`` measures, the tensor and the dim; None where it is no such expression."""
    if not isinstance(node, ast.Subscript) or not isinstance(node.slice, ast.Constant) or type(node.slice.value) is not int:
        return None
    call = node.value
    if not isinstance(call, ast.Call) or call.args or call.keywords or not isinstance(call.func, ast.Attribute):
        return None
    return (call.func.attr, call.func.value, node.slice.value) if call.func.attr in _MEASURES else None


def answer(condition: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return what a condition is for some tensors: a truth value, or a number for a part of it.

    Args:
        condition: from :func:`condition_of`, or from whoever wrote a file.
        tensors: of the call, by place.

    Raises:
        LookupError, TypeError, ValueError, ArithmeticError: it is no condition on these tensors.
    """
    if not isinstance(condition, list):
        return condition
    name, *parts = condition
    if name in _MEASURES:
        place, dim = parts
        return _MEASURES[name](tensors[place])[dim]
    return _OPERATIONS[name](*(answer(part, tensors) for part in parts))


def places_in(condition: Any) -> Iterator[int]:
    """Yield the places of the tensors that a condition is on.

    Args:
        condition: as :func:`answer` takes it.
    """
    if isinstance(condition, list):
        name, *parts = condition
        if name in _MEASURES:
            yield parts[0]
        else:
            for part in parts:
                yield from places_in(part)
