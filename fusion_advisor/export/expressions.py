"""One node of a rewritten graph as a Python expression: what a person would write where that is exactly the same op."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fusion_advisor.errors import CannotExport
from fusion_advisor.export.kernel_ops import KernelOps
from fusion_advisor.fuse.passes.gemm_epilogue import EpilogueCall

Read = Callable[[Node], str]
"""Returns the expression that stands for a value where it is read."""

_INFIX = {
    "add.Tensor": "+", "sub.Tensor": "-", "mul.Tensor": "*", "div.Tensor": "/", "eq.Tensor": "==", "ne.Tensor": "!=",
    "lt.Tensor": "<", "le.Tensor": "<=", "gt.Tensor": ">", "ge.Tensor": ">=", "eq.Scalar": "==", "ne.Scalar": "!=",
    "lt.Scalar": "<", "le.Scalar": "<=", "gt.Scalar": ">", "ge.Scalar": ">=", "pow.Tensor_Scalar": "**",
    "bitwise_and.Tensor": "&", "bitwise_or.Tensor": "|",
}  # fmt: skip
_METHODS = {
    "view.default": "view", "reshape.default": "reshape", "transpose.int": "transpose", "permute.default": "permute",
    "unsqueeze.default": "unsqueeze", "squeeze.dim": "squeeze", "expand.default": "expand", "select.int": "select",
    "contiguous.default": "contiguous", "flatten.using_ints": "flatten", "split.Tensor": "split", "chunk.default": "chunk",
    "to.dtype": "to", "mean.dim": "mean", "sum.dim_IntList": "sum", "t.default": "t", "type_as.default": "type_as",
    "clone.default": "clone",
}  # fmt: skip
_SPREAD = ("view", "reshape", "permute", "expand")
"""Methods that take their sizes or dims one by one."""
_FUNCTIONS = {
    "linear.default": "F.linear", "layer_norm.default": "F.layer_norm", "gelu.default": "F.gelu", "silu.default": "F.silu",
    "relu.default": "F.relu", "scaled_dot_product_attention.default": "F.scaled_dot_product_attention",
    "conv2d.default": "F.conv2d", "conv1d.default": "F.conv1d", "addmm.default": "torch.addmm", "mm.default": "torch.mm",
    "bmm.default": "torch.bmm", "baddbmm.default": "torch.baddbmm", "matmul.default": "torch.matmul", "cat.default": "torch.cat",
    "tanh.default": "torch.tanh", "exp.default": "torch.exp", "sin.default": "torch.sin", "cos.default": "torch.cos",
    "rsqrt.default": "torch.rsqrt", "sigmoid.default": "torch.sigmoid", "neg.default": "torch.neg",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Printer:
    """Prints nodes.

    Attributes:
        ops: the kernels of chains.
        device: expression of the device that new tensors are made on.
    """

    ops: KernelOps
    device: str

    def expression(self, node: Node, read: Read) -> str:
        """Return the expression that computes a node.

        Args:
            node: a call.
            read: of its arguments.

        Raises:
            CannotExport: it calls what neither torch nor the package has.
        """
        op = self.ops.of(node.target)
        if op is not None:
            return f"ops.{op.name}({', '.join(self.value(arg, read) for arg in node.args)})"
        if node.target is operator.getitem:
            source, place = node.args
            return f"{self.value(source, read)}[{self.value(place, read)}]"
        if isinstance(node.target, EpilogueCall):
            return self._epilogue(node, node.target, read)
        if isinstance(node.target, torch._ops.OpOverload):
            return self._aten(node, node.target, read)
        raise CannotExport(detail=f"its graph calls `{getattr(node.target, '__name__', node.target)}`, which is no op of torch")

    def _epilogue(self, node: Node, call: EpilogueCall, read: Read) -> str:
        """A product whose activation cuBLAS computes."""
        x, weight, bias = (_wrapped(self.value(arg, read)) for arg in node.args)
        rows, columns = (f"{x}.flatten(0, -2)", f"{weight}.t()") if call.is_linear else (x, weight)
        product = f"aten._addmm_activation({bias}, {rows}, {columns}, use_gelu={call.use_gelu})"
        return f"{product}.view({', '.join(map(str, call.shape))})"

    def _aten(self, node: Node, target: Any, read: Read) -> str:
        name = f"{target._schema.name.rpartition('::')[2]}.{target._overloadname}"
        args = [self.value(arg, read) for arg in node.args]
        kwargs = [f"{key}={self.value(value, read)}" for key, value in node.kwargs.items()]
        if target.namespace != "aten":
            return f"torch.ops.{target.namespace}.{name}({', '.join([*args, *kwargs])})"
        text = self._operator(node, name, args, kwargs) or self._method(node, name, args, kwargs, read)
        return text or _function(name, args, kwargs)

    def _operator(self, node: Node, name: str, args: list[str], kwargs: list[str]) -> str:
        """An operator or an index; empty for any other op."""
        if name in _INFIX and len(args) == 2 and not kwargs and isinstance(node.args[0], Node):
            return f"{_wrapped(args[0])} {_INFIX[name]} {_wrapped(args[1])}"
        return _slice(node, args[0]) if name == "slice.Tensor" else ""

    def _method(self, node: Node, name: str, args: list[str], kwargs: list[str], read: Read) -> str:
        """A method of its first argument; empty for an op that has none of its signature."""
        if name not in _METHODS or (name == "to.dtype" and len(args) > 2):
            return ""
        method, sizes = _METHODS[name], node.args[1] if len(node.args) == 2 else None
        if method in _SPREAD and isinstance(sizes, Sequence) and sizes:
            args = [args[0], *(self.value(item, read) for item in sizes)]
        return f"{_wrapped(args[0])}.{method}({', '.join([*args[1:], *kwargs])})"

    def value(self, value: Any, read: Read) -> str:
        """Return an argument as an expression.

        Args:
            value: of a node's arguments.
            read: of the values among them.

        Raises:
            CannotExport: it is of a kind that cannot be printed.
        """
        if isinstance(value, Node):
            return read(value)
        if isinstance(value, torch.device):
            return self.device
        if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
            return str(value)
        if isinstance(value, float) and not math.isfinite(value):
            return f'float("{value}")'
        if value is None or isinstance(value, bool | int | float | str):
            return repr(value)
        if isinstance(value, list | tuple):
            items = [self.value(item, read) for item in value]
            return f"[{', '.join(items)}]"
        if isinstance(value, slice):
            return f"slice({', '.join(self.value(part, read) for part in (value.start, value.stop, value.step))})"
        raise CannotExport(detail=f"its graph holds a {type(value).__name__}, which is no plain value")


def is_method(node: Node) -> bool:
    """Whether a node is printed as a method of its first argument, so that it can go on where that one's expression ends.

    Args:
        node: a call.
    """
    target: Any = node.target
    return isinstance(target, torch._ops.OpOverload) and str(target).removeprefix("aten.") in _METHODS


def _function(name: str, args: list[str], kwargs: list[str]) -> str:
    """A function of torch's that is exactly the op, or the op itself."""
    if name == "embedding.default" and len(args) <= 3 and not kwargs:  # a padding_idx matters to gradients alone
        return f"F.embedding({args[1]}, {args[0]})"
    if name.startswith("arange."):
        kwargs = [text for text in kwargs if text not in ("pin_memory=False", "layout=None")]
        return f"torch.arange({', '.join([*args, *kwargs])})"
    return f"{_FUNCTIONS.get(name, f'aten.{name}')}({', '.join([*args, *kwargs])})"


def _slice(node: Node, text: str) -> str:
    """A slice of one dim with a step of one, as an index; empty for any other."""
    given: Mapping[str, Any] = dict(zip(("dim", "start", "end", "step"), node.args[1:], strict=False))
    dim, start, end = given.get("dim", 0), given.get("start"), given.get("end")
    if given.get("step", 1) != 1 or not all(value is None or isinstance(value, int) for value in (dim, start, end)):
        return ""
    first = "" if not start else str(start)
    last = "" if end is None or end > 2**62 else str(end)
    before = "..., " if dim == -1 else ":, " * dim if dim >= 0 else ""
    return "" if dim < -1 or node.kwargs else f"{_wrapped(text)}[{before}{first}:{last}]"


def _wrapped(text: str) -> str:
    """Put brackets around an infix expression."""
    depth = 0
    for mark in text:
        depth += (mark in "([") - (mark in ")]")
        if mark == " " and depth == 0:
            return f"({text})"
    return f"({text})" if text.startswith("-") else text
