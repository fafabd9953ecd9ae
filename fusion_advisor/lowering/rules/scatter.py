"""Ops that write where a tensor says: ``index_copy_``, with which a static KV cache takes the rows of new tokens.

Such an op ends a chain. What is written is the source's rows; the tensor that they go to is an output of the kernel that the call
is given, not one that it makes. A position out of range stops torch (the CPU raises, CUDA kills the process's context); so it
does a kernel of ours (``codegen.common.position_checks``), which writes nothing there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fusion_advisor.chains.op_inputs import writes_by_number
from fusion_advisor.ir.affine_index import Index, Place
from fusion_advisor.ir.dtypes import CannotLower
from fusion_advisor.lowering.rules.gather import ids_at, inside
from fusion_advisor.records import OpNode, Ref

if TYPE_CHECKING:
    from fusion_advisor.lowering.builder.builder import Lowering


def rows_of(op: OpNode) -> int:
    """Return the index of the op whose rows are copied."""
    return _ref(op, 3)


def written_shape(ops: Mapping[int, OpNode] | Sequence[OpNode], index: int) -> tuple[int, ...]:
    """Return the shape of what an op writes: its result's, or that of the rows which it copies into its result."""
    op = ops[index]
    if not op.mutates:
        return op.outputs[0].shape
    if not writes_by_number(op):
        raise CannotLower("FA602", f"{op.target} writes in place")
    return ops[rows_of(op)].outputs[0].shape


def scattered(lowering: Lowering, op: OpNode, where: Index) -> tuple[Index, int]:
    """Return where an element of the rows goes, and the number of the value that says whether that is inside the tensor.

    Args:
        lowering: the chain.
        op: its ``index_copy_``.
        where: the element among the rows.

    Raises:
        CannotLower: the positions are no plain integers, the rows are not the tensor's in dtype or shape, or the tensor is a part
            of another one.
    """
    target, dim, positions = lowering.meta(_ref(op, 0)), op.args[1], _ref(op, 2)
    rows, index = lowering.meta(rows_of(op)), lowering.meta(positions)
    rank = len(target.shape)
    if not isinstance(dim, int) or not rank or len(rows.shape) != rank:
        raise CannotLower("FA601", f"{op.target} of a single number has no lowering")
    dim %= rank
    if index.dtype not in ("int64", "int32") or rows.dtype != target.dtype:
        raise CannotLower("FA601", f"{op.target} of {rows.dtype} into {target.dtype} by {index.dtype} has no lowering")
    owner = _ref(op, 0)
    while (above := lowering.op(owner).alias_of) is not None:
        owner = above
    if lowering.meta(owner) != target:
        raise CannotLower("FA603", f"{op.target} into a part of a tensor is left to torch")
    if any(stride == 0 and size > 1 for stride, size in zip(target.stride, target.shape, strict=True)):
        raise CannotLower("FA603", f"{op.target} into a tensor whose elements share memory")
    number = ids_at(lowering, op, positions, where[dim : dim + 1] if index.shape else ())
    guard = inside(lowering, number, target.shape[dim], f"index_copy_ {dim}")
    return (*where[:dim], Place(gathered=((number, 1),)), *where[dim + 1 :]), guard


def _ref(op: OpNode, position: int) -> int:
    argument = op.args[position]
    if not isinstance(argument, Ref):
        raise CannotLower("FA601", f"{op.target} has an argument {argument!r} that no kernel takes")
    return argument.index
