"""Groups of pointwise ops that read the same large values, though neither feeds the other: one kernel for both reads them once.

The backward pass of a gate has two such groups: the gradient of the gate and that of what it multiplies read the same three
tensors. As two kernels they move seven tensors, as one five.

Only groups that walk memory in one order are considered, element by element: all that is as large as the result has its layout.
So one loop nest computes both, and a value that both read is read at the same turn. Slices of one tensor are different values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from fusion_advisor.chains.group import Verdict
from fusion_advisor.chains.op_inputs import inputs_of, storages_of
from fusion_advisor.records import OpClass, OpNode, TensorMeta
from fusion_advisor.records.op_facts import item_bytes

Space = tuple[tuple[int, ...], ...]
"""The elements of a tensor in the order of memory: how many where it is contiguous, else its shape and strides."""
Part = tuple[Space, Space, tuple[int, ...], int, str]
"""What is read as a whole: the reader's space, its own, the ops that own the storage, the offset in it and the dtype."""

MOST_TRIES = 4
"""Groups before a group that it is offered to, nearest first: the time to find chains stays linear in their number."""
MOST_BETWEEN = 16
"""Ops that may stand between the last ops of two groups. One kernel makes the later group's results early, and they take memory
until they are read."""
_LEAST_SHARE = 0.1
"""Of the bytes that both groups move: what one kernel must save. Less is not worth the registers that it takes."""


def large_reads(members: Iterable[int], outputs: Sequence[int], ops: Sequence[OpNode]) -> dict[Part, int]:
    """Return what a group reads from outside element by element, in bytes; nothing where it is not of one space.

    Args:
        members: of the group.
        outputs: of the group.
        ops: all ops of the capture.
    """
    inside = set(members)
    spaces = {_space(ops[index].outputs[0]) for index in outputs if len(ops[index].outputs) == 1}
    space = spaces.pop() if len(spaces) == 1 else None
    if space is None or not all(_is_of(ops[index], space) for index in inside):
        return {}
    found: dict[Part, int] = {}
    for source in {source for index in inside for source in inputs_of(ops[index])} - inside:
        read = ops[source].outputs[0] if len(ops[source].outputs) == 1 else None
        own = None if read is None else _space(read)
        # A result without gaps has the elements of all that is read in the order of their dims: a strided tensor's too.
        if read is not None and own is not None and (own == space or (len(space) == 1 and math.prod(read.shape) == space[0][0])):
            found[space, own, storages_of(source, ops), read.offset, read.dtype] = math.prod(read.shape) * item_bytes(read.dtype)
    return found


def _is_of(op: OpNode, space: Space) -> bool:
    """Whether an op is pointwise (or a view), and its result has a group's space or is broadcast to it."""
    if op.op_class not in (OpClass.POINTWISE, OpClass.VIEW) or op.mutates or len(op.outputs) != 1:
        return False
    (meta,) = op.outputs
    return _space(meta) == space or _distinct(meta) < math.prod(space[0])


def _space(meta: TensorMeta) -> Space | None:
    """The space of a tensor; None of one that repeats elements."""
    count = math.prod(meta.shape)
    if count == 0 or _distinct(meta) < count:
        return None
    dims = [(size, stride) for size, stride in zip(meta.shape, meta.stride, strict=True) if size != 1]
    whole = 1
    for size, stride in reversed(dims):
        if stride != whole:
            return tuple(size for size, _ in dims), tuple(stride for _, stride in dims)
        whole *= size
    return ((count,),)


def _distinct(meta: TensorMeta) -> int:
    return math.prod(size for size, stride in zip(meta.shape, meta.stride, strict=True) if stride)


def offers(reads: Sequence[tuple[int, Mapping[Part, int]]]) -> Iterator[tuple[int, int]]:
    """Yield each group with the nearest groups before it that read a value of it, by a member of each.

    Args:
        reads: a member of each group and what the group reads, in order.
    """
    before: dict[Part, list[int]] = {}
    for member, parts in reads:
        near = {other for part in parts for other in before.get(part, ())[-MOST_TRIES:]}
        yield from ((member, other) for other in sorted(near, reverse=True)[:MOST_TRIES])
        for part in parts:
            before.setdefault(part, []).append(member)


def is_near(one: frozenset[int], other: frozenset[int], ops: Sequence[OpNode]) -> bool:
    """Whether few other ops stand between the last ops of two groups.

    Args:
        one: a group's members.
        other: those of the other.
        ops: all ops of the capture.
    """
    first, last = sorted((max(one), max(other)))
    between = ops[first + 1 : last]
    return sum(op.op_class is not OpClass.VIEW and op.index not in one | other for op in between) <= MOST_BETWEEN


def saves_bytes(both: Verdict, one: tuple[Verdict, Mapping[Part, int]], other: tuple[Verdict, Mapping[Part, int]]) -> bool:
    """Whether one kernel moves clearly fewer bytes than two.

    Args:
        both: verdict on one kernel for two groups.
        one: verdict on a group, and what it reads.
        other: likewise of the other.
    """
    apart = one[0].floor_bytes + other[0].floor_bytes
    saved = min(apart - both.floor_bytes, sum(count for part, count in one[1].items() if part in other[1]))
    return both.is_fusible and saved > 0 and saved >= _LEAST_SHARE * apart
