"""The last step of lowering: from values over many loops to a Program with few dims.

Loops whose turns were found to differ are written out, neighbouring loops that every address walks as one become one dim, the
reduced ones come last, and what no store needs is dropped.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fusion_advisor.ir.affine_index import Index, Place
from fusion_advisor.ir.causal_mask import guard_masked_loads
from fusion_advisor.ir.dtypes import CannotLower
from fusion_advisor.ir.operand_names import unique, with_names
from fusion_advisor.ir.program import ADDRESSED, REDUCTIONS, Operand, Part, Program, Store, Value, depends_on, with_dims
from fusion_advisor.lowering.builder.loop_order import share_rows

if TYPE_CHECKING:
    from fusion_advisor.lowering.builder.builder import Lowering
    from fusion_advisor.records import OpNode

_MOST_DIMS = 5
_PARAMETER_NAMES = frozenset({"weight", "bias", "gamma", "beta", "scale", "inv_freq"})
_COMBINED = {"reduce_sum": "add", "reduce_max": "maximum", "reduce_min": "minimum"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """A chain as a Program, and which captured values its operands are."""

    program: Program
    inputs: tuple[int, ...]
    """Op index of each input operand: always the owner of its storage, so that views before the chain cost nothing."""
    outputs: tuple[int, ...]
    """Op index of each output operand."""
    written: tuple[int, ...] = ()
    """Op index of the owner of the memory that each output of an in-place op is written into, in the order of ``outputs``."""

    @property
    def given(self) -> tuple[int, ...]:
        """Op indices of all tensors that a call needs: the inputs, then what it writes into."""
        return (*self.inputs, *self.written)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One element of an output: op index, where it lies, and the number of its value."""

    index: int
    where: Index
    value: int
    guard: int | None = None
    """Number of the value that says whether it is written."""

    @property
    def needs(self) -> tuple[int, ...]:
        """Numbers of all values that it is made of."""
        moved = (number for place in self.where for number, _ in place.gathered)
        return (self.value, *moved, *(() if self.guard is None else (self.guard,)))

    def renumbered(self, new: Sequence[int] | Mapping[int, int]) -> Result:
        """The same with other numbers for its values, by the old ones."""
        places = (replace(place, gathered=tuple((new[number], step) for number, step in place.gathered)) for place in self.where)
        guard = None if self.guard is None else new[self.guard]
        return replace(self, where=tuple(places), value=new[self.value], guard=guard)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loops:
    """The loops that are left: sizes (1 for the ones written out), and which are reduced."""

    extents: tuple[int, ...]
    reduced: tuple[int, ...]


def assemble(lowering: Lowering, results: Sequence[Result]) -> Lowered:
    """Turn the values of a lowering and the elements of its outputs into a Program.

    Raises:
        CannotLower: the loops do not become few dims with the reduced ones last, or a value would be computed many times over.
    """
    results, loops = _written_out(lowering, list(results))
    order = [dim for dim in _by_stride(lowering, loops, results) if dim not in loops.reduced] + list(loops.reduced)
    order = [dim for dim in order if loops.extents[dim] != 1 or dim in loops.reduced[-1:]] or [len(loops.extents) - 1]
    row = [dim for dim in loops.reduced if dim in order]
    if len(row) > 1:
        results = _one_run(lowering, loops, row, results)
    stores = [_store(lowering, loops, result) for result in results]
    live = [lowering.values[number] for number in _live(lowering.values, [n for store in stores for n in store.needs])]
    addresses = [value.strides for value in live if value.op in ADDRESSED] + [store.strides for store in stores]
    kept = {value.dim for value in live if value.op in ("index", "size")} - set(row)
    groups = _collapse(loops, order, addresses, kept)
    if len(groups) > _MOST_DIMS:
        raise CannotLower("FA603", f"the loop nest {lowering.nest.shape} has {len(groups)} dims that do not collapse")
    if row and groups[-1] != row:
        raise CannotLower("FA603", "the reduced dims do not form one run of memory")
    return _finish(lowering, loops, groups, stores)


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
        beside=tuple(nests[1:]),
    )
    program = with_names(program, names)
    return Lowered(program=program, inputs=tuple(roots), outputs=tuple(outputs), written=written_by(ops, outputs))


def written_by(ops: Mapping[int, OpNode] | Sequence[OpNode], outputs: Sequence[int]) -> tuple[int, ...]:
    """Return the owners of the memory that those of some outputs are written into which are results of in-place ops."""

    def owner_of(index: int) -> int:
        owner = ops[index].alias_of
        return index if owner is None else owner_of(owner)

    return tuple(owner_of(index) for index in outputs if ops[index].mutates)


# -- loops that are written out ----------------------------------------------------------------------------------------------


def _written_out(lowering: Lowering, results: list[Result]) -> tuple[list[Result], _Loops]:
    extents, reduced = list(lowering.nest.extents), set(lowering.reduced)
    for variable in lowering.unrolled:
        if reduced and not reduced - {variable}:
            continue  # a row must keep a loop
        results = _write_out(lowering, results, variable, extents[variable], is_reduced=variable in reduced)
        reduced.discard(variable)
        extents[variable] = 1
    return results, _Loops(extents=tuple(extents), reduced=tuple(sorted(reduced)))


def _write_out(lowering: Lowering, results: list[Result], variable: int, count: int, *, is_reduced: bool) -> list[Result]:
    """Repeat every value that differs between the turns of a loop; what is reduced over the loop is combined."""
    turns: list[tuple[int, ...]] = []
    for number, value in enumerate(tuple(lowering.values)):
        used = (*value.args, *(() if value.guard is None else (value.guard,)))
        if is_reduced and value.op in REDUCTIONS:
            parts = turns[value.args[0]]
            whole = parts if len(parts) == count else parts * count
            combined = functools.reduce(functools.partial(lowering.make, _COMBINED[value.op]), whole)
            turns.append((lowering.emit(replace(value, args=(combined,))),))
        elif is_reduced and value.op == "size" and value.dim < 0:
            turns.append((lowering.make("mul", number, lowering.const(count, value.dtype)),))
        elif all(len(turns[arg]) == 1 for arg in used) and not _moves(value, variable):
            turns.append((_repeat(lowering, value, number, variable, 0, turns),))
        else:
            turns.append(tuple(_repeat(lowering, value, number, variable, turn, turns) for turn in range(count)))
    found = []
    for result in results:
        is_moved = any(variable == other for place in result.where for other, _ in place.terms)
        if is_moved or any(len(turns[n]) > 1 for n in result.needs[1:]):
            for turn in range(count):
                where = tuple(_fixed(place, variable, turn) for place in result.where)
                found.append(replace(result, where=where).renumbered([values[turn % len(values)] for values in turns]))
        elif len(turns[result.value]) == 1:
            found.append(result.renumbered([values[0] for values in turns]))
        else:
            raise CannotLower("FA603", "a value would be computed once for each turn of a loop that does not move it")
    return found


def _moves(value: Value, variable: int) -> bool:
    if value.op in ADDRESSED:
        return value.strides[variable] != 0
    return value.op == "index" and value.dim == variable


def _repeat(lowering: Lowering, value: Value, number: int, variable: int, turn: int, turns: Sequence[tuple[int, ...]]) -> int:
    args = tuple(turns[arg][turn % len(turns[arg])] for arg in value.args)
    guard = None if value.guard is None else turns[value.guard][turn % len(turns[value.guard])]
    if value.op == "index":
        return lowering.const(turn, "int64") if value.dim == variable else number
    if value.op in ADDRESSED:
        holds = None if guard is None else lowering.constant_of(guard)
        if holds is False:
            return lowering.const(0, value.dtype)
        strides = tuple(0 if dim == variable else stride for dim, stride in enumerate(value.strides))
        offset = value.offset + turn * value.strides[variable]
        return lowering.emit(replace(value, args=args, strides=strides, offset=offset, guard=None if holds else guard))
    if value.op == "inside":
        holds = None if guard is None else lowering.constant_of(guard)
        if holds is False:
            return lowering.const(False, "bool")
        return lowering.emit(replace(value, args=args, guard=None if holds else guard))
    if args == value.args:
        return number
    if value.op in REDUCTIONS:
        return lowering.emit(replace(value, args=args))
    return lowering.make(value.op, *args, dtype=value.dtype)


def _fixed(place: Place, variable: int, turn: int) -> Place:
    step = dict(place.terms).get(variable, 0)
    return Place(tuple(term for term in place.terms if term[0] != variable), place.shift + step * turn, place.gathered)


# -- reduced loops that become one ------------------------------------------------------------------------------------------


def _one_run(lowering: Lowering, loops: _Loops, row: list[int], results: Sequence[Result]) -> list[Result]:
    """Let what does not run along with a row be read at a quotient of the row's index: a channel's weight at ``col // (H * W)``.

    Raises:
        CannotLower: what is written, or read by its index, does not run along.
    """
    if any(value.op == "index" and value.dim in row for value in lowering.values):
        raise CannotLower("FA603", "the place inside several reduced dims cannot be told from one index")
    found: dict[int, int] = {}
    for number, value in enumerate(tuple(lowering.values)):
        if value.op == "index":
            found[number] = number
            continue
        args = tuple(found[arg] for arg in value.args)
        guard = None if value.guard is None else found[value.guard]
        moved = replace(value, args=args, guard=guard)
        runs = _runs(loops, row, value.strides) if value.op == "load" else []
        if any(value.strides[run[-1]] == 0 for run in runs) and len(runs) > 1:  # else it is as large as the row
            moved = _at_quotients(lowering, loops, row, moved, runs)
        found[number] = number if moved == value else lowering.emit(moved)
    return [result.renumbered(found) for result in results]


def _runs(loops: _Loops, row: list[int], strides: tuple[int, ...]) -> list[list[int]]:
    """The dims of a row in runs that an address walks as one, outermost first."""
    runs: list[list[int]] = [row[:1]]
    for dim in row[1:]:
        if strides[runs[-1][-1]] == strides[dim] * loops.extents[dim]:
            runs[-1].append(dim)
        else:
            runs.append([dim])
    return runs


def _at_quotients(lowering: Lowering, loops: _Loops, row: list[int], value: Value, runs: list[list[int]]) -> Value:
    """A load that is moved by the row's index taken apart, and by none of the row's loops."""
    args, steps = list(value.args), list(value.steps)
    for run in runs:
        if not (step := value.strides[run[-1]]):
            continue
        index = lowering.emit(Value(op="index", dim=row[-1], dtype="int64"))
        inner = math.prod(loops.extents[dim] for dim in row[row.index(run[-1]) + 1 :])
        if inner != 1:
            extent = lowering.emit(Value(op="extent", constant=inner, dtype="int64"))
            index = lowering.emit(Value(op="quotient", args=(index, extent), dtype="int64"))
        if run is not runs[0]:
            size = lowering.emit(Value(op="extent", constant=math.prod(loops.extents[dim] for dim in run), dtype="int64"))
            index = lowering.emit(Value(op="remainder", args=(index, size), dtype="int64"))
        args, steps = [*args, index], [*steps, step]
    strides = tuple(0 if dim in row else stride for dim, stride in enumerate(value.strides))
    return replace(value, args=tuple(args), steps=tuple(steps), strides=strides)


# -- loops to dims -----------------------------------------------------------------------------------------------------------


def _store(lowering: Lowering, loops: _Loops, result: Result) -> Store:
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


def _by_stride(lowering: Lowering, loops: _Loops, results: Sequence[Result]) -> list[int]:
    """Loops outermost first, in the memory order of the widest output."""
    widest = max(results, key=lambda result: math.prod(lowering.written_shape(result.index)))
    meta = lowering.meta(widest.index)
    strides: dict[int, int] = {}
    for stride, place in zip(meta.stride, widest.where, strict=True):
        strides |= {variable: stride * step for variable, step in place.terms}
        for number, step in place.gathered:  # positions follow one another, mostly
            strides |= dict.fromkeys(depends_on(lowering.values, loops.extents)[number], stride * step)
    return sorted(range(len(loops.extents)), key=lambda dim: (-strides.get(dim, 0), dim))


def _collapse(loops: _Loops, order: Sequence[int], addresses: Sequence[tuple[int, ...]], kept: set[int]) -> list[list[int]]:
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


def _finish(
    lowering: Lowering,
    loops: _Loops,
    groups: list[list[int]],
    stores: Sequence[Store],
) -> Lowered:
    live = _live(lowering.values, [number for store in stores for number in store.needs])
    position = {dim: number for number, group in enumerate(groups) for dim in group}
    roots = [root for root in lowering.roots if any(lowering.values[n].operand == root for n in live)]
    inputs = {root: number for number, root in enumerate(roots)}

    def collapse(strides: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(strides[group[-1]] if loops.extents[group[-1]] != 1 else 0 for group in groups)

    renumber: dict[int, int] = {}
    values: list[Value] = []
    for number in live:
        value = lowering.values[number]
        renumber[number] = len(values)
        values.append(
            replace(
                value,
                args=tuple(renumber[arg] for arg in value.args),
                operand=inputs[value.operand] if value.op == "load" else -1,
                strides=collapse(value.strides) if value.op in ADDRESSED else (),
                guard=None if value.guard is None else renumber[value.guard],
                dim=-1 if value.op not in ("index", "size") else position[value.dim] if value.dim >= 0 else len(groups) - 1,
            )
        )
    dims = tuple(math.prod(loops.extents[dim] for dim in group) for group in groups)
    outputs = list(dict.fromkeys(store.operand for store in stores))
    names = _operand_names(lowering, roots, len(outputs))
    operands = [
        Operand(name=name, dtype=lowering.meta(root).dtype, element_count=_touched(lowering, root, inputs[root], values, dims))
        for name, root in zip(names, roots, strict=False)
    ]
    for name, index in zip(names[len(roots) :], outputs, strict=True):
        count = math.prod(lowering.written_shape(index))
        operands.append(Operand(name=name, dtype=lowering.meta(index).dtype, is_output=True, element_count=count))
    written = [
        replace(
            store, operand=len(roots) + outputs.index(store.operand), value=renumber[store.value],
            strides=collapse(store.strides), args=tuple(renumber[arg] for arg in store.args),
            guard=None if store.guard is None else renumber[store.guard],
        )
        for store in stores
    ]  # fmt: skip
    program = Program(
        dims=dims,
        operands=tuple(operands),
        values=tuple(values),
        stores=tuple(written),
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
