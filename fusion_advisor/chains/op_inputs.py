"""What one op reads and writes, and whether it may stand in a chain."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fusion_advisor.records import Arg, OpClass, OpNode, Ref
from fusion_advisor.records.op_facts import reads_by_number, reads_elsewhere


def references(argument: Arg) -> Iterable[int]:
    """Yield the op indices that an argument reads."""
    if isinstance(argument, Ref):
        yield argument.index
    elif isinstance(argument, tuple):
        for item in argument:
            yield from references(item)


def inputs_of(op: OpNode) -> tuple[int, ...]:
    """Return the indices of the ops whose values ``op`` reads, without repeats."""
    found: dict[int, None] = {}
    for argument in (*op.args, *(value for _, value in op.kwargs)):
        found.update(dict.fromkeys(references(argument)))
    return tuple(found)


def depends_on_inputs(ops: Sequence[OpNode]) -> list[bool]:
    """For each op, whether its value can change between calls; what depends on no input at all is folded, not fused."""
    depends: list[bool] = []
    for op in ops:
        own = op.op_class is OpClass.INPUT and op.role != "constant"
        depends.append(own or bool(op.mutates) or any(depends[index] for index in inputs_of(op)))
    return depends


def is_candidate(op: OpNode) -> bool:
    """Whether an op may stand in a chain: arithmetic, reductions, ``cat`` and ``stack`` (choices by index), reads by position.

    Nothing that writes in place.
    """
    arithmetic = op.op_class in (OpClass.POINTWISE, OpClass.REDUCTION)
    is_choice = op.target.startswith(("aten.cat.", "aten.stack."))
    moves = is_choice or reads_by_number(op.target) or reads_elsewhere(op.target)
    return (arithmetic or moves) and not op.mutates and len(op.outputs) == 1 and op.outputs[0].shape != ()


def writes_by_number(op: OpNode) -> bool:
    """Whether an op copies rows into a tensor where another tensor says, and does nothing else."""
    is_copy = op.target.startswith("aten.index_copy_.") and bool(op.mutates) and not op.kwargs
    return is_copy and len(op.args) == 4 and all(isinstance(op.args[place], Ref) for place in (0, 2, 3))
