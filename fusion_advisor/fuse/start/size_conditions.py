"""What dynamo asks of the sizes and strides of a call's tensors, in plain data, and the answer for another call.

Dynamo writes each such guard as an expression of Python: ``2 <= L['ids'].size()[1]``. It is parsed where it was made. A file
holds operations and places of tensors, and no text that is run.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusion_advisor.fuse.direct.straight_code import Constants
from fusion_advisor.fuse.start.described import CannotDescribe

_BINARY: dict[type, str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//", ast.Mod: "%", ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<",
    ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
}  # fmt: skip
_UNARY = {"not": "(not {})", "negative": "(-{})"}
_OF_ANY_NUMBER = {"min": "min({})", "max": "max({})", "and": "all(({},))", "or": "any(({},))"}
_MEASURES = ("size", "stride")
_DEEPEST = 16
"""Operations inside one another."""


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


def all_hold(conditions: Sequence[Any]) -> Callable[[Sequence[torch.Tensor]], bool]:
    """Return a function that says whether conditions hold for some tensors, by place.

    It is Python that is written here: of 28 layers of a cache that grows dynamo asks 250 such questions at each step. It raises
    IndexError for tensors of other ranks, and ArithmeticError where a condition divides by zero.

    Args:
        conditions: from :func:`condition_of`, or from whoever wrote a file.

    Raises:
        LookupError, TypeError, ValueError: one is no condition.
    """
    measured: dict[tuple[str, int], str] = {}
    asked = [f"if not {_written(part, measured)}: return False" for one in conditions for part in _parts(one)]
    read = [f"{name} = tensors[{place}].{word}()" for (word, place), name in measured.items()]
    holds: Callable[[Sequence[torch.Tensor]], bool] = Constants().function(["tensors"], [*read, *asked, "return True"])
    return holds


def _parts(condition: Any) -> list[Any]:
    """Return what a condition asks, one after the other."""
    return list(condition[1:]) if isinstance(condition, list) and condition[0] == "and" else [condition]


def _written(condition: Any, measured: dict[tuple[str, int], str], depth: int = 0) -> str:
    """Write a condition, or a part of it; ``measured`` gets names of the sizes and strides of tensors."""
    if type(condition) in (bool, int):
        return repr(condition)
    name, *parts = condition
    if depth > _DEEPEST:
        raise ValueError("a condition on sizes is of operations in operations")
    if name in _MEASURES:
        place, dim = parts
        if type(place) is not int or type(dim) is not int or place < 0:
            raise TypeError(f"no size is that of {place} and {dim}")
        return f"{measured.setdefault((name, place), f'{name}{place}')}[{dim}]"
    written = [_written(part, measured, depth + 1) for part in parts]
    if name in _BINARY.values():
        left, right = written
        return f"({left} {name} {right})"
    if name in _UNARY:
        (only,) = written
        return _UNARY[name].format(only)
    return _OF_ANY_NUMBER[name].format(", ".join(written))
