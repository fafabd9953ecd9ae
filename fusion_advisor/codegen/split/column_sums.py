"""Reductions over the rows of memory as two launches, with the ops before them inside: a bias's gradient and what it sums.

A Program's columns are its last dim, and those of a bias's gradient are as far apart as rows of memory are. One program for each
row of the Program would read 2 bytes of every cache line, and a layer of 768 features has too few of them for a GPU:

1. ``partial``: neighbouring threads take neighbouring elements of memory, each thread one of them in up to 16 rows,
   which it combines. What the chain writes for each element (a layer's gradient) is written here. It gives one number for each
   block of rows and each column.
2. the kernel itself: combines these numbers, column by column, and does what follows from the result (a cast).

Taken: a Program whose reductions need no other reduction and feed no element, and whose elements lie side by side along a dim
that stays. Given: the two launches, and one scratch tensor for each reduction. Which number is added to which depends on sizes
alone and nothing is added atomically, so the results are equal from run to run, bit by bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fusion_advisor.codegen.split.parts import Copier, Part, Parts, Scratch
from fusion_advisor.ir.program import ADDRESSED, HALF, REDUCTIONS, TINY_ELEMENTS, Program, Store, Value, result_dtypes
from fusion_advisor.records import Tuning

_MOST_ROWS = 16
"""Of one thread."""
_MOST_LOADS = 32
"""Elements that a thread has under way for each column: rows times tensors."""
_COMBINED = {"reduce_sum": "add", "reduce_max": "maximum", "reduce_min": "minimum"}
_IDENTITY = {"reduce_sum": 0.0, "reduce_max": -math.inf, "reduce_min": math.inf}
_OF_INTEGERS = {"reduce_sum": 0, "reduce_max": -(2**63), "reduce_min": 2**63 - 1}
_PARTIAL = Tuning(block_cols=256, block_rows=1, num_warps=4)
"""Two elements a thread, each of up to 16 rows."""
_WHOLE = Tuning(block_rows=8, num_warps=8)
"""8 columns of float32 are the 32 bytes that memory is read in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Columns:
    """A Program that this module cuts.

    Attributes:
        program: the Program.
        rows: rows of memory that one thread of the first launch takes.
        reductions: numbers of the reductions that are stored, or that stored values are made of.
        of_elements: positions of the stores of elements.
    """

    program: Program
    rows: int
    reductions: tuple[int, ...]
    of_elements: tuple[int, ...]

    @property
    def blocks(self) -> int:
        return -(-self.program.dims[-1] // self.rows)

    @property
    def strides(self) -> tuple[int, ...]:
        """Of a scratch tensor: block, then columns."""
        found = [1]
        for size in reversed(self.program.dims[:-1]):
            found.append(found[-1] * size)
        return tuple(reversed(found))


def split_columns(program: Program) -> Parts | None:
    """Cut reductions over the rows of memory into two launches.

    Args:
        program: any.

    Returns:
        None where the Program is none, or so small that a launch costs more than it gains.
    """
    found = _find(program)
    if found is None:
        return None
    elements = found.blocks * math.prod(program.dims[:-1])
    rounded = _rounded_to(program)
    dtypes = [program.values[number].dtype for number in found.reductions]
    scratch = tuple(Scratch(dtype=dtype, elements=elements, rounded_to=rounded) for dtype in dtypes)
    return Parts(parts=(_partial_part(found, scratch), _whole_part(found, scratch)), scratch=scratch)


def _rounded_to(program: Program) -> str:
    """The finer of the 16-bit dtypes that all results are rounded to: then the first launch needs no digits beyond those."""
    dtypes = result_dtypes(program)
    return max(dtypes) if dtypes and dtypes <= HALF else ""  # "float16" comes after "bfloat16"


def _find(program: Program) -> _Columns | None:
    if not program.is_reduced or program.siblings or program.is_exact or len(program.dims) < 2:
        return None
    if math.prod(program.dims) <= TINY_ELEMENTS or program.dims[-1] < 2 * _MOST_ROWS or not _lies_along_rows(program):
        return None
    after = _known_after(program)
    of_elements = tuple(n for n, store in enumerate(program.stores) if store.strides[-1])
    reductions = tuple(n for n, value in enumerate(program.values) if value.op in REDUCTIONS)
    varies, last = program.depends_on(), len(program.dims) - 1
    is_one_level = all(after.isdisjoint(program.values[number].args) for number in reductions)
    is_left_alone = all(last not in varies[number] for number in after)
    are_early = all(after.isdisjoint(program.stores[n].needs) for n in of_elements)
    others = [store for n, store in enumerate(program.stores) if n not in of_elements]
    are_late = all(last not in varies[number] for store in others for number in store.needs)
    if not (reductions and is_one_level and is_left_alone and are_early and are_late):
        return None
    return _Columns(program=program, rows=_rows_of_thread(program), reductions=reductions, of_elements=of_elements)


def _lies_along_rows(program: Program) -> bool:
    """Whether every access of an element is plain, and neighbours in a dim that stays lie side by side."""
    last, side_by_side = len(program.dims) - 1, 0
    for value in program.values:
        if value.op in ("index", "quotient", "remainder", "inside", "extent") and (value.op != "index" or value.dim == last):
            return False
        if value.op == "load" and value.args:
            return False
    places = [v.strides for v in program.values if v.op == "load"] + [store.strides for store in program.stores]
    for strides in places:
        if strides[-1] and any(strides[:-1]):
            if 1 not in strides[:-1]:
                return False
            side_by_side += 1
    return side_by_side > 0 and not any(store.args or store.guard is not None for store in program.stores)


def _known_after(program: Program) -> set[int]:
    """The reductions, and all that is made of them."""
    found = set[int]()
    for number, value in enumerate(program.values):
        if value.op in REDUCTIONS or not found.isdisjoint(value.args):
            found.add(number)
    return found


def _rows_of_thread(program: Program) -> int:
    """As many rows as registers allow, and of these numbers one that divides all rows, if half as many do."""
    loads = sum(value.op == "load" and bool(value.strides[-1]) and any(value.strides[:-1]) for value in program.values)
    most = max(2, min(_MOST_ROWS, _MOST_LOADS // max(loads, 1)))
    return next((rows for rows in range(most, most // 2, -1) if program.dims[-1] % rows == 0), most)


class _Turn:
    """One row of a block: where its elements lie."""

    def __init__(self, found: _Columns, turn: int) -> None:
        self._found = found
        self._turn = turn

    def moved(self, strides: tuple[int, ...], offset: int) -> tuple[tuple[int, ...], int]:
        """Strides over blocks and columns, and the offset of this row."""
        return (strides[-1] * self._found.rows, *strides[:-1]), offset + strides[-1] * self._turn

    def guard(self, copier: Copier) -> int | None:
        """Whether the row is there; None where it is in every block."""
        count = self._found.program.dims[-1]
        if count % self._found.rows == 0:
            return None
        block = copier.emit(Value(op="index", dim=0, dtype="int64"))
        rows = copier.emit(Value(op="const", constant=self._found.rows, dtype="int64"))
        first = copier.emit(Value(op="mul", args=(block, rows), dtype="int64"))
        turn = copier.emit(Value(op="const", constant=self._turn, dtype="int64"))
        row = copier.emit(Value(op="add", args=(first, turn), dtype="int64"))
        end = copier.emit(Value(op="const", constant=count, dtype="int64"))
        return copier.emit(Value(op="lt", args=(row, end), dtype="bool"))

    def leaf(self, copier: Copier, number: int) -> Value | int | None:
        """What stands for a value in this row."""
        value = self._found.program.values[number]
        if value.op == "size":
            return copier.emit(Value(op="const", constant=float(self._found.program.dims[value.dim]), dtype=value.dtype))
        if value.op == "index":
            return replace(value, dim=value.dim + 1)
        if value.op not in ADDRESSED:
            return None
        strides, offset = self.moved(value.strides, value.offset)
        guard = None if value.guard is None else copier.copy(value.guard)
        if value.op == "load" and value.strides[-1] and (here := self.guard(copier)) is not None:
            both = Value(op="and", args=(guard, here), dtype="bool") if guard is not None else None
            guard = here if both is None else copier.emit(both)
        args = tuple(copier.copy(arg) for arg in value.args)
        return replace(value, strides=strides, offset=offset, guard=guard, args=args)


def _partial_part(found: _Columns, scratch: Sequence[Scratch]) -> Part:
    """Pointwise over (block of rows, column)."""
    program = found.program
    dims, values = (found.blocks, *program.dims[:-1]), list[Value]()
    combined: dict[int, int] = {}
    stores: list[Store] = []
    for place in range(found.rows):
        turn = _Turn(found, place)
        copier = Copier(program, dims, turn.leaf)
        copier.values = values
        guard = turn.guard(copier)
        for number in found.reductions:
            value = program.values[number]
            element = copier.copy(value.args[0])
            if guard is not None:
                neutral = (_OF_INTEGERS if value.dtype == "int64" else _IDENTITY)[value.op]
                identity = copier.emit(Value(op="const", constant=neutral, dtype=value.dtype))
                element = copier.emit(Value(op="where", args=(guard, element, identity), dtype=value.dtype))
            if number in combined:
                both = (combined[number], element)
                element = copier.emit(Value(op=_COMBINED[value.op], args=both, dtype=value.dtype))
            combined[number] = element
        for position in found.of_elements:
            store = program.stores[position]
            strides, offset = turn.moved(store.strides, store.offset)
            stores.append(replace(store, value=copier.copy(store.value), strides=strides, offset=offset, guard=guard))
    stores += [Store(operand=-1 - n, value=combined[number], strides=found.strides) for n, number in enumerate(found.reductions)]
    return copier.part(stores, scratch, _PARTIAL, "partial", is_reduced=False)


def _whole_part(found: _Columns, scratch: Sequence[Scratch]) -> Part:
    """Rows are columns of memory, and a row's columns the blocks."""
    program = found.program

    def leaf(copier: Copier, number: int) -> Value | int | None:
        value = program.values[number]
        if value.op == "size":
            return copier.emit(Value(op="const", constant=float(program.dims[value.dim]), dtype=value.dtype))
        if number not in found.reductions:
            return None
        operand, strides = -1 - found.reductions.index(number), (*found.strides[1:], found.strides[0])
        partial = copier.emit(Value(op="load", operand=operand, strides=strides, dtype=value.dtype))
        return Value(op=value.op, args=(partial,), dtype=value.dtype)

    copier = Copier(program, (*program.dims[:-1], found.blocks), leaf)
    stores = [
        replace(store, value=copier.copy(store.value)) for n, store in enumerate(program.stores) if n not in found.of_elements
    ]
    return copier.part(stores, scratch, _WHOLE, "", is_reduced=True)
