"""Ops that read where a tensor says (embedding, gather, the losses) and norms over groups of channels.

A position out of range stops torch: the CPU raises, CUDA kills the process's context. A kernel of ours does the same
(``codegen.common.position_checks``) and never reads there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from fusion_advisor.ir.affine_index import ORIGIN, Index, Place, reshaped
from fusion_advisor.ir.dtypes import INTEGERS, CannotLower, argument_of, compute_dtype
from fusion_advisor.ir.program import Value
from fusion_advisor.lowering.builder.builder import Rule
from fusion_advisor.lowering.builder.causal_compare import place_of
from fusion_advisor.lowering.rules.reduction import mean_of
from fusion_advisor.records import Arg, OpNode, Ref

if TYPE_CHECKING:
    from fusion_advisor.lowering.builder.builder import Lowering


def _ref(op: OpNode, position: int) -> int:
    argument = op.args[position]
    if not isinstance(argument, Ref):
        raise CannotLower("FA601", f"{op.target} has an argument {argument!r} that no kernel takes")
    return argument.index


def ids_at(lowering: Lowering, op: OpNode, tensor: int, where: Index) -> int:
    """Return the number of an index tensor's element, an int64 value.

    Raises:
        CannotLower: it is no index, or the chain computes it from floating-point values.
    """
    if lowering.meta(tensor).dtype not in ("int64", "int32"):
        raise CannotLower("FA601", f"{op.target} by {lowering.meta(tensor).dtype} has no lowering")
    number = lowering.at(tensor, where)
    are_all = _covers(lowering, where, lowering.meta(tensor).shape)
    lowering.ids_are_all_read[op.index] = lowering.ids_are_all_read.get(op.index, False) or are_all
    if _is_computed_from_floats(lowering, number):
        raise CannotLower(
            "FA601",
            f"{op.target} by numbers computed from floating-point values: torch, which each kernel is checked against on random "
            "ones, does not survive what these would make of them",
        )
    return number


def _covers(lowering: Lowering, where: Index, shape: tuple[int, ...]) -> bool:
    """Whether the loops take an index to every element of a tensor."""
    used: set[int] = set()
    for place, size in zip(where, shape, strict=True):
        low, high = lowering.range_of(place)
        step_of = sorted((abs(step), lowering.nest.extents[variable]) for variable, step in place.terms)
        reach = 1  # positions in a run that the loops with smaller steps cover
        for step, extent in step_of:
            if extent > 1 and step > reach:
                return False
            reach += step * (extent - 1)
        variables = {variable for variable, _ in place.terms if lowering.nest.extents[variable] > 1}
        if low > 0 or high < size - 1 or place.gathered or variables & used:
            return False
        used |= variables
    return True


def _is_computed_from_floats(lowering: Lowering, number: int) -> bool:
    waiting, seen = [number], {number}
    while waiting:
        value = lowering.values[waiting.pop()]
        if value.op == "load" and value.dtype not in (*INTEGERS, "bool"):
            return True
        fresh = set(value.args) - seen
        seen |= fresh
        waiting += fresh
    return False


def inside(lowering: Lowering, number: int, size: int, check: str, *, wanted: int | None = None) -> int:
    """Whether a position lies in a dim of ``size``, which is an argument of the kernel; the kernel stops where it does not.

    Args:
        lowering: the chain.
        number: the position.
        size: of the dim.
        check: whose error is raised, see ``codegen.common.position_checks``.
        wanted: the value that says where the position counts; everywhere by default.
    """
    extent = lowering.emit(Value(op="extent", constant=size, dtype="int64"))
    return lowering.emit(Value(op="inside", args=(number, extent), guard=wanted, check=check, dtype="bool"))


def _wrapped(lowering: Lowering, number: int, size: int) -> int:
    """A position counted from the end where it is negative."""
    extent = lowering.emit(Value(op="extent", constant=size, dtype="int64"))
    is_negative = lowering.make("lt", number, lowering.const(0, "int64"), dtype="bool")
    return lowering.make("where", is_negative, lowering.make("add", number, extent), number, dtype="int64")


def _read(
    lowering: Lowering,
    op: OpNode,
    table: int,
    where: Index,
    dim: int,
    number: int,
    check: str,
    *,
    wanted: int | None = None,
) -> int:
    """Element ``where`` of a table, but for ``dim``, where the position is a value."""
    dtype, size = op.outputs[0].dtype, lowering.meta(table).shape[dim]
    known = place_of(lowering, number)
    if known is not None and lowering.range_of(known)[0] >= 0 and lowering.range_of(known)[1] < size:
        lowering.ids_are_all_read[op.index] = True  # nothing to check
        return lowering.cast(lowering.at(table, (*where[:dim], known, *where[dim:])), compute_dtype(dtype))
    guard = inside(lowering, number, size, check, wanted=wanted)
    place = Place(gathered=((number, 1),))
    element = lowering.guarded(table, (*where[:dim], place, *where[dim:]), guard, compute_dtype(dtype))
    if not _is_made_of(lowering, element, guard):
        raise CannotLower("FA601", f"{op.target} of a tensor that is not read from memory could not check its positions")
    return element


def _is_made_of(lowering: Lowering, number: int, wanted: int) -> bool:
    waiting, seen = [number], {number}
    while waiting:
        value = lowering.values[waiting.pop()]
        needs = {*value.args, *(() if value.guard is None else (value.guard,))}
        if wanted in needs:
            return True
        waiting += needs - seen
        seen |= needs
    return False


def _counted(lowering: Lowering, number: int) -> int | None:
    """The guard under which a position counts; none where what the guard hides is read as position 0, which lies in any table."""
    return None if lowering.values[number].op == "load" else lowering.guard


def _embedding(lowering: Lowering, op: OpNode, where: Index) -> int:
    """``weight[ids]``; ``padding_idx`` only matters to gradients."""
    number = ids_at(lowering, op, _ref(op, 1), where[:-1])
    return _read(lowering, op, _ref(op, 0), where[-1:], 0, number, "embedding", wanted=_counted(lowering, number))


def _dim_of(lowering: Lowering, op: OpNode) -> int:
    rank, dim = len(lowering.meta(_ref(op, 0)).shape), op.args[1]
    if rank == 0 or not isinstance(dim, int):
        raise CannotLower("FA601", f"{op.target} of a single number has no lowering")
    return dim % rank


def _index_select(lowering: Lowering, op: OpNode, where: Index) -> int:
    dim, index = _dim_of(lowering, op), _ref(op, 2)
    number = ids_at(lowering, op, index, where[dim : dim + 1] if lowering.meta(index).shape else ())
    rest, wanted = (*where[:dim], *where[dim + 1 :]), _counted(lowering, number)
    return _read(lowering, op, _ref(op, 0), rest, dim, number, f"index_select {dim}", wanted=wanted)


def _gather(lowering: Lowering, op: OpNode, where: Index) -> int:
    dim = _dim_of(lowering, op)
    number = ids_at(lowering, op, _ref(op, 2), where)
    rest, wanted = (*where[:dim], *where[dim + 1 :]), _counted(lowering, number)
    return _read(lowering, op, _ref(op, 0), rest, dim, number, f"gather {dim}", wanted=wanted)


def _index(lowering: Lowering, op: OpNode, where: Index) -> int:
    """``x[..., ids, ...]`` with one index tensor; negative ids count from the end."""
    indices = op.args[1]
    assert isinstance(indices, tuple)
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    index = indices[dims[0]] if dims else None
    if len(dims) != 1 or not isinstance(index, Ref):
        raise CannotLower("FA601", f"{op.target} by {len(dims)} tensors has no lowering")
    table, dim, rank = _ref(op, 0), dims[0], len(lowering.meta(index.index).shape)
    number = ids_at(lowering, op, index.index, where[dim : dim + rank])
    wanted = _counted(lowering, number)
    number = _wrapped(lowering, number, lowering.meta(table).shape[dim])
    return _read(lowering, op, table, (*where[:dim], *where[dim + rank :]), dim, number, "index", wanted=wanted)


def _loss_at(
    lowering: Lowering, op: OpNode, where: Index, ignored: Arg, weight: Arg, reduction: Arg, value_of: Callable[[int, int], int]
) -> int:
    """The loss of one row: ``value_of`` its target and whether that counts, 0 where it is to be ignored."""
    shape = lowering.meta(_ref(op, 0)).shape
    if reduction != 0:
        raise CannotLower("FA601", f"{op.target} makes one number of all rows: only reduction='none' is one kernel")
    if weight is not None:
        raise CannotLower("FA601", f"{op.target} with a weight for each class has no lowering")
    if len(shape) != 2 or lowering.meta(_ref(op, 1)).dtype not in ("int64", "int32"):
        raise CannotLower("FA601", f"{op.target} of a shape {shape} has no lowering: it takes rows of classes and their targets")
    assert isinstance(ignored, int)
    target = ids_at(lowering, op, _ref(op, 1), where)
    is_ignored = lowering.make("eq", target, lowering.const(ignored, "int64"), dtype="bool")
    counts, outer = lowering.make("not", is_ignored, dtype="bool"), lowering.guard
    loss = value_of(target, counts if outer is None else lowering.make("and", outer, counts, dtype="bool"))
    zero = lowering.const(0.0, lowering.values[loss].dtype)
    return lowering.make("where", is_ignored, zero, loss, dtype=lowering.values[loss].dtype)


def _nll_loss(lowering: Lowering, op: OpNode, where: Index) -> int:
    weight, reduction = argument_of(op, 2, "weight"), argument_of(op, 3, "reduction", 1)
    ignored = argument_of(op, 4, "ignore_index", -100)

    def value_of(target: int, counts: int) -> int:
        return lowering.make("neg", _read(lowering, op, _ref(op, 0), where, 1, target, "target", wanted=counts))

    return _loss_at(lowering, op, where, ignored, weight, reduction, value_of)


def _cross_entropy(lowering: Lowering, op: OpNode, where: Index) -> int:
    """``log(sum(exp(x - highest))) - (x[target] - highest)``, the order in which torch's log_softmax subtracts."""
    if argument_of(op, 5, "label_smoothing", 0.0):
        raise CannotLower("FA601", f"{op.target} with label_smoothing has no lowering")
    weight, reduction = argument_of(op, 2, "weight"), argument_of(op, 3, "reduction", 1)
    ignored = argument_of(op, 4, "ignore_index", -100)
    source = _ref(op, 0)

    def value_of(target: int, counts: int) -> int:
        inner, variables = lowering.reduction_index(op, lowering.meta(source), (1,), where, keepdim=False)
        value = lowering.row_element(source, inner, op, variables)
        highest = lowering.reduce("max", value, variables)
        exponential = lowering.make("exp", lowering.make("sub", value, highest))
        total = lowering.reduce("sum", exponential, variables)
        wanted = lowering.make("sub", _read(lowering, op, source, where, 1, target, "target", wanted=counts), highest)
        return lowering.make("sub", lowering.make("log", total), wanted)

    return _loss_at(lowering, op, where, ignored, weight, reduction, value_of)


def _group_norm(lowering: Lowering, op: OpNode, where: Index) -> int:
    """Rows are (batch, group); a group's channels and all dims after them are reduced. The nest is cut between groups."""
    source, groups = _ref(op, 0), op.args[1]
    shape, nest = lowering.meta(source).shape, lowering.nest
    assert isinstance(groups, int)
    if math.prod(shape[1:]) == 0:
        raise CannotLower("FA604", f"{op.target} of no elements is left to torch")
    if math.prod(shape) != math.prod(nest.shape):
        raise CannotLower("FA604", f"{op.target} reduces a shape {shape} that is not the chain's loop nest {nest.shape}")
    lowering.has_groups = True
    cut = (shape[0], groups, math.prod(shape[1:]) // groups)
    members = reshaped(nest.index(), nest.shape, cut, nest.extents)[2]
    row = reshaped(where, shape, cut, nest.extents)[:2]
    inner = reshaped((*row, members), cut, shape, nest.extents)
    variables = frozenset(variable for variable, _ in members.terms)
    if not variables and nest.extents[-1] == 1:
        variables = frozenset({len(nest.extents) - 1})
    if not variables:
        raise CannotLower("FA604", f"{op.target} over groups of one element is left to torch")
    if variables & {variable for place in row for variable, _ in place.terms if nest.extents[variable] != 1}:
        raise CannotLower("FA604", f"{op.target}: a row index depends on the reduced dim")
    value = lowering.row_element(source, inner, op, variables)
    dtype = lowering.values[value].dtype
    mean = mean_of(lowering, value, variables)
    centred = lowering.make("sub", value, mean)
    variance = mean_of(lowering, lowering.make("mul", centred, centred), variables)
    if inner != where:
        centred = lowering.make("sub", lowering.argument(op, 0, where), mean)
    eps = argument_of(op, 4, "eps", 1e-5)
    scale = lowering.make("rsqrt", lowering.make("add", variance, lowering.element(eps, where, op, dtype)))
    result = lowering.make("mul", centred, scale)
    channel = (where[1],) if shape[1] != 1 else (ORIGIN,)
    for op_name, position, name in (("mul", 2, "weight"), ("add", 3, "bias")):
        if (parameter := argument_of(op, position, name)) is not None:
            result = lowering.make(op_name, result, lowering.element(parameter, channel, op))
    return result


READS_ONE = frozenset(["nll_loss", "nll_loss_nd"])
"""Reductions to torch, which read one element of each row."""

GATHERS: dict[str, Rule] = {
    "embedding": _embedding, "index_select": _index_select, "gather": _gather, "index": _index,
    "nll_loss": _nll_loss, "nll_loss_nd": _nll_loss, "cross_entropy_loss": _cross_entropy,
}  # fmt: skip

GROUPED: dict[str, Rule] = {"group_norm": _group_norm}
