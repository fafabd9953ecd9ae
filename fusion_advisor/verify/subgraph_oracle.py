"""One chain's original ops, runnable alone: the baseline that a kernel is timed against and, in fp64, the oracle for its numbers.

The ops are the captured nodes themselves, run in order; nothing here goes through ``lower``, so a mistake there is caught here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from fusion_advisor.capture.graph.fx_nodes import tensors_of
from fusion_advisor.capture.graph.op_classes import base_name, class_of, is_collective
from fusion_advisor.capture.graph.tracer import Region
from fusion_advisor.lowering.builder.lowered import written_by
from fusion_advisor.records import OpClass, OpNode, TensorMeta
from fusion_advisor.verify.exact_tails import exactly
from fusion_advisor.verify.row_parts import LARGE, MOST, RowPart, row_parts
from fusion_advisor.verify.row_tables import distinct_rows, ids_of, row_tables

_INTEGERS = frozenset({"int8", "int16", "int32", "int64", "uint8"})
_PARTS = frozenset({"select", "slice", "split", "split_with_sizes", "unbind", "narrow", "chunk"})
_COUNTS = frozenset({"cumsum", "cumprod", "sum", "prod", "diff"})


@dataclass(frozen=True, slots=True, kw_only=True)
class OriginalChain:
    """The ops of one site.

    Attributes:
        nodes: the members, in order.
        outer: values read from outside, each as (node, root operand number, layout, the root's layout).
        outputs: the members whose values leave the chain.
        unread: values that the ops are called with and no element of the result depends on (an empty piece of a cat, what
            ``expand_as`` looks at), by layout.
        written: root operand numbers of the tensors that the ops write into: they come last.
        in_place: positions in ``outputs`` of the results that are those tensors.
        large: elements of a value from which on the chain is compared in parts.
        most: elements of such a part.
    """

    nodes: tuple[Node, ...]
    outer: tuple[tuple[Node, int, TensorMeta, TensorMeta], ...]
    outputs: tuple[Node, ...]
    unread: tuple[tuple[Node, TensorMeta], ...] = ()
    written: tuple[int, ...] = ()
    in_place: tuple[int, ...] = ()
    large: int = LARGE
    most: int = MOST

    def copy_written(self, roots: Sequence[torch.Tensor], spoilt: Sequence[torch.Tensor | None] = ()) -> list[torch.Tensor]:
        """Return the roots for one run, with a copy of the same layout for each that is written into.

        Args:
            roots: one tensor per input operand.
            spoilt: masks from :meth:`reach`: there the copies hold what nobody writes, so that an element left out cannot pass as
                right because an earlier run has written it.
        """
        found = [_copied(root) if number in self.written else root for number, root in enumerate(roots)]
        masks = [mask for mask in spoilt if mask is not None]
        for number, mask in zip(self.written, masks, strict=False):
            found[number].masked_fill_(mask, float("nan") if found[number].is_floating_point() else 1)
        return found

    @property
    def has_sums(self) -> bool:
        """Whether some op reduces rows or multiplies matrices."""
        classes = {class_of(base_name(str(node.target))) for node in self.nodes}
        return bool(classes & {OpClass.REDUCTION, OpClass.GEMM})

    @property
    def meets_ranks(self) -> bool:
        """Whether an op waits for other ranks: then each run of the ops is one on all of them."""
        return any(is_collective(str(node.target)) for node in self.nodes)

    @property
    def keeps_indices(self) -> bool:
        """Whether other integers than the site's could read outside of a table, though each occurs somewhere.

        That is so where places are computed of several integers (the width of a box, a count of those before), and where columns
        of one tensor are places in several tables (a category each).
        """
        parts = [(number, meta) for _, number, meta, whole in self.outer if meta.dtype in _INTEGERS and meta != whole]
        return bool(parts) or any(_mixes_integers(node) for node in self.nodes)

    def reach(self, roots: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Return, for each output, a mask of what is written of a tensor that is given; None where it is a new one.

        The ops run on that tensor full of zeros and full of ones: the elements that they write are the same in both.
        """
        zeros, ones = (
            self.run([root.fill_(fill) if n in self.written else root for n, root in enumerate(self.copy_written(roots))])
            for fill in (0, 1)
        )
        both = enumerate(zip(zeros, ones, strict=True))
        return [(zero == one) | (zero.isnan() & one.isnan()) if n in self.in_place else None for n, (zero, one) in both]

    def rows_read(self, roots: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return the rows that the ops read of each root that is a table (:mod:`fusion_advisor.verify.row_tables`), each once.

        Args:
            roots: a site's own tensors.
        """
        ids = ids_of(row_tables(self.nodes, self.outer, self.written))
        if not ids:
            return {}
        values = self._values(self.copy_written(roots), kept=[node for nodes in ids.values() for node in nodes])
        return {number: distinct_rows([values[node] for node in nodes], len(roots[number])) for number, nodes in ids.items()}

    def parts(self) -> tuple[RowPart, ...]:
        """Return parts of the chain's rows that are compared one after the other; empty where it is compared at once."""
        is_plain = not (self.unread or self.written or self.in_place or row_tables(self.nodes, self.outer, self.written))
        return row_parts(self.nodes, self.outer, self.outputs, large=self.large, most=self.most) if is_plain else ()

    def run(
        self,
        roots: Sequence[torch.Tensor],
        *,
        as_float64: bool = False,
        widen: Callable[[torch.Tensor], torch.Tensor] | None = None,
        part: RowPart | None = None,
    ) -> list[torch.Tensor]:
        """Run the original ops; those that write in place write into the roots.

        Args:
            roots: one tensor per input operand of the fused kernel.
            as_float64: the oracle: floats in and between ops are fp64, casts between float types do nothing.
            widen: makes fp64 of a root, or of the rows that are read of a table; None: as they are.
            part: the rows that the ops run on; None: all.

        Returns:
            One tensor per output operand.
        """
        values = self._values(roots, (widen or to_float64) if as_float64 else None, kept=self.outputs, part=part)
        return [values[node] for node in self.outputs]

    def _values(
        self, roots: Sequence[torch.Tensor], widen: Callable[[torch.Tensor], torch.Tensor] | None = None, *, kept: Sequence[Node],
        part: RowPart | None = None,
    ) -> dict[Node, Any]:  # fmt: skip
        """Run the original ops, in fp64 where ``widen`` is given; returns the values of ``kept``, others go when read last."""
        tables = row_tables(self.nodes, self.outer, self.written) if widen else {}
        look_ups = {node for readers in tables.values() for node in readers}
        values = self._given(roots, widen, tables) if part is None else self._given_rows(roots, widen, part)
        dying = _last_reads(self.nodes, kept)
        with torch.no_grad():
            for node in self.nodes:
                values[node] = _run_node(node, values, widen, is_look_up=node in look_ups, part=part)
                for done in dying.get(node, ()):
                    values.pop(done, None)
        return values

    def _given(
        self, roots: Sequence[torch.Tensor], widen: Callable[[torch.Tensor], torch.Tensor] | None, tables: Collection[int]
    ) -> dict[Node, Any]:
        """Return the values that are read from outside, in fp64 where ``widen`` is given, but for tables."""
        values: dict[Node, Any] = {}
        widened = [widen(root) if widen and number not in tables else root for number, root in enumerate(roots)]
        for node, number, meta, root_meta in self.outer:
            root = widened[number]
            offset = meta.offset - root_meta.offset + root.storage_offset()
            values[node] = root.as_strided(meta.shape, meta.stride, offset)
        for node, meta in self.unread:
            nothing = torch.zeros(meta.shape, dtype=getattr(torch, meta.dtype), device=meta.device)
            values[node] = to_float64(nothing) if widen else nothing
        return values

    def _given_rows(
        self, roots: Sequence[torch.Tensor], widen: Callable[[torch.Tensor], torch.Tensor] | None, part: RowPart
    ) -> dict[Node, Any]:
        """Return a part's rows of the values that are read from outside, and all of those that have no rows."""
        values: dict[Node, Any] = {}
        for node, number, meta, root_meta in self.outer:
            root = roots[number]
            value = root.as_strided(meta.shape, meta.stride, meta.offset - root_meta.offset + root.storage_offset())
            values[node] = widen(part.cut(node, value)) if widen else part.cut(node, value)
        return values


def _run_node(
    node: Node, values: Mapping[Node, Any], widen: Callable[[torch.Tensor], torch.Tensor] | None, *, is_look_up: bool,
    part: RowPart | None,
) -> Any:  # fmt: skip
    """Run one op of a chain, in fp64 where ``widen`` is given."""
    if widen and (exact := exactly(node, values)) is not None:
        return exact()
    arguments = torch.fx.node.map_arg(node.args if part is None else part.arguments(node), values.__getitem__)
    keywords = torch.fx.node.map_arg(node.kwargs, values.__getitem__)
    if widen:
        arguments, keywords = _wider(arguments), _wider(keywords)
    assert callable(node.target)
    result = node.target(*arguments, **keywords)
    if widen and is_look_up:  # rows are copied: no matter whether they are widened before or after
        return widen(result)
    if widen and _is_narrow_float(result):
        # Integers and Python numbers give torch's default dtype. Integers in fp64 give fp64.
        wide = pytree.tree_map_only(torch.Tensor, _float64_of_integers, (arguments, keywords))
        return pytree.tree_map_only(torch.Tensor, to_float64, node.target(*wide[0], **wide[1]))
    return result


def _last_reads(nodes: Sequence[Node], kept: Collection[Node]) -> dict[Node, list[Node]]:
    """Return, for each op, the values that no later op reads.

    ``exactly`` reads what an operand was made of, so an op counts as a reader of its operands' operands too.
    """
    last: dict[Node, Node] = {}
    for node in nodes:
        for source in node.all_input_nodes:
            last.update(dict.fromkeys((source, *source.all_input_nodes, node), node))
    found: dict[Node, list[Node]] = {}
    for value, reader in last.items():
        if value not in kept:
            found.setdefault(reader, []).append(value)
    return found


def original_chain(
    ops: Sequence[OpNode],
    index_of: Mapping[Node, int],
    members: Sequence[int],
    inputs: Sequence[int],
    outputs: Sequence[int],
) -> OriginalChain:
    """Collect the nodes of one site; everything is named by its op index.

    Args:
        ops: of the whole capture.
        index_of: of the nodes of the site's region.
        members: the site's ops.
        inputs: what its kernel is given, last what it writes into.
        outputs: what its kernel returns.
    """
    node_at = {index: node for node, index in index_of.items()}
    inside = set(members)
    operand = {root: number for number, root in enumerate(inputs)}
    outer: dict[Node, tuple[Node, int, TensorMeta, TensorMeta]] = {}
    unread: dict[Node, TensorMeta] = {}
    for index in members:
        for source in node_at[index].all_input_nodes:
            at = index_of[source]
            if at in inside or source in outer:
                continue
            root = at
            while root not in operand and (owner := ops[root].alias_of) is not None:
                root = owner
            if root in operand:
                outer[source] = (source, operand[root], ops[at].outputs[0], ops[root].outputs[0])
            else:
                unread[source] = ops[at].outputs[0]
    return OriginalChain(
        nodes=tuple(node_at[index] for index in members),
        outer=tuple(outer.values()),
        unread=tuple(unread.items()),
        outputs=tuple(node_at[index] for index in outputs),
        written=tuple(operand[root] for root in written_by(ops, outputs)),
        in_place=tuple(position for position, index in enumerate(outputs) if ops[index].mutates),
    )


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    memory = tensor.as_strided((extent(tensor),), (1,))
    return memory.clone().as_strided(tensor.shape, tensor.stride(), 0)


def _is_narrow_float(result: object) -> bool:
    """Whether an op whose floating operands are fp64 made another float dtype."""
    found = [one for one in pytree.tree_leaves(result) if isinstance(one, torch.Tensor) and one.is_floating_point()]
    return any(one.dtype != torch.float64 for one in found)


def _float64_of_integers(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of integers as fp64; masks stay masks, since some ops take nothing else."""
    return tensor if tensor.dtype == torch.bool or tensor.is_complex() else tensor.to(torch.float64)


def wide_dtype(dtype: torch.dtype, wide: torch.dtype) -> torch.dtype:
    """Return the wide dtype for floats, the complex one of its parts for complex numbers, other dtypes as they are."""
    if dtype.is_complex:
        return wide.to_complex()
    return wide if dtype.is_floating_point else dtype


def to_float64(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of floats or complex numbers in fp64 with the same strides; other tensors pass through."""
    return widened(tensor, torch.float64)


def widened(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of floats or complex numbers in another dtype with the same strides; other tensors pass through."""
    if tensor.dtype == (dtype := wide_dtype(tensor.dtype, dtype)):
        return tensor
    # Through the memory it lies in, which also serves expanded tensors: their elements share addresses and cannot be copied to.
    memory = tensor.as_strided((extent(tensor),), (1,))
    return memory.to(dtype).as_strided(tensor.shape, tensor.stride(), 0)


def extent(tensor: torch.Tensor) -> int:
    """Return how many elements of memory a tensor spans, from its first to its last."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def has_strides(tensor: torch.Tensor, strides: Sequence[int]) -> bool:
    """Whether a tensor's elements lie as these strides say: of a dim of one element the stride means nothing.

    At one token attention returns other strides there than it was traced with.
    """
    return all(size == 1 or own == other for size, own, other in zip(tensor.shape, tensor.stride(), strides, strict=True))


def _wider(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return wide_dtype(value, torch.float64)
    if isinstance(value, tuple | list):
        return type(value)(_wider(item) for item in value)
    if isinstance(value, dict):
        return {name: _wider(item) for name, item in value.items()}
    return value


class Observer(torch.fx.Interpreter):
    """Runs a region once and keeps the values of some nodes, and notes where real strides differ from the traced ones."""

    def __init__(
        self, region: Region, index_of: Mapping[Node, int], ops: Sequence[OpNode], *, keep: set[int], check: set[int]
    ) -> None:
        super().__init__(region.graph)
        self._index_of = index_of
        self._ops = ops
        self._keep = keep
        self._check = check
        self.values: dict[int, torch.Tensor] = {}
        self.surprises: dict[int, str] = {}

    def run_node(self, node: Node) -> Any:
        """Run one node; keep its value and check its layout where asked to."""
        result = super().run_node(node)
        index = self._index_of.get(node, -1)
        if isinstance(result, torch.Tensor):
            if index in self._keep:
                self.values[index] = result.detach()
            if index in self._check:
                meta = self._ops[index].outputs[0]
                if tuple(result.shape) != meta.shape or not has_strides(result, meta.stride):
                    self.surprises[index] = (
                        f"{self._ops[index].target} returned strides {tuple(result.stride())}, and torch traced {meta.stride}: a "
                        "kernel would read other elements; `contiguous()` on what the op reads makes both agree"
                    )
        return result


def _mixes_integers(node: Node) -> bool:
    """Whether an op takes several tensors of integers, or one apart, or counts."""
    read = [value for source in node.all_input_nodes for value in tensors_of(source.meta.get("val"))]
    integers = [value for value in read if str(value.dtype).removeprefix("torch.") in _INTEGERS]
    return len(integers) > 1 or bool(integers and base_name(str(node.target)) in _PARTS | _COUNTS)
