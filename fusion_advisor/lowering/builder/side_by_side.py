"""One launch of several loop nests that do not need one another."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fusion_advisor.ir.dtypes import CannotLower
from fusion_advisor.ir.operand_names import unique, with_names
from fusion_advisor.ir.program import Operand, Part, with_dims
from fusion_advisor.lowering.builder.lowered import Lowered, written_by
from fusion_advisor.records import OpNode


def side_by_side(ops: Mapping[int, OpNode] | Sequence[OpNode], parts: Sequence[Lowered], outputs: Sequence[int]) -> Lowered:
    """Make one launch of loop nests that do not need one another.

    Args:
        ops: the captured ops by index.
        parts: the nests, each lowered by itself.
        outputs: of all of them, in the order of the result's output operands.

    Raises:
        CannotLower: they are not of one kind, or one reads what another writes.
    """
    least = min(2, max(len(part.program.dims) for part in parts))
    parts = [replace(part, program=with_dims(part.program, least)) for part in parts]
    if len({(part.program.is_reduced, part.program.is_reduced and part.program.dims[-1]) for part in parts}) != 1:
        raise CannotLower("FA603", "loop nests of different kinds do not share a launch")
    roots = list(dict.fromkeys(root for part in parts for root in part.inputs))
    if set(roots) & set(outputs):
        raise CannotLower("FA603", "one output is computed from another over a loop nest of its own")
    place = {index: number for number, index in enumerate(roots)}
    place |= {index: len(roots) + number for number, index in enumerate(outputs)}
    operands: dict[int, Operand] = {}
    offsets: dict[int, list[int]] = {}
    for part in parts:
        for number, (index, operand) in enumerate(zip((*part.inputs, *part.outputs), part.program.operands, strict=True)):
            reads = [v.offset for v in part.program.values if v.op == "load" and v.operand == number]
            offsets.setdefault(index, []).append(min(reads, default=0))
            before = operands.get(index)
            if before is None:
                operands[index] = operand
                continue
            # Read twice from one place on, it comes from the cache; pieces of one projection add up.
            is_shared = len(set(offsets[index])) == 1
            count = (
                max(before.element_count, operand.element_count) if is_shared else before.element_count + operand.element_count
            )
            operands[index] = replace(before, element_count=min(count, math.prod(ops[index].outputs[0].shape)))
    names = unique([operands[index].name for index in roots])
    names += [f"out{number + 1}" for number in range(len(outputs))]
    nests = [
        Part(program=part.program, operands=tuple(place[index] for index in (*part.inputs, *part.outputs))) for part in parts
    ]
    first = nests[0]
    program = replace(
        first.program,
        operands=tuple(operands[index] for index in place),
        values=tuple(replace(v, operand=first.operands[v.operand]) if v.op == "load" else v for v in first.program.values),
        stores=tuple(replace(store, operand=first.operands[store.operand]) for store in first.program.stores),
        siblings=tuple(nests[1:]),
    )
    program = with_names(program, names)
    return Lowered(program=program, inputs=tuple(roots), outputs=tuple(outputs), written=written_by(ops, outputs))
