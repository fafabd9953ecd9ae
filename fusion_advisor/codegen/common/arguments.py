"""How a Program becomes a signature and an order of work: what the GPU backends share before any text is written.

The dims are read as rows × columns: the last dim is the columns, the ones before it are the rows (a Program of one dim
has columns only, called ``index`` and ``size``). Everything here follows from what
:func:`~fusion_advisor.ir.program.layout_key` sees, so a Program that was not rendered, but shares the key, gets
the same arguments in the same order. That is why strides are looked at as "0, 1 or other" and never by value, and a dim
of size 1 counts as varying when its stride says so.
"""

from __future__ import annotations

import keyword
import re
from dataclasses import dataclass
from math import prod

from fusion_advisor.ir.program import (
    ADDRESSED,
    ITEM_BYTES,
    REDUCTIONS,
    Operand,
    Pairs,
    Program,
    Store,
    Value,
    find_pairs,
    reader_of,
    with_dims,
)

FEW_ROWS = 512
"""Fewer rows than a GPU runs blocks at once: each row then gets more threads."""
MAX_RESIDENT_COLS = 16384
"""Rows up to this width are kept in registers over all passes; wider ones are read again (from L2, mostly)."""

_INT32_SAFE = 2**31 - 2**24
"""Below this an index fits in 32 bits; the margin is for the part of the last tile that lies past the end."""

_C_KEYWORDS = frozenset(
    """auto bool break case char class const continue default delete do double else enum extern float for goto if inline int long
    namespace new operator private public register return short signed sizeof static struct switch template this typedef union
    unsigned using void volatile while""".split()  # noqa: SIM905
)
_STRUCTURE = frozenset(
    """row col rows cols index size outer tile tl triton lane lanes first step mask row_mask col_mask col_tiles row_tiles
    start item item_mask item_col_mask""".split()  # noqa: SIM905
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The address of one load or store: names of kernel arguments, or the digits 0 and 1."""

    operand: Operand
    pointer: str
    strides: tuple[str, ...]
    """One per dim: ``0``, ``1``, ``2`` (the columns of pairs) or the name of an argument."""
    offset: str
    """Name of an argument; empty when there is no offset. That of a pair is the even element's."""
    gathered: tuple[tuple[int, str], ...] = ()
    """Numbers of the values that move the address too, each with its step: ``1`` or the name of an argument."""
    is_pair: bool = False
    """Whether it takes two neighbours for every column; the last stride is the digit 2 then."""

    @property
    def is_vector(self) -> bool:
        """Whether what neighbouring columns take lies side by side in memory."""
        return self.is_pair or self.strides[-1] == "1"

    @property
    def col_bytes(self) -> int:
        """Bytes that one column takes, where that is all there is between it and the next."""
        return ITEM_BYTES[self.operand.dtype] * (2 if self.is_pair else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbering:
    """The number of an element that a ``dropout`` decides on: names of kernel arguments, or the digits 0 and 1."""

    strides: tuple[str, ...]
    offset: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A Program with names for everything that its kernel's signature holds.

    Attributes:
        program: the Program, with a dim added where it had none (or, when reduced, no row dim).
        kind: ``flat`` (one dim), ``tiled`` (pointwise, two dims or more) or ``rows`` (the last dim is reduced).
        pointers: argument names, one per operand.
        indices: loop variables, one per dim.
        sizes: names of the extents, one per dim.
        arguments: every integer argument with its value for this Program, in the order of the signature.
        varies: for each value the dims it varies over, as the layout key tells them.
        pairs: loads and stores of neighbouring elements; one access serves both of a pair.
        extents: names of the arguments that ``extent`` values stand for, by value number.
    """

    program: Program
    kind: str
    pointers: tuple[str, ...]
    indices: tuple[str, ...]
    sizes: tuple[str, ...]
    loads: dict[int, Access]
    numbers: dict[int, Numbering]
    stores: tuple[Access, ...]
    arguments: tuple[tuple[str, int], ...]
    varies: tuple[frozenset[int], ...]
    taken: frozenset[str]
    pairs: Pairs
    extents: dict[int, str]

    @property
    def col_dim(self) -> int:
        """Number of the last dim."""
        return len(self.program.dims) - 1

    def has_col(self, number: int) -> bool:
        """Whether a value differs between columns."""
        return self.col_dim in self.varies[number]

    @property
    def has_pairs(self) -> bool:
        """Whether any access takes two neighbours for every column."""
        return bool(self.pairs.loads or self.pairs.stores)

    def load_pair(self, number: int) -> tuple[int, int]:
        """The loads (even element, odd element) that a load is read with; twice itself where it is read alone."""
        return next((pair for pair in self.pairs.loads if number in pair), (number, number))

    def store_pair(self, position: int) -> tuple[int, int]:
        """The same for a store."""
        return next((pair for pair in self.pairs.stores if position in pair), (position, position))

    def has_row(self, number: int) -> bool:
        """Whether a value differs between rows."""
        return bool(self.varies[number] - {self.col_dim})

    def stores_col(self, position: int) -> bool:
        """Whether a store writes per column; where the row has one column its stride may be 0."""
        store = self.program.stores[position]
        return store.strides[-1] != 0 or any(self.has_col(number) for number in store.needs)

    @property
    def row_count(self) -> int:
        """Product of the dims before the last."""
        return prod(self.program.dims[:-1])

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to write; a sum over no columns is still written, once per row."""
        if self.row_count == 0:
            return True
        stores_per_row = self.kind == "rows" and not all(self.stores_col(n) for n in range(len(self.stores)))
        return self.program.dims[-1] == 0 and not stores_per_row

    @property
    def needs_int64(self) -> bool:
        """Whether an index or an address may pass 32 bits; what a gathered value adds to one is int64 in any case.

        A quotient of an index is no such value: what it adds is counted.
        """
        program = self.program
        extents = [prod(program.dims)]
        places: list[Value | Store] = [*(v for v in program.values if v.op in ADDRESSED), *program.stores]
        for place in places:
            reach = sum((size - 1) * abs(stride) for size, stride in zip(program.dims, place.strides, strict=True))
            for number, step in zip(place.args, place.steps, strict=False):
                if program.values[number].op == "quotient":
                    index, extent = (program.values[arg] for arg in program.values[number].args)
                    reach += abs(step) * ((program.dims[index.dim] - 1) // int(extent.constant or 1))
            extents.append(abs(place.offset) + reach)
        return max(extents) >= _INT32_SAFE


def pointer_names(program: Program) -> tuple[str, ...]:
    """The argument of each operand."""
    names = (o.name for o in program.operands)
    return tuple(f"{f'{n}_' if keyword.iskeyword(n) or n in _C_KEYWORDS else n}_ptr" for n in names)


def schedule(program: Program, *, flatten_rows: bool) -> Schedule:
    """Name the arguments of a Program's kernel.

    Args:
        program: what to compute.
        flatten_rows: whether a pointwise kernel walks all rows with one index (CUDA) or keeps the last row dim apart as the
            tile's second side (Triton). Reduced Programs always have one row index.
    """
    program = with_dims(program, 2 if program.is_reduced else 1)
    dims = len(program.dims)
    kind = "rows" if program.is_reduced else "flat" if dims == 1 else "tiled"
    operand_names = [name.removesuffix("_ptr") for name in pointer_names(program)]
    names = _Names({f"{name}_ptr" for name in operand_names} | _STRUCTURE | _C_KEYWORDS)
    one_row = flatten_rows or kind == "rows"
    indices: tuple[str, ...]
    sizes: tuple[str, ...]
    if kind == "flat":
        indices, sizes = ("index",), ("size",)
    elif dims == 2:
        indices, sizes = ("row", "col"), ("rows", "cols")
    elif one_row:
        indices = (*(f"i{d}" for d in range(dims - 1)), "col")
        sizes = (*(f"size{d}" for d in range(dims - 1)), "cols")
    else:
        indices = (*(f"i{d}" for d in range(dims - 2)), "row", "col")
        sizes = (*(f"size{d}" for d in range(dims - 2)), "rows", "cols")
    for name in (*indices, *sizes):
        names.take(name, exact=True)

    arguments: list[tuple[str, int]] = []
    used_sizes = {v.dim for v in program.values if v.op == "size"}
    if one_row and dims > 2:
        arguments.append(("rows", prod(program.dims[:-1])))
    for d, size in enumerate(program.dims):
        is_outermost = d == 0 and dims > 2
        if not is_outermost or d in used_sizes:
            arguments.append((sizes[d], size))

    pointers = tuple(names.take(name, exact=True) for name in pointer_names(program))
    pairs = find_pairs(program)
    shared: dict[tuple[int, tuple[int, ...], tuple[int, ...]], tuple[str, ...]] = {}

    def named(access: Value | Store, *, is_pair: bool) -> Access:
        base = operand_names[access.operand]
        args, steps = access.args, access.steps
        key = (access.operand, access.strides, steps)
        if key not in shared:
            is_paired = key[:2] in pairs.places
            strides = _stride_names(names, base, access.strides, arguments, is_paired=is_paired)
            shared[key] = (*strides, *_stride_names(names, base, steps, arguments, kind="step"))
        return Access(
            operand=program.operands[access.operand], pointer=pointers[access.operand], strides=shared[key][:dims],
            offset=_offset_name(names, base, access.offset, arguments),
            gathered=tuple(zip(args, shared[key][dims:], strict=True)), is_pair=is_pair,
        )  # fmt: skip

    loads: dict[int, Access] = {}
    extents: dict[int, str] = {}
    numbers: dict[int, Numbering] = {}
    load_partner = _partners(pairs.loads)
    for number, value in enumerate(program.values):
        even, odd = load_partner.get(number, (number, number))
        if value.op == "extent":
            reader = reader_of(program, number)
            extents[number] = names.take(f"{operand_names[reader]}_extent" if reader >= 0 else "extent")
            arguments.append((extents[number], int(value.constant or 0)))
        if value.op == "dropout":
            strides = _stride_names(names, "element", value.strides, arguments)
            numbers[number] = Numbering(strides=strides, offset=_offset_name(names, "element", value.offset, arguments))
        elif value.op == "load" and number not in loads:
            loads[even] = loads[odd] = named(program.values[even], is_pair=even != odd)
    stores: dict[int, Access] = {}
    store_partner = _partners(pairs.stores)
    for position in range(len(program.stores)):
        even, odd = store_partner.get(position, (position, position))
        if position not in stores:
            stores[even] = stores[odd] = named(program.stores[even], is_pair=even != odd)
    return Schedule(
        program=program, kind=kind, pointers=pointers, indices=indices, sizes=sizes, loads=loads, numbers=numbers,
        stores=tuple(stores[position] for position in range(len(program.stores))),
        arguments=tuple(arguments), varies=_varies(program), taken=frozenset(names.taken), pairs=pairs, extents=extents,
    )  # fmt: skip


def base_is_multiple(program: Program, number: int, of: int) -> bool:
    """Whether the number of the element in the first column is a multiple of ``of`` in every row."""
    value = program.values[number]
    moves = [stride for stride, size in zip(value.strides[:-1], program.dims[:-1], strict=True) if size > 1]
    return all(move % of == 0 for move in (value.offset, *moves))


def next_power(number: int) -> int:
    """The next power of two, from 1 on."""
    return 1 << max(0, number - 1).bit_length()


def split_index(flat: str, indices: tuple[str, ...], sizes: tuple[str, ...]) -> list[str]:
    """Statements ``i1 = row % size1`` that take a flattened index apart, innermost dim first."""
    lines = []
    for index, size in zip(reversed(indices[1:]), reversed(sizes[1:]), strict=True):
        lines.append(f"{index} = {flat} % {size}")
        flat = f"{flat} // {size}"
    return [*lines, f"{indices[0]} = {flat}"]


def kept(definitions: list[str], body: list[str]) -> list[str]:
    """Those of ``name = …`` lines that the body needs, directly or through one another."""
    found: list[str] = []
    for line in reversed(definitions):
        name = re.escape(line.split(" = ", 1)[0].split()[-1])
        if any(re.search(rf"\b{name}\b(?!=)", user) for user in (*found, *body)):
            found.insert(0, line)
    return found


class _Names:
    """Hands out identifiers, each once."""

    def __init__(self, taken: set[str]) -> None:
        self.taken = taken

    def take(self, name: str, *, exact: bool = False) -> str:
        candidate, count = name, 1
        while candidate in self.taken and not exact:
            count += 1
            candidate = f"{name}_{count}"
        self.taken.add(candidate)
        return candidate


def _partners(pairs: tuple[tuple[int, int], ...]) -> dict[int, tuple[int, int]]:
    return {member: pair for pair in pairs for member in pair}


def _stride_names(
    names: _Names,
    base: str,
    strides: tuple[int, ...],
    arguments: list[tuple[str, int]],
    *,
    kind: str = "stride",
    is_paired: bool = False,
) -> tuple[str, ...]:
    found: list[str] = []
    for d, stride in enumerate(strides):
        if stride in (0, 1) or (is_paired and d == len(strides) - 1):
            found.append(str(stride))
        else:
            found.append(names.take(f"{base}_{kind}{d}"))
            arguments.append((found[-1], stride))
    return tuple(found)


def _offset_name(names: _Names, base: str, offset: int, arguments: list[tuple[str, int]]) -> str:
    if not offset:
        return ""
    name = names.take(f"{base}_offset")
    arguments.append((name, offset))
    return name


def _varies(program: Program) -> tuple[frozenset[int], ...]:
    last = len(program.dims) - 1
    found: list[frozenset[int]] = []
    for value in program.values:
        dims: set[int] = set()
        for arg in (*value.args, *(() if value.guard is None else (value.guard,))):
            dims |= found[arg]
        if value.op in ADDRESSED:
            dims |= {d for d, stride in enumerate(value.strides) if stride != 0}
        elif value.op == "index":
            dims.add(value.dim)
        elif value.op in REDUCTIONS:
            dims.discard(last)
        found.append(frozenset(dims))
    return tuple(found)
