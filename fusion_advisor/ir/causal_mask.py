"""Comparisons of two loop variables: the triangle of a causal mask, known without reading one.

All spellings (``tril``, ``triu``, comparisons of ``arange``, negations) become one form, ``le(column, row + offset)`` or the
negation of it, so that kernels match however the mask was written. Where the triangle ends in the last row's last column, as
with a cache of keys, the offset is written as a difference of sizes: one compiled kernel then serves every length.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from fusion_advisor.ir.program import REDUCTIONS, Program, Store, Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """``index(column) <= index(row) + offset``."""

    column: int
    row: int
    offset: int


def order_of(program: Program, number: int | None) -> Order | None:
    """Return what a finished Program's value compares, where it is of the one form."""
    if number is None or program.values[number].op != "le":
        return None
    left, right = (_place_in(program, arg) for arg in program.values[number].args)
    if left is None or right is None:
        return None
    (columns, shift), (rows, offset) = left, right
    if len(columns) != 1 or len(rows) != 1 or shift or columns == rows:
        return None
    return Order(column=columns[0], row=rows[0], offset=offset)


def _place_in(program: Program, number: int) -> tuple[tuple[int, ...], int] | None:
    """Loop variables and constant part of a sum of places."""
    value = program.values[number]
    if value.op == "index":
        return (value.dim,), 0
    if value.op == "size" and value.dtype == "int64":
        return (), program.dims[value.dim]
    if value.op == "const" and value.dtype == "int64":
        return (), int(value.constant or 0)
    if value.op not in ("add", "sub") or value.dtype != "int64":
        return None
    left, right = (_place_in(program, arg) for arg in value.args)
    if left is None or right is None or (value.op == "sub" and right[0]):
        return None
    return (*left[0], *right[0]), left[1] + (right[1] if value.op == "add" else -right[1])


def guard_masked_loads(program: Program) -> Program:
    """Read nothing where a causal mask hides it: a load that only matters under an order is guarded by it.

    The operand's element count becomes what is really read, half of a square.
    """
    guards = {n: guard for n, guard in enumerate(_demands(program)) if guard is not None and _is_hidden(program, n, guard)}
    if not guards:
        return program
    values = [replace(value, guard=guards.get(n, value.guard)) for n, value in enumerate(program.values)]
    counts = {values[n].operand: _read(program, values[n], guard) for n, guard in guards.items()}
    for operand in list(counts):
        if sum(value.op == "load" and value.operand == operand for value in values) > 1:
            del counts[operand]  # another load reads what this one leaves out
    operands = tuple(replace(o, element_count=counts.get(n, o.element_count)) for n, o in enumerate(program.operands))
    return _places_first(replace(program, values=tuple(values), operands=operands))


def _demands(program: Program) -> list[int | None]:
    """For each value the order outside of which nobody looks at it; None where it is always wanted."""
    values = program.values
    always = -1
    found: list[set[int]] = [set() for _ in values]
    for number in (number for store in program.stores for number in store.needs):
        found[number].add(always)
    for number in reversed(range(len(values))):
        value = values[number]
        own = next(iter(found[number])) if len(found[number]) == 1 else always
        for position, arg in enumerate(value.args):
            if value.op == "where" and position == 1 and order_of(program, value.args[0]) is not None:
                found[arg].add(value.args[0])
            else:
                found[arg].add(always if value.op in REDUCTIONS else own)
        if value.guard is not None:
            found[value.guard].add(always)
    return [next(iter(demand)) if len(demand) == 1 and always not in demand else None for demand in found]


def _is_hidden(program: Program, number: int, guard: int) -> bool:
    value, order = program.values[number], order_of(program, guard)
    if value.op != "load" or value.guard is not None or order is None:
        return False
    return bool(value.strides[order.column]) and bool(value.strides[order.row])


def _read(program: Program, load: Value, guard: int) -> int:
    order = order_of(program, guard)
    assert order is not None
    columns = program.dims[order.column]
    kept = sum(min(max(row + order.offset + 1, 0), columns) for row in range(program.dims[order.row]))
    others = (dim for dim in range(len(program.dims)) if dim not in (order.column, order.row) and load.strides[dim])
    return kept * prod(program.dims[dim] for dim in others)


def _places_first(program: Program) -> Program:
    """Values in the same order, but places before everything: a guard comes before its load."""
    values = program.values
    is_place: list[bool] = []
    for value in values:
        is_leaf = value.op in ("index", "size") or (value.op == "const" and value.dtype in ("int64", "bool"))
        is_sum = value.op in ("add", "sub", "le", "not") and all(is_place[arg] for arg in value.args)
        is_place.append(is_leaf or is_sum)
    order = sorted(range(len(values)), key=lambda n: (not is_place[n], n))
    new = {old: number for number, old in enumerate(order)}

    def renumbered(value: Value) -> Value:
        guard = None if value.guard is None else new[value.guard]
        return replace(value, args=tuple(new[arg] for arg in value.args), guard=guard)

    def written(store: Store) -> Store:
        guard = None if store.guard is None else new[store.guard]
        return replace(store, value=new[store.value], args=tuple(new[arg] for arg in store.args), guard=guard)

    moved = tuple(renumbered(values[n]) for n in order)
    return replace(program, values=moved, stores=tuple(map(written, program.stores)))
