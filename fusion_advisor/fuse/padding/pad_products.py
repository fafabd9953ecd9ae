"""Padded products of a training step: operands with rows of an odd length get a few zeros more, in both passes.

In 16 bits cuBLAS runs slower kernels on rows that do not begin at a multiple of 16 bytes. GPT-2's vocabulary has 50,257 words,
and three products read or write rows of that length: of the logits, of the hidden state's gradient and of the weight's. On an
H100 they take 7.84 of 14.5 ms of a step (4 layers, 8 x 512 tokens, bf16 autocast).

The zeros add nothing to a sum, and the rows and columns that they make are cut off again. They are put where an operand is made,
ahead of its views and transposes. So the chain that makes it writes them too, and what several products read is padded once. A
result whose columns were cut gets its own strides back by a copy, which the chain that reads it takes in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fusion_advisor.runtime.torch_internals import fake_mode

MULTIPLE = 8
"""Elements of 16 bits in 16 bytes."""
LEAST_PRODUCTS = 1 << 29
"""Multiplications. A smaller product takes no longer than the copies: on an H100 one of 2**29 takes about 10 µs."""
_MM, _ADDMM, _T = torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.t.default
_PAD, _SLICE, _CLONE = torch.ops.aten.constant_pad_nd.default, torch.ops.aten.slice.Tensor, torch.ops.aten.clone.default
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default, torch.ops.aten.reshape.default)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Product:
    """A product with odd rows, and by how many elements each of its three sizes grows."""

    node: Node
    left: Node
    right: Node
    bias: Node | None
    more: tuple[int, int, int]
    """Of rows, of what is summed over, and of columns."""


@dataclass(frozen=True, slots=True)
class Padding:
    """What was padded.

    Attributes:
        products: how many.
        copied_bytes: of the copies that pad and cut, where no chain takes them in: what they write.
    """

    products: int
    copied_bytes: int


def pad_products(module: GraphModule, *, least_products: int = LEAST_PRODUCTS) -> Padding:
    """Pad the products of one of AOTAutograd's graphs.

    Args:
        module: with the fake results of its nodes; rewritten in place.
        least_products: multiplications of a product that is padded.
    """
    found = list(_odd_products(module.graph, least_products))
    if not found:
        return Padding(0, 0)
    work = _Work(module)
    for product in found:
        work.pad(product)
    module.graph.eliminate_dead_code()
    module.recompile()
    copies = [node for node in work.made if node.target in (_PAD, _CLONE)]
    return Padding(len(found), sum(int(node.meta["val"].nbytes) for node in copies))


def _odd_products(graph: Graph, least_products: int) -> Iterator[_Product]:
    for node in graph.nodes:
        if node.target is _MM:
            bias, (left, right) = None, node.args
        elif node.target is _ADDMM:
            bias, left, right = node.args
        else:
            continue
        if bias is not None and (not isinstance(bias, Node) or bias.meta["val"].dim() != 1):
            continue
        more = _growth(left.meta["val"], right.meta["val"])
        rows, inner = left.meta["val"].shape
        if any(more) and rows * inner * right.meta["val"].shape[1] >= least_products:
            yield _Product(node=node, left=left, right=right, bias=bias, more=more)


def _growth(left: torch.Tensor, right: torch.Tensor) -> tuple[int, int, int]:
    """By how many elements the sizes grow along which an operand's or the result's rows lie in memory."""
    rows, inner, columns = *left.shape, right.shape[1]
    if left.dtype.itemsize != 2 or min(rows, inner, columns) < MULTIPLE:
        return 0, 0, 0
    lies_along_rows, lies_along_inner = left.stride(1) != 1, left.stride(1) == 1 or right.stride(1) != 1
    return (
        -rows % MULTIPLE if lies_along_rows else 0,
        -inner % MULTIPLE if lies_along_inner else 0,
        -columns % MULTIPLE,
    )


class _Work:
    """A graph whose products are being padded."""

    def __init__(self, module: GraphModule) -> None:
        self._module, self._graph = module, module.graph
        self.made: list[Node] = []
        self._padded: dict[tuple[Node, tuple[int, ...]], Node] = {}
        """By the value and what it gets more along each dim."""

    def pad(self, product: _Product) -> None:
        """Compute a product of padded operands, and cut its result."""
        node, (rows, inner, columns) = product.node, product.more
        operands = [self._wider(product.left, (rows, inner)), self._wider(product.right, (inner, columns))]
        if product.bias is not None:
            operands.insert(0, self._wider(product.bias, (columns,)))
        value = node.meta["val"]
        with self._graph.inserting_before(node):
            out = self._make(node.target, tuple(operands), node, dict(node.kwargs))
            if rows:
                out = self._make(_SLICE, (out, 0, 0, value.shape[0]), node)
            if columns:
                out = self._make(_SLICE, (out, 1, 0, value.shape[1]), node)
                out = self._make(_CLONE, (out,), node, {"memory_format": torch.contiguous_format})
        node.replace_all_uses_with(out)
        self._graph.erase_node(node)

    def _wider(self, value: Node, more: tuple[int, ...]) -> Node:
        """Return a value with zeros at the ends of its dims, padded as near to where it is made as its views allow."""
        if not any(more):
            return value
        key = (value, more)
        if key in self._padded:
            return self._padded[key]
        source = value.args[0] if value.args else None
        if value.target is _T and isinstance(source, Node):
            given = self._wider(source, more[::-1])
            found = self._after(value, _T, (given,))
        elif value.target in _VIEWS and isinstance(source, Node) and self._is_of_rows(source, value, more):
            given = self._wider(source, (0,) * (source.meta["val"].dim() - 1) + more[-1:])
            shape = [*value.meta["val"].shape[:-1], given.meta["val"].shape[-1]]
            found = self._after(value, torch.ops.aten.view.default, (given, shape))
        elif _is_turned(value.meta["val"]):  # a pad lays its result out by rows
            turned = self._after(value, _T, (value,))
            wide = self._after(turned, _PAD, (turned, _amounts(more[::-1]), 0.0))
            found = self._after(wide, _T, (wide,))
        else:
            found = self._after(value, _PAD, (value, _amounts(more), 0.0))
            self._share(value, found, more)
        self._padded[key] = found
        return found

    def _share(self, value: Node, padded: Node, more: tuple[int, ...]) -> None:
        """Let other readers of a value read the padded one where it is the same in memory: then it is written once."""
        tensor = value.meta["val"]
        if value.op == "placeholder" or any(more[1:]) or not tensor.is_contiguous():
            return
        with self._graph.inserting_after(padded):
            part = self._make(_SLICE, (padded, 0, 0, tensor.shape[0]), value)
        value.replace_all_uses_with(part, delete_user_cb=lambda user: user is not padded)
        self._padded[part, more] = padded

    @staticmethod
    def _is_of_rows(source: Node, value: Node, more: tuple[int, ...]) -> bool:
        """Whether a view only regroups rows, and these alone get longer."""
        before, after = source.meta["val"], value.meta["val"]
        has_rows = before.dim() > 0 and before.shape[-1] == after.shape[-1]
        return has_rows and before.is_contiguous() and not any(more[:-1])

    def _after(self, value: Node, target: Any, args: tuple[Any, ...]) -> Node:
        with self._graph.inserting_after(self._last_of_inputs(value)):
            return self._make(target, args, value)

    def _last_of_inputs(self, value: Node) -> Node:
        """The node after which something may stand in the place of an operand: a placeholder is followed by all others."""
        if value.op != "placeholder":
            return value
        return list(self._graph.find_nodes(op="placeholder"))[-1]

    def _make(self, target: Any, args: tuple[Any, ...], like: Node, kwargs: dict[str, Any] | None = None) -> Node:
        made = self._graph.call_function(target, args, kwargs or {})
        made.meta = {key: like.meta[key] for key in ("nn_module_stack", "stack_trace") if key in like.meta}
        made.meta["val"] = fake_mode.fake_result(self._module, made)
        self.made.append(made)
        return made


def _amounts(more: tuple[int, ...]) -> list[int]:
    """What a pad adds before and after each dim, the last one first."""
    return [amount for one in reversed(more) for amount in (0, one)]


def _is_turned(value: torch.Tensor) -> bool:
    return value.dim() == 2 and value.stride(1) != 1 and value.stride(0) == 1
