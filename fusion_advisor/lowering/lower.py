"""From a chain of captured ops to one :class:`Program`: the same road for a model's chain and for a kernel's reference.

Every value is a function of an index, in the manner of Inductor's define-by-run: asking an output for its element at
``(i0, i1, …)`` asks its producers for theirs, views only rewrite the index, and whatever comes from outside the chain becomes a
load whose address is read off the captured strides. Nothing is materialised on the way, so a ``cat`` of two halves is two
guarded loads and a transpose costs nothing.

Intermediate maths is fp32 (fp64 for fp64), which is nearer to the truth than the original ops, and ``verify`` shows by how much.
``lowering.builder.rounding`` says which values are rounded to 16 bits all the same.

A chain that cannot be one kernel raises :class:`CannotLower` with the sentence that the report shows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fusion_advisor.chains.op_inputs import inputs_of, reduces_few
from fusion_advisor.ir.affine_index import CutLoop
from fusion_advisor.ir.dtypes import CannotLower
from fusion_advisor.ir.loop_nest import Nest
from fusion_advisor.lowering.builder.builder import Lowering
from fusion_advisor.lowering.builder.columns import refuse_read_back
from fusion_advisor.lowering.builder.lowered import Lowered
from fusion_advisor.lowering.builder.side_by_side import side_by_side
from fusion_advisor.lowering.rules.gather import READS_ONE
from fusion_advisor.lowering.rules.scatter import written_shape
from fusion_advisor.lowering.rules.tables import RULES
from fusion_advisor.lowering.rules.window import WINDOWED
from fusion_advisor.records import OpClass, OpNode, Ref
from fusion_advisor.records.op_facts import overload_free

__all__ = ["Lowered", "Lowering", "lower"]

_MOST_CUTS = 8
_NO_ROWS = READS_ONE | WINDOWED.keys() | {"adaptive_avg_pool2d", "nll_loss_backward"}
"""Reductions to torch that reduce no rows of the loop nest."""


def lower(
    ops: Mapping[int, OpNode] | Sequence[OpNode], members: Sequence[int], outputs: Sequence[int], *, is_exact: bool = False
) -> Lowered:
    """Lower the ops with indices ``members`` to one Program that writes ``outputs``.

    Outputs that differ in one dim alone, as queries and fewer keys do in their heads, get loop nests of their own in one launch.

    Args:
        ops: the captured ops by index.
        members: indices of the chain's ops, in order; views inside the chain included.
        outputs: the members whose values are needed outside, in order.
        is_exact: round every op's result as eager rounds it, and rewrite no arithmetic.

    Raises:
        CannotLower: no single kernel of ours computes this.
    """
    try:
        return _lower_nest(ops, members, outputs, is_exact=is_exact)
    except CannotLower:
        groups = _by_shape(ops, outputs)
        if len(groups) < 2:
            raise
        parts = [_lower_nest(ops, _needed(ops, members, group), group, is_exact=is_exact) for group in groups]
        return side_by_side(ops, parts, outputs)


def _by_shape(ops: Mapping[int, OpNode] | Sequence[OpNode], outputs: Sequence[int]) -> list[list[int]]:
    """Outputs of equal shape together, where the shapes differ in one and the same dim, which is not the last."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index in outputs:
        groups.setdefault(written_shape(ops, index), []).append(index)
    if len({len(shape) for shape in groups}) != 1:
        return []
    differing = [dim for dim, sizes in enumerate(zip(*groups, strict=True)) if len(set(sizes)) > 1]
    rank = len(next(iter(groups)))
    return list(groups.values()) if len(differing) == 1 and differing[0] != rank - 1 else []


def _needed(ops: Mapping[int, OpNode] | Sequence[OpNode], members: Sequence[int], outputs: Sequence[int]) -> list[int]:
    """The members that some outputs are computed from."""
    inside, found, waiting = set(members), set(), list(outputs)
    while waiting:
        index = waiting.pop()
        if index in inside and index not in found:
            found.add(index)
            waiting += inputs_of(ops[index])
    return sorted(found)


def _lower_nest(
    ops: Mapping[int, OpNode] | Sequence[OpNode], members: Sequence[int], outputs: Sequence[int], *, is_exact: bool
) -> Lowered:
    nest = Nest.of(_widest_shape(ops, members, outputs))
    for _ in range(_MOST_CUTS):
        try:
            lowering = Lowering(ops, members, outputs, nest, RULES, is_exact=is_exact)
            lowered = lowering.run()
            _refuse_unread_ids(lowering)
            if lowering.has_columns:
                refuse_read_back(lowered.program)
            if not lowered.inputs:  # ``flags | True``, or a reduction of nothing: no tensor says on which device it runs
                raise CannotLower("FA605", "the chain reads no element of a tensor: its result is the same in each call")
            return lowered
        except CutLoop as cut:
            nest = nest.cut(cut.variable, cut.inner)
    raise CannotLower("FA603", f"the loops over {nest.shape} would have to be cut more than {_MOST_CUTS} times")


def _refuse_unread_ids(lowering: Lowering) -> None:
    """Refuse a chain that cuts away some of the rows that an op reads by number: eager checks the numbers of all.

    Raises:
        CannotLower: some number would go unchecked.
    """
    for index, are_all_read in lowering.ids_are_all_read.items():
        if not are_all_read:
            target = lowering.op(index).target
            raise CannotLower("FA601", f"{target} is cut inside the chain: the positions that are cut away would not be checked")


def _widest_shape(
    ops: Mapping[int, OpNode] | Sequence[OpNode], members: Sequence[int], outputs: Sequence[int]
) -> tuple[int, ...]:
    """The iteration shape: the widest of the outputs and of what is reduced."""
    shapes = [written_shape(ops, index) for index in outputs]
    for index in members:
        op = ops[index]
        is_reduction = op.op_class is OpClass.REDUCTION and overload_free(op.target) not in _NO_ROWS
        if is_reduction and op.args and isinstance(op.args[0], Ref) and not reduces_few(op, ops):
            found = ops[op.args[0].index].outputs
            if len(found) != 1:
                raise CannotLower("FA601", f"{ops[op.args[0].index].target} has {len(found)} outputs")
            shapes.append(found[0].shape)
    if not shapes or not any(shapes):
        raise CannotLower("FA603", "the chain computes a single number")
    if any(ops[index].outputs and ops[index].outputs[0].dtype.startswith("complex") for index in members):
        raise CannotLower("FA606", "complex numbers are not supported")
    return max(shapes, key=lambda shape: (math.prod(shape), len(shape)))
