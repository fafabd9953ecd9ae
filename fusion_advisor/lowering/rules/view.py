"""Views inside a chain: each only rewrites the index at which the viewed value is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fusion_advisor.ir.affine_index import ORIGIN, Index, fixed, reshaped
from fusion_advisor.ir.dtypes import CannotLower, argument_of
from fusion_advisor.records import OpNode, TensorMeta
from fusion_advisor.records.op_facts import overload_free


def _transpose_rule(op: OpNode, before: TensorMeta, where: Index) -> Index:
    rank = len(before.shape)
    first, second = (int(arg) % rank for arg in op.args[1:3])  # type: ignore[arg-type]
    moved = list(where)
    moved[first], moved[second] = moved[second], moved[first]
    return tuple(moved)


def _matrix_transpose_rule(_op: OpNode, before: TensorMeta, where: Index) -> Index:
    return where if len(before.shape) < 2 else (*where[:-2], where[-1], where[-2])


def _permute_rule(op: OpNode, before: TensorMeta, where: Index) -> Index:
    dims = op.args[1]
    assert isinstance(dims, tuple)
    moved = [ORIGIN] * len(where)
    for position, dim in enumerate(dims):
        assert isinstance(dim, int)
        moved[dim % len(before.shape)] = where[position]
    return tuple(moved)


def _unsqueeze_rule(op: OpNode, before: TensorMeta, where: Index) -> Index:
    dim = int(op.args[1]) % (len(before.shape) + 1)  # type: ignore[arg-type]
    return where[:dim] + where[dim + 1 :]


def _expand_rule(_op: OpNode, before: TensorMeta, where: Index) -> Index:
    aligned = where[len(where) - len(before.shape) :]
    return tuple(ORIGIN if size == 1 else place for size, place in zip(before.shape, aligned, strict=True))


def _slice_rule(op: OpNode, before: TensorMeta, where: Index) -> Index:
    arguments = [*op.args[1:], *(None,) * 4]
    dim = int(arguments[0] or 0) % len(before.shape)  # type: ignore[arg-type]
    start, step = arguments[1] or 0, int(arguments[3] or 1)  # type: ignore[arg-type]
    if not isinstance(start, int):
        raise CannotLower("FA603", "a slice that starts where a tensor says cannot be folded into an address")
    start = max(0, start + before.shape[dim]) if start < 0 else min(start, before.shape[dim])
    return (*where[:dim], where[dim].scaled(step).moved(start), *where[dim + 1 :])


def _narrow_rule(op: OpNode, before: TensorMeta, where: Index) -> Index:
    dim, start = op.args[1], op.args[2]
    if not isinstance(dim, int) or not isinstance(start, int):
        raise CannotLower("FA603", "a narrow that starts where a tensor says cannot be folded into an address")
    return shifted(where, dim % len(before.shape), start % max(before.shape[dim], 1))


def _select_rule(op: OpNode, before: TensorMeta, where: Index) -> Index:
    dim = int(op.args[1]) % len(before.shape)  # type: ignore[arg-type]
    place = op.args[2]
    if not isinstance(place, int):
        raise CannotLower("FA603", "an element that a tensor selects cannot be folded into an address")
    return (*where[:dim], fixed(place % before.shape[dim]), *where[dim:])


def piece_rule(splitter: OpNode, before: TensorMeta, number: int, where: Index) -> Index:
    """Index into the operand of ``splitter`` (a split, a chunk, an unbind), for an index into piece ``number``.

    Raises:
        CannotLower: the op that has several outputs is no split.
    """
    name = overload_free(splitter.target)
    if name == "unbind":
        dim = int(argument_of(splitter, 1, "dim", 0)) % len(before.shape)  # type: ignore[arg-type]
        return (*where[:dim], fixed(number), *where[dim:])
    if name not in ("split", "split_with_sizes", "chunk", "unsafe_split", "unsafe_chunk", "tensor_split"):
        raise CannotLower("FA601", f"{splitter.target} has {len(splitter.outputs)} outputs")
    dim = int(argument_of(splitter, 2, "dim", 0)) % len(before.shape)  # type: ignore[arg-type]
    return shifted(where, dim, sum(piece.shape[dim] for piece in splitter.outputs[:number]))


def repeat_rule(op: OpNode, before: TensorMeta, where: Index, extents: Sequence[int]) -> Index:
    """Index into what ``repeat_interleave`` repeats: its result is a dim more, flattened.

    Raises:
        CannotLower: the counts are a tensor, or the value is flattened first.
        CutLoop: a loop runs over elements and their copies and must be cut between them.
    """
    count, dim = argument_of(op, 1, "repeats", None), argument_of(op, 2, "dim", None)
    if not isinstance(count, int) or not isinstance(dim, int):
        raise CannotLower("FA601", f"{op.target} has no lowering without a number of copies and a dim")
    dim %= len(before.shape)
    split_shape = (*before.shape[: dim + 1], count, *before.shape[dim + 1 :])
    found = reshaped(where, op.outputs[0].shape, split_shape, extents)
    return (*found[: dim + 1], *found[dim + 2 :])


def shifted(where: Index, dim: int, start: int) -> Index:
    """Return the index moved by ``start`` along ``dim``."""
    return (*where[:dim], where[dim].moved(start), *where[dim + 1 :])


def _same_rule(op: OpNode, _before: TensorMeta, where: Index) -> Index:
    if op.target.startswith("aten.dropout") and len(op.args) > 2 and op.args[2]:
        raise CannotLower(
            "FA601",
            "live dropout draws from torch's own generator, which no kernel of ours reproduces; the library's dropout kernels "
            "take a seed (fusion_advisor.library.philox_dropout.seeded_dropout)",
        )
    return where


VIEWS: dict[str, Callable[[OpNode, TensorMeta, Index], Index]] = {
    "transpose": _transpose_rule, "permute": _permute_rule, "unsqueeze": _unsqueeze_rule, "expand": _expand_rule,
    "expand_as": _expand_rule, "slice": _slice_rule, "swapaxes": _transpose_rule, "mT": _matrix_transpose_rule,
    "t": _matrix_transpose_rule, "narrow": _narrow_rule, "select": _select_rule,
    **dict.fromkeys(("alias", "detach", "contiguous", "clone", "dropout", "to", "_to_copy", "type_as", "lift_fresh"), _same_rule),
}  # fmt: skip

RESHAPES = frozenset(["view", "reshape", "_unsafe_view", "flatten", "squeeze", "unflatten", "view_as", "_reshape_alias"])
"""Views that keep the order of elements and change the shape; ``index.reshaped`` serves them all."""
