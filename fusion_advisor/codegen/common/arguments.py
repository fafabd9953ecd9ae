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

from fusion_advisor.codegen.common.value_names import C_KEYWORDS, KERNEL_WORDS, Identifiers
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

INT32_SAFE = 2**31 - 2**24
"""Below this an index fits in 32 bits; the margin is for the part of the last tile that lies past the end."""


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
        """Whether an index, an address, a sum of places or an argument may pass 32 bits.

        What a gathered value adds to an address is int64 in any case; what a quotient of an index adds is counted. So is the
        stride of a dim of size 1, which moves nothing but is passed.
        """
        program = self.program
        extents = [prod(program.dims), *_largest_places(program), *(abs(value) for _, value in self.arguments)]
        places: list[Value | Store] = [*(v for v in program.values if v.op in ADDRESSED), *program.stores]
        for place in places:
            reach = sum((size - 1) * abs(stride) for size, stride in zip(program.dims, place.strides, strict=True))
            for number, step in zip(place.args, place.steps, strict=False):
                if program.values[number].op == "quotient":
                    index, extent = (program.values[arg] for arg in program.values[number].args)
                    reach += abs(step) * ((program.dims[index.dim] - 1) // int(extent.constant or 1))
            extents.append(abs(place.offset) + reach)
        return max(extents) >= INT32_SAFE


def pointer_names(program: Program) -> tuple[str, ...]:
    """The argument of each operand."""
    names = (o.name for o in program.operands)
    return tuple(f"{f'{n}_' if keyword.iskeyword(n) or n in C_KEYWORDS else n}_ptr" for n in names)


def schedule(program: Program, *, flatten_rows: bool) -> Schedule:
    """Name the arguments of a Program's kernel.

    Args:
        program: what to compute.
        flatten_rows: whether a pointwise kernel walks all rows with one index (CUDA) or keeps the last row dim as the second side
            of its tile (Triton). Reduced Programs always have one row index.
    """
    program = with_dims(program, 2 if program.is_reduced else 1)
    kind = "rows" if program.is_reduced else "flat" if len(program.dims) == 1 else "tiled"
    has_one_row = flatten_rows or kind == "rows"
    indices, sizes = _loop_names(len(program.dims), has_one_row=has_one_row)
    named = _Arguments(program, (*indices, *sizes))
    named.add_sizes(sizes, has_one_row=has_one_row)
    pointers = named.add_pointers()
    loads, numbers, extents = named.add_values()
    stores = named.add_stores()
    return Schedule(
        program=program, kind=kind, pointers=pointers, indices=indices, sizes=sizes, loads=loads, numbers=numbers,
        stores=stores, arguments=tuple(named.arguments), varies=_varies(program), taken=frozenset(named.names.taken),
        pairs=named.pairs, extents=extents,
    )  # fmt: skip


def _loop_names(dims: int, *, has_one_row: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the loop variables and of the extents."""
    if dims == 1:
        return ("index",), ("size",)
    if dims == 2:
        return ("row", "col"), ("rows", "cols")
    if has_one_row:
        return (*(f"i{d}" for d in range(dims - 1)), "col"), (*(f"size{d}" for d in range(dims - 1)), "cols")
    outer = range(dims - 2)
    return (*(f"i{d}" for d in outer), "row", "col"), (*(f"size{d}" for d in outer), "rows", "cols")


class _Arguments:
    """Collects the integer arguments of a kernel, in the order of its signature.

    Attributes:
        names: every name that is taken.
        arguments: names with their values for this Program.
        pairs: loads and stores of neighbouring elements.
    """

    def __init__(self, program: Program, loop_names: tuple[str, ...]) -> None:
        self._program = program
        self._operands = [name.removesuffix("_ptr") for name in pointer_names(program)]
        self.names = Identifiers({f"{name}_ptr" for name in self._operands} | KERNEL_WORDS | C_KEYWORDS)
        for name in loop_names:
            self.names.take(name, exact=True)
        self.arguments: list[tuple[str, int]] = []
        self.pairs = find_pairs(program)
        self._pointers: tuple[str, ...] = ()
        self._steps: dict[tuple[int, tuple[int, ...], tuple[int, ...]], tuple[str, ...]] = {}
        """Strides and steps of each address; addresses that differ in their offset alone share them."""

    def add_sizes(self, sizes: tuple[str, ...], *, has_one_row: bool) -> None:
        """Add the extents that a kernel needs: the outermost of several row dims only where a value asks for it."""
        dims = self._program.dims
        used = {value.dim for value in self._program.values if value.op == "size"}
        if has_one_row and len(dims) > 2:
            self.arguments.append(("rows", prod(dims[:-1])))
        for d, size in enumerate(dims):
            is_outermost = d == 0 and len(dims) > 2
            if not is_outermost or d in used:
                self.arguments.append((sizes[d], size))

    def add_pointers(self) -> tuple[str, ...]:
        """Take the names of the tensors."""
        self._pointers = tuple(self.names.take(name, exact=True) for name in pointer_names(self._program))
        return self._pointers

    def add_values(self) -> tuple[dict[int, Access], dict[int, Numbering], dict[int, str]]:
        """Add what loads, dropouts and extents need; return their addresses, numberings and names by value number."""
        loads: dict[int, Access] = {}
        numbers: dict[int, Numbering] = {}
        extents: dict[int, str] = {}
        partner = _partners(self.pairs.loads)
        for number, value in enumerate(self._program.values):
            if value.op == "extent":
                reader = reader_of(self._program, number)
                extents[number] = self.names.take(f"{self._operands[reader]}_extent" if reader >= 0 else "extent")
                self.arguments.append((extents[number], int(value.constant or 0)))
            elif value.op == "dropout":
                strides = self._stride_names("element", value.strides)
                numbers[number] = Numbering(strides=strides, offset=self._offset_name("element", value.offset))
            elif value.op == "load" and number not in loads:
                even, odd = partner.get(number, (number, number))
                loads[even] = loads[odd] = self._access(self._program.values[even], is_pair=even != odd)
        return loads, numbers, extents

    def add_stores(self) -> tuple[Access, ...]:
        """Add what stores need; return their addresses."""
        stores: dict[int, Access] = {}
        partner = _partners(self.pairs.stores)
        for position in range(len(self._program.stores)):
            even, odd = partner.get(position, (position, position))
            if position not in stores:
                stores[even] = stores[odd] = self._access(self._program.stores[even], is_pair=even != odd)
        return tuple(stores[position] for position in range(len(self._program.stores)))

    def _access(self, access: Value | Store, *, is_pair: bool) -> Access:
        base, dims = self._operands[access.operand], len(self._program.dims)
        key = (access.operand, access.strides, access.steps)
        if key not in self._steps:
            strides = self._stride_names(base, access.strides, is_paired=key[:2] in self.pairs.places)
            self._steps[key] = (*strides, *self._stride_names(base, access.steps, kind="step"))
        names = self._steps[key]
        return Access(
            operand=self._program.operands[access.operand],
            pointer=self._pointers[access.operand],
            strides=names[:dims],
            offset=self._offset_name(base, access.offset),
            gathered=tuple(zip(access.args, names[dims:], strict=True)),
            is_pair=is_pair,
        )

    def _stride_names(
        self, base: str, strides: tuple[int, ...], *, kind: str = "stride", is_paired: bool = False
    ) -> tuple[str, ...]:
        found: list[str] = []
        for d, stride in enumerate(strides):
            if stride in (0, 1) or (is_paired and d == len(strides) - 1):
                found.append(str(stride))
            else:
                found.append(self.names.take(f"{base}_{kind}{d}"))
                self.arguments.append((found[-1], stride))
        return tuple(found)

    def _offset_name(self, base: str, offset: int) -> str:
        if not offset:
            return ""
        name = self.names.take(f"{base}_offset")
        self.arguments.append((name, offset))
        return name


def base_is_multiple(program: Program, number: int, of: int) -> bool:
    """Whether the number of the element in the first column is a multiple of ``of`` in every row."""
    value = program.values[number]
    moves = [stride for stride, size in zip(value.strides[:-1], program.dims[:-1], strict=True) if size > 1]
    return all(move % of == 0 for move in (value.offset, *moves))


def next_power(number: int) -> int:
    """The next power of two, from 1 on."""
    return 1 << max(0, number - 1).bit_length()


def split_index(flat: str, indices: tuple[str, ...], sizes: tuple[str, ...]) -> list[str]:
    """Statements ``i1 = row % size1`` that split a flattened index into one index per dim, innermost first."""
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


def _largest_places(program: Program) -> list[int]:
    """The most that each sum or difference of places and whole numbers may come to, as a mask of a sliding window makes them."""
    most, found = dict[int, int](), list[int]()
    for number, value in enumerate(program.values):
        if value.dtype == "int64" and value.op in ("index", "size"):
            most[number] = program.dims[value.dim]
        elif value.dtype == "int64" and value.op == "const":
            most[number] = abs(int(value.constant or 0))
        elif value.op in ("add", "sub") and all(arg in most for arg in value.args):
            found.append(sum(most[arg] for arg in value.args))
            most[number] = found[-1]
    return found


def _partners(pairs: tuple[tuple[int, int], ...]) -> dict[int, tuple[int, int]]:
    return {member: pair for pair in pairs for member in pair}


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
