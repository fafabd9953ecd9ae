"""Writes out the loops whose iterations were found to differ, and lets the reduced loops of a row be walked as one."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fusion_advisor.ir.affine_index import Place
from fusion_advisor.ir.dtypes import CannotLower
from fusion_advisor.ir.program import ADDRESSED, REDUCTIONS, Store, Value
from fusion_advisor.lowering.builder.lowered import Result

if TYPE_CHECKING:
    from fusion_advisor.lowering.builder.builder import Lowering

_COMBINED = {"reduce_sum": "add", "reduce_max": "maximum", "reduce_min": "minimum"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Loops:
    """The loops that are left: sizes (1 for the ones written out), and which are reduced."""

    extents: tuple[int, ...]
    reduced: tuple[int, ...]


def written_out(lowering: Lowering, results: list[Result]) -> tuple[list[Result], Loops]:
    """Write out the loops that a lowering asked for; return the elements of the outputs, and the loops that are left."""
    extents, reduced = list(lowering.nest.extents), set(lowering.reduced)
    for variable in lowering.unrolled:
        if reduced and not reduced - {variable}:
            continue  # a row must keep a loop
        results = _write_out(lowering, results, variable, extents[variable], is_reduced=variable in reduced)
        reduced.discard(variable)
        extents[variable] = 1
    return results, Loops(extents=tuple(extents), reduced=tuple(sorted(reduced)))


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


def one_run(lowering: Lowering, loops: Loops, row: list[int], results: Sequence[Result]) -> list[Result]:
    """Let what does not run along with a row be read at a quotient of the row's index: a channel's weight at ``col // (H * W)``.

    So is a group of an image in channels last, and written: its row is many short runs, one for each pixel. Other tensors as
    large as the nest are left alone.

    Raises:
        CannotLower: what is read by its index does not run along.
    """
    if any(value.op == "index" and value.dim in row for value in lowering.values):
        raise CannotLower("FA603", "one index does not give the place inside several reduced dims")
    found: dict[int, int] = {}
    for number, value in enumerate(tuple(lowering.values)):
        if value.op == "index":
            found[number] = number
            continue
        args = tuple(found[arg] for arg in value.args)
        guard = None if value.guard is None else found[value.guard]
        moved = replace(value, args=args, guard=guard)
        runs = _runs(loops, row, value.strides) if value.op == "load" else []
        is_smaller = any(value.strides[run[-1]] == 0 for run in runs)
        if len(runs) > 1 and (is_smaller or _is_pixels(lowering, runs, value.strides)):
            moved = _at_quotients(lowering, loops, row, moved, runs)
        found[number] = number if moved == value else lowering.emit(moved)
    return [result.renumbered(found) for result in results]


def _is_pixels(lowering: Lowering, runs: list[list[int]], strides: tuple[int, ...]) -> bool:
    """Whether a row is one group's channels of each pixel of an image in channels last."""
    return lowering.has_groups and len(runs) == 2 and strides[runs[1][-1]] == 1


def store_of_pixels(lowering: Lowering, loops: Loops, row: list[int], store: Store) -> Store:
    """Return a store that follows a row over the pixels of an image in channels last; any other store as it is.

    Args:
        lowering: gets the values that the address is made of.
        loops: of the nest.
        row: the reduced loops, outermost first.
        store: with one stride for each loop.
    """
    runs = _runs(loops, row, store.strides)
    if not _is_pixels(lowering, runs, store.strides):
        return store
    value = Value(op="load", args=store.args, strides=store.strides, steps=store.steps)
    moved = _at_quotients(lowering, loops, row, value, runs)
    return replace(store, args=moved.args, steps=moved.steps, strides=moved.strides)


def refuse_moved_pixels(lowering: Lowering, needed: Sequence[int]) -> None:
    """Refuse a norm over groups of channels last that reads other pixels than it writes, or reads some under a guard.

    Its kernel reads an image in whole lines (``codegen.split.channel_groups``). It has none for a cat or a resampled image, which
    are better a kernel of their own than read in pieces of a few bytes.

    Args:
        lowering: holds the values.
        needed: numbers of the values that are stored.

    Raises:
        CannotLower: it does.
    """
    refusal = CannotLower("FA603", "a norm over groups of channels reads each pixel of an image in channels last where it lies")
    if lowering.unrolled:
        raise refusal
    values, waiting, seen = lowering.values, list(needed), set[int]()
    while waiting:
        number = waiting.pop()
        if number in seen:
            continue
        seen.add(number)
        value = values[number]
        waiting += [*value.args, *(() if value.guard is None else (value.guard,))]
        is_moved = value.op == "remainder" and values[value.args[0]].op == "quotient"
        if is_moved or (value.op == "load" and value.guard is not None):
            raise refusal


def _runs(loops: Loops, row: list[int], strides: tuple[int, ...]) -> list[list[int]]:
    """The dims of a row in runs that an address walks as one, outermost first."""
    runs: list[list[int]] = [row[:1]]
    for dim in row[1:]:
        if strides[runs[-1][-1]] == strides[dim] * loops.extents[dim]:
            runs[-1].append(dim)
        else:
            runs.append([dim])
    return runs


def _at_quotients(lowering: Lowering, loops: Loops, row: list[int], value: Value, runs: list[list[int]]) -> Value:
    """Rewrite a load to address by quotient and remainder of the flattened row index instead of by the row's loop variables."""
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
