"""The last step of lowering: from values over many loops to a Program with few dims.

Loops whose turns were found to differ are written out, neighbouring loops that every address walks as one become one dim, the
reduced ones come last, and what no store needs is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fusion_advisor.ir.affine_index import Place
from fusion_advisor.ir.causal_mask import guard_masked_loads
from fusion_advisor.ir.dtypes import CannotLower
from fusion_advisor.ir.program import ADDRESSED, REDUCTIONS, Operand, Program, Store, Value, depends_on
from fusion_advisor.lowering.builder.loop_order import share_rows
from fusion_advisor.lowering.builder.lowered import Lowered, Result, written_by
from fusion_advisor.lowering.builder.unroll import Loops, one_run, refuse_moved_pixels, store_of_pixels, written_out

if TYPE_CHECKING:
    from fusion_advisor.lowering.builder.builder import Lowering

MOST_DIMS = 5
"""Dims that the loop nest of a kernel may have."""
_PARAMETER_NAMES = frozenset({"weight", "bias", "gamma", "beta", "scale", "inv_freq"})


def assemble(lowering: Lowering, results: Sequence[Result]) -> Lowered:
    """Turn the values of a lowering and the elements of its outputs into a Program.

    Raises:
        CannotLower: the loops do not become few dims with the reduced ones last, or a value would be computed many times over.
    """
    results, loops = written_out(lowering, list(results))
    order = sorted(_by_stride(lowering, loops, results), key=lambda dim: dim in loops.reduced)
    order = [dim for dim in order if loops.extents[dim] != 1 or dim in loops.reduced[-1:]] or [len(loops.extents) - 1]
    row = [dim for dim in order if dim in loops.reduced]
    if len(row) > 1:
        results = one_run(lowering, loops, row, results)
    stores = [_store(lowering, loops, result) for result in results]
    if len(row) > 1:
        plain, stores = stores, [store_of_pixels(lowering, loops, row, store) for store in stores]
        if plain != stores:
            refuse_moved_pixels(lowering, [number for store in stores for number in store.needs])
    live = [lowering.values[number] for number in _live(lowering.values, [n for store in stores for n in store.needs])]
    addresses = [value.strides for value in live if value.op in ADDRESSED] + [store.strides for store in stores]
    kept = {value.dim for value in live if value.op in ("index", "size")} - set(row)
    groups = _collapse(loops, order, addresses, kept)
    if len(groups) > MOST_DIMS:
        raise CannotLower("FA603", f"the loop nest {lowering.nest.shape} has {len(groups)} dims that do not collapse")
    if row and groups[-1] != row:
        raise CannotLower("FA603", "the reduced dims do not form one run of memory")
    return _finish(lowering, loops, groups, stores)


def _store(lowering: Lowering, loops: Loops, result: Result) -> Store:
    """Where an output's element goes; the operand is its op's index."""
    meta, varies = lowering.meta(result.index), {variable for place in result.where for variable, _ in place.terms}
    moved = {number for place in result.where for number, _ in place.gathered}
    varies |= {dim for number in moved for dim in depends_on(lowering.values, loops.extents)[number]}
    if any(size != 1 and loop not in varies and loop not in loops.reduced for loop, size in enumerate(loops.extents)):
        shape = lowering.nest.shape
        raise CannotLower("FA603", f"a value of shape {meta.shape} would be computed once for each of {shape}")
    address = Place()
    for stride, size, place in zip(meta.stride, meta.shape, result.where, strict=True):
        if size != 1:
            address = address.plus(place.scaled(stride))
    strides = dict(address.terms)
    return Store(
        operand=result.index, value=result.value, strides=tuple(strides.get(v, 0) for v in range(len(loops.extents))),
        offset=address.shift, args=tuple(number for number, _ in address.gathered),
        steps=tuple(step for _, step in address.gathered), guard=result.guard,
    )  # fmt: skip


def _by_stride(lowering: Lowering, loops: Loops, results: Sequence[Result]) -> list[int]:
    """Loops outermost first, in the memory order of the widest output."""
    widest = max(results, key=lambda result: math.prod(lowering.written_shape(result.index)))
    meta = lowering.meta(widest.index)
    strides: dict[int, int] = {}
    for stride, place in zip(meta.stride, widest.where, strict=True):
        strides |= {variable: stride * step for variable, step in place.terms}
        for number, step in place.gathered:  # positions follow one another, mostly
            strides |= dict.fromkeys(depends_on(lowering.values, loops.extents)[number], stride * step)
    return sorted(range(len(loops.extents)), key=lambda dim: (-strides.get(dim, 0), dim))


def _collapse(loops: Loops, order: Sequence[int], addresses: Sequence[tuple[int, ...]], kept: set[int]) -> list[list[int]]:
    groups: list[list[int]] = []
    for dim in order:
        if groups:
            last = groups[-1][-1]
            joins = all(address[last] == address[dim] * loops.extents[dim] for address in addresses)
            if joins and (last in loops.reduced) == (dim in loops.reduced) and not {last, dim} & kept:
                groups[-1].append(dim)
                continue
        groups.append([dim])
    return groups


def _finish(lowering: Lowering, loops: Loops, groups: list[list[int]], stores: Sequence[Store]) -> Lowered:
    """Number the values, operands and dims that are left, and make the Program."""
    live = _live(lowering.values, [number for store in stores for number in store.needs])
    roots = [root for root in lowering.roots if any(lowering.values[n].operand == root for n in live)]
    outputs = list(dict.fromkeys(store.operand for store in stores))
    numbered = _Numbered(loops, groups, {root: number for number, root in enumerate(roots)}, live)
    values = [numbered.value(lowering.values[number]) for number in live]
    dims = tuple(math.prod(loops.extents[dim] for dim in group) for group in groups)
    program = Program(
        dims=dims,
        operands=tuple(_operands(lowering, roots, outputs, values, dims)),
        values=tuple(values),
        stores=tuple(numbered.store(store, len(roots) + outputs.index(store.operand)) for store in stores),
        is_reduced=bool(loops.reduced),
        is_exact=lowering.is_exact,
    )
    if dims[-1] == 1:
        program = _with_columns(program)
    return Lowered(
        program=share_rows(guard_masked_loads(program)),
        inputs=tuple(roots),
        outputs=tuple(outputs),
        written=written_by(lowering.ops, outputs),
    )


class _Numbered:
    """Values and stores with the numbers that values, operands and dims have in the Program."""

    def __init__(self, loops: Loops, groups: list[list[int]], inputs: Mapping[int, int], live: Sequence[int]) -> None:
        self._loops = loops
        self._groups = groups
        self._inputs = inputs
        self._dim_of = {dim: number for number, group in enumerate(groups) for dim in group}
        self._number_of = {number: position for position, number in enumerate(live)}

    def value(self, value: Value) -> Value:
        dim = -1
        if value.op in ("index", "size"):
            dim = self._dim_of[value.dim] if value.dim >= 0 else len(self._groups) - 1
        return replace(
            value,
            args=tuple(self._number_of[arg] for arg in value.args),
            operand=self._inputs[value.operand] if value.op == "load" else -1,
            strides=self._strides(value.strides) if value.op in ADDRESSED else (),
            guard=None if value.guard is None else self._number_of[value.guard],
            dim=dim,
        )

    def store(self, store: Store, operand: int) -> Store:
        return replace(
            store,
            operand=operand,
            value=self._number_of[store.value],
            strides=self._strides(store.strides),
            args=tuple(self._number_of[arg] for arg in store.args),
            guard=None if store.guard is None else self._number_of[store.guard],
        )

    def _strides(self, strides: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(strides[group[-1]] if self._loops.extents[group[-1]] != 1 else 0 for group in self._groups)


def _operands(
    lowering: Lowering, roots: Sequence[int], outputs: Sequence[int], values: Sequence[Value], dims: tuple[int, ...]
) -> Iterator[Operand]:
    names = _operand_names(lowering, roots, len(outputs))
    for number, (name, root) in enumerate(zip(names, roots, strict=False)):
        count = _touched(lowering, root, number, values, dims)
        yield Operand(name=name, dtype=lowering.meta(root).dtype, element_count=count)
    for name, index in zip(names[len(roots) :], outputs, strict=True):
        count = math.prod(lowering.written_shape(index))
        yield Operand(name=name, dtype=lowering.meta(index).dtype, is_output=True, element_count=count)


def _operand_names(lowering: Lowering, roots: Sequence[int], outputs: int) -> list[str]:
    """Parameters keep their own last name (``weight``), all else is x, x2, …: no other text of a model enters a kernel."""
    names: list[str] = []
    for root in roots:
        op = lowering.op(root)
        last = op.target.rpartition(".")[2]
        name = last if op.role in ("parameter", "buffer") and last in _PARAMETER_NAMES else "x"
        taken = sum(1 for other in names if other.rstrip("0123456789") == name)
        names.append(f"{name}{taken + 1}" if taken else name)
    return names + (["out"] if outputs == 1 else [f"out{number + 1}" for number in range(outputs)])


def _live(values: Sequence[Value], results: Sequence[int]) -> list[int]:
    """The values that results need, each after those that it needs itself."""
    wanted: set[int] = set()
    stack = list(results)
    while stack:
        number = stack.pop()
        if number in wanted:
            continue
        wanted.add(number)
        value = values[number]
        stack += [*value.args, *(() if value.guard is None else (value.guard,))]
    return sorted(wanted)


def _touched(lowering: Lowering, root: int, operand: int, values: Sequence[Value], dims: tuple[int, ...]) -> int:
    """Distinct elements read of an operand: unguarded loads at different offsets add up, guarded ones cover no more than one."""
    counts = {True: {(): 0}, False: {(): 0}}
    for value, walked in zip(values, depends_on(values, dims), strict=True):
        if value.op == "load" and value.operand == operand:
            is_plain = value.guard is None or bool(value.args)  # ids that are in range, as all should be
            place = (value.strides, value.offset, value.args, value.steps)
            counts[is_plain][place] = math.prod(dims[dim] for dim in walked)  # type: ignore[index]
    owned = math.prod(lowering.meta(root).shape)
    return max(min(sum(counts[True].values()), owned), *counts[False].values())


def _with_columns(program: Program) -> Program:
    """Let one column be walked like many: its stride may be any number, and 1 says that there are columns."""
    values: list[Value] = []
    has_col: list[bool] = []
    seeds = {arg for value in program.values if value.op == "dropout" for arg in value.args}  # one number, however many columns
    for number, value in enumerate(program.values):
        if number in seeds:
            values.append(value)
            has_col.append(False)
            continue
        needs = (*value.args, *(() if value.guard is None else (value.guard,)))
        is_index = value.op == "index" and value.dim == len(program.dims) - 1
        has_col.append(value.op in ADDRESSED or is_index or (value.op not in REDUCTIONS and any(has_col[n] for n in needs)))
        values.append(replace(value, strides=(*value.strides[:-1], 1)) if value.op in ADDRESSED else value)
    stores = tuple(
        replace(store, strides=(*store.strides[:-1], 1))
        if any(has_col[number] for number in store.needs) or not program.is_reduced
        else store
        for store in program.stores
    )
    return replace(program, values=tuple(values), stores=stores)
