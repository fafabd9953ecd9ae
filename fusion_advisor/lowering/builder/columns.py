"""Reductions over leading dims: a bias's gradient is the sum of all rows of its layer's.

In: an op that reduces leading dims, and the index of one of its elements. Out: the index of what is reduced, and the loops that
run over it. Its Program is a reduced one like any other, with the rows of memory as its last dim: its columns are as far apart as
rows are. ``codegen.split.column_sums`` makes launches of it that read memory in order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fusion_advisor.chains.op_inputs import reduces_columns
from fusion_advisor.ir.affine_index import Index, reshaped
from fusion_advisor.ir.dtypes import CannotLower
from fusion_advisor.ir.program import REDUCTIONS, Program
from fusion_advisor.records import OpNode

if TYPE_CHECKING:
    from fusion_advisor.lowering.builder.builder import Lowering


def has_columns(ops: Mapping[int, OpNode] | Sequence[OpNode], members: Sequence[int]) -> bool:
    """Whether some member of a chain reduces leading dims.

    Args:
        ops: the captured ops by index.
        members: of the chain.
    """
    return any(reduces_columns(ops[index], ops) for index in members)


def column_index(
    lowering: Lowering, op: OpNode, shape: Sequence[int], count: int, where: Index, *, keepdim: bool
) -> tuple[Index, frozenset[int]]:
    """Return the index of what a column's element is reduced from, and the loops over the reduced dims.

    Args:
        lowering: the chain.
        op: reduces.
        shape: of what is reduced.
        count: how many leading dims are.
        where: the wanted element of the result.
        keepdim: whether the result has the reduced dims.

    Raises:
        CannotLower: the dims are no loops of the chain's nest, or there is nothing to reduce.
    """
    nest = lowering.nest
    if math.prod(shape) != math.prod(nest.shape):
        raise CannotLower("FA604", f"{op.target} reduces a shape {tuple(shape)} that is not the chain's loop nest {nest.shape}")
    if not math.prod(shape):
        raise CannotLower("FA604", f"{op.target} of no elements is left to torch")
    rows = reshaped(nest.index(), nest.shape, shape, nest.extents)[:count]
    variables = {variable for place in rows for variable, _ in place.terms}
    if not variables and len(nest.shape) > 1 and nest.extents[0] == 1:
        variables = {0}
    if not variables:
        raise CannotLower("FA604", f"{op.target} over one row in a nest {nest.shape} without that row is left to torch")
    columns = where[count:] if keepdim else where
    if variables & {variable for place in columns for variable, _ in place.terms if nest.extents[variable] != 1}:
        raise CannotLower("FA604", f"{op.target}: a column's index depends on the reduced dims")
    return (*rows, *columns), frozenset(variables)


def refuse_read_back(program: Program) -> None:
    """Refuse a kernel whose elements read the sum of their own column: it would read memory across twice.

    Raises:
        CannotLower: some do.
    """
    varies, known = program.depends_on(), set[int]()
    for number, value in enumerate(program.values):
        if value.op in REDUCTIONS or not known.isdisjoint(value.args):
            known.add(number)
            if len(program.dims) - 1 in varies[number]:
                raise CannotLower("FA604", "what a column's elements do with its sum is a kernel of its own")
    for store in program.stores:
        if store.value in known and store.strides[-1] and program.dims[-1] > 1:
            raise CannotLower("FA604", "what a column's elements do with its sum is a kernel of its own")
