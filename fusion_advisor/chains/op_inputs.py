"""What one op reads and writes, and whether it may stand in a chain."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from fusion_advisor.records import Arg, OpClass, OpNode, Ref
from fusion_advisor.records.op_facts import SEVERAL_RESULTS, overload_free, reads_by_number, reads_elsewhere


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


def is_candidate(op: OpNode, ops: Sequence[OpNode] = ()) -> bool:
    """Whether an op may stand in a chain: arithmetic, reductions, ``cat`` and ``stack`` (choices by index), reads by position.

    Copies of whole runs too, where the ops are given that they copy from. Nothing that writes in place.

    Args:
        op: the op.
        ops: all ops of the capture.
    """
    arithmetic = op.op_class in (OpClass.POINTWISE, OpClass.REDUCTION)
    is_choice = op.target.startswith(("aten.cat.", "aten.stack."))
    moves = is_choice or reads_by_number(op.target) or reads_elsewhere(op.target)
    if op.mutates or not (arithmetic or moves or copies_runs(op, ops)):
        return False
    if len(op.outputs) != 1:
        return returns_several(op)
    return op.outputs[0].shape != ()


def returns_several(op: OpNode) -> bool:
    """Whether an op returns several tensors, each of which a kernel can compute (``native_layer_norm``)."""
    return op.target.startswith("aten.") and overload_free(op.target) in SEVERAL_RESULTS


def viewed(op: OpNode, ops: Sequence[OpNode]) -> int | None:
    """Return the op whose value a view shows; None for what computes, one tensor of several results included.

    Args:
        op: the op.
        ops: all ops of the capture.
    """
    source = op.args[0] if op.op_class is OpClass.VIEW and op.args else None
    if not isinstance(source, Ref) or (op.target == "getitem" and returns_several(ops[source.index])):
        return None
    return source.index


def behind_views(index: int, ops: Sequence[OpNode]) -> tuple[int, frozenset[int]]:
    """Return the op that computed what a view shows, and the views in between.

    Args:
        index: of the view; of any other op: that op itself.
        ops: all ops of the capture.
    """
    glue: set[int] = set()
    while (shown := viewed(ops[index], ops)) is not None:
        glue.add(index)
        index = shown
    return index, frozenset(glue)


def storages_of(index: int, ops: Sequence[OpNode]) -> tuple[int, ...]:
    """Return the ops that own the storage of a value; an op that writes in place returns what it wrote to.

    Args:
        index: of the value's op.
        ops: all ops of the capture.
    """
    while (owner := ops[index].alias_of) is not None:
        index = owner
    return ops[index].mutates or (index,)


_REDUCERS = frozenset(["sum", "mean", "amax", "amin"])


def reduced_dims(dims: Arg, rank: int) -> tuple[int, ...]:
    """Return the dims that a reduction's argument names, counted from the first; all where it names none.

    Args:
        dims: one, several or None.
        rank: how many dims there are.
    """
    if dims is None or dims == ():
        return tuple(range(rank))
    given = dims if isinstance(dims, tuple) else (dims,)
    return tuple(sorted(int(dim) % rank for dim in given if isinstance(dim, int)))


def is_leading(dims: Sequence[int], rank: int) -> bool:
    """Whether some dims are the first ones of ``rank``, and others follow."""
    return 0 < len(dims) < rank and list(dims) == list(range(len(dims)))


def reduces_columns(op: OpNode, ops: Mapping[int, OpNode] | Sequence[OpNode]) -> bool:
    """Whether an op reduces leading dims, as the gradient of a bias sums rows; also one of the results of such an op.

    Args:
        op: the op.
        ops: all ops of the capture.
    """
    source = op.args[0] if op.args else None
    if not isinstance(source, Ref):
        return False
    if op.target == "getitem":
        return op.args[1] != 0 and op.args[1] in _norm_gradients(ops[source.index])
    name = overload_free(op.target)
    if name == "native_layer_norm_backward":
        return 0 not in _norm_gradients(op)
    if name not in _REDUCERS or len(ops[source.index].outputs) != 1:
        return False
    rank = len(ops[source.index].outputs[0].shape)
    dims = op.args[1] if len(op.args) > 1 else dict(op.kwargs).get("dim")
    return is_leading(reduced_dims(dims, rank), rank)


_FEW = 16
"""Elements of which a reduction is written out: repeated heads, mostly 2 to 8."""


def reduces_few(op: OpNode, ops: Mapping[int, OpNode] | Sequence[OpNode]) -> bool:
    """Whether an op reduces a few elements along dims in the midst: the gradient of repeated heads sums over the repeats.

    Args:
        op: the op.
        ops: all ops of the capture.
    """
    source = op.args[0] if op.args else None
    if not isinstance(source, Ref) or overload_free(op.target) not in _REDUCERS or len(ops[source.index].outputs) != 1:
        return False
    shape = ops[source.index].outputs[0].shape
    dims = reduced_dims(op.args[1] if len(op.args) > 1 else dict(op.kwargs).get("dim"), len(shape))
    in_the_midst = bool(dims) and not is_leading(dims, len(shape)) and dims[-1] != len(shape) - 1
    return in_the_midst and 1 <= math.prod(shape[dim] for dim in dims) <= _FEW and math.prod(op.outputs[0].shape) > 1


def _norm_gradients(op: OpNode) -> tuple[int, ...]:
    """Which results a layer norm's backward op is asked for; none of any other op."""
    mask = op.args[-1] if overload_free(op.target) == "native_layer_norm_backward" else ()
    return tuple(number for number, is_wanted in enumerate(mask) if is_wanted) if isinstance(mask, tuple) else ()


def for_columns_alone(ops: Sequence[OpNode]) -> frozenset[int]:
    """Return the ops that reduce columns, and those whose value nothing else reads.

    Args:
        ops: all ops of a capture.
    """
    readers: list[set[int]] = [set() for _ in ops]
    for op in ops:
        for source in inputs_of(op):
            readers[source].add(op.index)
    found: set[int] = set()
    for op in reversed(ops):
        read = readers[op.index]
        if reduces_columns(op, ops) or (read and read <= found and op.op_class in (OpClass.POINTWISE, OpClass.VIEW)):
            found.add(op.index)
    return frozenset(found)


_COPIES = ("aten.contiguous.", "aten.clone.", "aten.reshape.")
_LEAST_RUN = 16
"""Elements that lie side by side before and after: shorter runs are a transpose's, which takes tiles of its own."""


def copies_runs(op: OpNode, ops: Sequence[OpNode]) -> bool:
    """Whether an op copies a tensor whose runs of neighbouring elements stay whole, as a window partition does.

    Not what repeats elements: where heads are repeated, a graph rewrite does without the copy.

    Args:
        op: the op.
        ops: all ops of the capture; none: it is no copy.
    """
    if not ops or op.op_class is not OpClass.MEMORY or not op.target.startswith(_COPIES) or len(op.outputs) != 1:
        return False
    source = op.args[0] if op.args else None
    if not isinstance(source, Ref) or len(ops[source.index].outputs) != 1:
        return False
    before, after = ops[source.index].outputs[0], op.outputs[0]
    if before.dtype != after.dtype or not before.shape or not after.shape:
        return False
    runs = min(before.shape[-1], after.shape[-1])
    are_whole = before.stride[-1] == after.stride[-1] == 1 and runs >= _LEAST_RUN and after.shape[-1] % before.shape[-1] == 0
    return are_whole and all(stride != 0 for size, stride in zip(before.shape, before.stride, strict=True) if size > 1)


def relaid_norm(op: OpNode, ops: Sequence[OpNode]) -> int | None:
    """Return the group norm to whose result an op gives the layout of what the norm reads; None for any other op.

    On CUDA torch's group norm returns contiguous images whatever it reads. Norm and copy together are one kernel, which writes
    where it reads; the norm alone is none.

    Args:
        op: the op.
        ops: all ops of the capture.
    """
    source = op.args[0] if op.args else None
    if not op.target.startswith("aten.contiguous.") or not isinstance(source, Ref) or len(op.outputs) != 1:
        return None
    norm = ops[source.index]
    image = norm.args[0] if norm.target.startswith("aten.group_norm.") else None
    if not isinstance(image, Ref) or len(ops[image.index].outputs) != 1:
        return None
    (before,), (between,), (after,) = ops[image.index].outputs, norm.outputs, op.outputs
    is_undone = before.stride == after.stride != between.stride and before.dtype == between.dtype == after.dtype
    return norm.index if is_undone else None


def writes_by_number(op: OpNode) -> bool:
    """Whether an op copies rows into a tensor where another tensor says, and does nothing else."""
    is_copy = op.target.startswith("aten.index_copy_.") and bool(op.mutates) and not op.kwargs
    return is_copy and len(op.args) == 4 and all(isinstance(op.args[place], Ref) for place in (0, 2, 3))
