"""Views inside a chain: each only rewrites the index at which the viewed value is asked for."""

from __future__ import annotations

from collections.abc import Callable

from fusion_advisor.library.rule import CannotLower, Index, argument_of
from fusion_advisor.records import OpNode, TensorMeta


def _checked_reshape(op: OpNode, before: TensorMeta, where: Index) -> Index:
    after = op.outputs[0].shape
    if [size for size in before.shape if size != 1] != [size for size in after if size != 1]:
        raise CannotLower("FA603", f"a reshape from {before.shape} to {after} inside the chain cannot be folded into an address")
    kept = iter(position for position, size in zip(where, after, strict=True) if size != 1)
    return tuple((None, 0) if size == 1 else next(kept) for size in before.shape)


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
    moved: list[tuple[int | None, int]] = [(None, 0)] * len(where)
    for position, dim in enumerate(dims):
        assert isinstance(dim, int)
        moved[dim % len(before.shape)] = where[position]
    return tuple(moved)


def _unsqueeze_rule(op: OpNode, before: TensorMeta, where: Index) -> Index:
    dim = int(op.args[1]) % (len(before.shape) + 1)  # type: ignore[arg-type]
    return where[:dim] + where[dim + 1 :]


def _expand_rule(_op: OpNode, before: TensorMeta, where: Index) -> Index:
    aligned = where[len(where) - len(before.shape) :]
    return tuple((None, 0) if size == 1 else position for size, position in zip(before.shape, aligned, strict=True))


def _slice_rule(op: OpNode, before: TensorMeta, where: Index) -> Index:
    arguments = [*op.args[1:], *(None,) * 4]
    dim = int(arguments[0] or 0) % len(before.shape)  # type: ignore[arg-type]
    start = int(arguments[1] or 0)  # type: ignore[arg-type]
    if int(arguments[3] or 1) != 1:  # type: ignore[arg-type]
        raise CannotLower("FA603", "a strided slice inside the chain cannot be folded into an address")
    start = max(0, start + before.shape[dim]) if start < 0 else min(start, before.shape[dim])
    return shifted(where, dim, start)


def _narrow_rule(op: OpNode, before: TensorMeta, where: Index) -> Index:
    dim, start = op.args[1], op.args[2]
    if not isinstance(dim, int) or not isinstance(start, int):
        raise CannotLower("FA603", "a narrow that starts where a tensor says cannot be folded into an address")
    return shifted(where, dim % len(before.shape), start % max(before.shape[dim], 1))


def _select_rule(op: OpNode, before: TensorMeta, where: Index) -> Index:
    dim = int(op.args[1]) % len(before.shape)  # type: ignore[arg-type]
    return (*where[:dim], (None, int(op.args[2]) % before.shape[dim]), *where[dim:])  # type: ignore[arg-type]


def piece_rule(splitter: OpNode, before: TensorMeta, number: int, where: Index) -> Index:
    """Index into what ``splitter`` (a split, a chunk, an unbind) took apart, for an index into piece ``number``.

    Raises:
        CannotLower: the op that has several outputs is no split.
    """
    name = splitter.target.removeprefix("aten.").split(".")[0]
    if name == "unbind":
        dim = int(argument_of(splitter, 1, "dim", 0)) % len(before.shape)  # type: ignore[arg-type]
        return (*where[:dim], (None, number), *where[dim:])
    if name not in ("split", "split_with_sizes", "chunk", "unsafe_split", "unsafe_chunk", "tensor_split"):
        raise CannotLower("FA601", f"{splitter.target} has {len(splitter.outputs)} outputs")
    dim = int(argument_of(splitter, 2, "dim", 0)) % len(before.shape)  # type: ignore[arg-type]
    return shifted(where, dim, sum(piece.shape[dim] for piece in splitter.outputs[:number]))


def shifted(where: Index, dim: int, start: int) -> Index:
    """Return the index moved by ``start`` along ``dim``."""
    variable, shift = where[dim]
    return (*where[:dim], (variable, shift + start), *where[dim + 1 :])


def _same_rule(op: OpNode, _before: TensorMeta, where: Index) -> Index:
    if op.target.startswith("aten.dropout") and len(op.args) > 2 and op.args[2]:
        raise CannotLower(
            "FA601",
            "live dropout draws from torch's own generator, which no kernel of ours reproduces; the library's dropout kernels "
            "take a seed (fusion_advisor.library.philox.seeded_dropout)",
        )
    return where


VIEWS: dict[str, Callable[[OpNode, TensorMeta, Index], Index]] = {
    "view": _checked_reshape, "reshape": _checked_reshape, "_unsafe_view": _checked_reshape, "flatten": _checked_reshape,
    "squeeze": _checked_reshape, "unflatten": _checked_reshape, "transpose": _transpose_rule, "permute": _permute_rule,
    "unsqueeze": _unsqueeze_rule, "expand": _expand_rule, "expand_as": _expand_rule, "slice": _slice_rule,
    "view_as": _checked_reshape, "_reshape_alias": _checked_reshape, "swapaxes": _transpose_rule, "mT": _matrix_transpose_rule,
    "t": _matrix_transpose_rule, "narrow": _narrow_rule, "select": _select_rule,
    **dict.fromkeys(("alias", "detach", "contiguous", "clone", "dropout", "to", "_to_copy", "type_as", "lift_fresh"), _same_rule),
}  # fmt: skip
