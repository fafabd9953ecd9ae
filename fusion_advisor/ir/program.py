"""The kernel IR: what one fused kernel computes, with no word about how a backend writes it down.

A :class:`Program` is a loop nest over :attr:`Program.dims` (outermost first) whose body is a list of SSA values in order. The
last dim may be reduced; then a ``reduce_*`` value is a number per row and everything after it may use both. Loads and stores
address tensors by one stride per dim plus an offset, all in elements, so every view (transpose, slice, expand, split) has
already been folded into the address and no template needs to know what a view is. A load or a store may also be moved by int64
values of the kernel itself, one step each: that is what an embedding, a gather or an ``index_copy_`` is.

``lower`` makes Programs from captured op chains and from kernel references, ``match`` compares their :func:`structure`,
the backends print them. Rendered kernels take sizes and strides as arguments: two Programs with the same
:func:`layout_key` share one compiled kernel.

Op names (``Value.op``):

- ``load``   operand, strides, offset, guard, args, steps: elements where ``guard`` is false are not read and give 0 (under a
  guard ``le(index, index + offset)``, a causal mask's, they may also be read: nothing looks at them, and packs stay whole);
  the address moves by ``steps[n]`` elements for each unit of ``args[n]``
- ``const``  constant (python number or bool); ``index``  dim: the loop variable of that dim as int64; ``size``  dim: that dim's
  extent in the value's dtype (a mean is reduce_sum divided by size, so it serves every width); ``extent``  constant: a size of
  some tensor that is no dim of the nest, an argument of the kernel; ``quotient``  an index over an extent, rounded down
- arithmetic: add sub mul div neg abs maximum minimum exp exp2 log log1p expm1 sqrt rsqrt reciprocal sigmoid tanh erf erfc sin
  cos pow floor ceil trunc round remainder sign  (remainder is Python's, maximum and minimum propagate NaN as torch's do)
- ``erfc`` with the constant True stands for ``1 + erf(-x)``, of whose tail eager keeps no digits: a kernel need not either
- ``round_float16``, ``round_bfloat16``: to the nearest number of that dtype, ties to even; the compute dtype stays
- ``normal_cdf``, ``tanh_cdf``: GELU's two distribution functions; only the GPU backends put them in (``codegen.common.gelu_cdf``)
- compare and logic: eq ne lt le gt ge and or xor not isnan where(cond, a, b); cast (to ``dtype``)
- ``inside``  args (a position, an extent), guard, check: whether the position lies in ``[0, extent)``. The kernel stops where it
  does not, as eager does (``codegen.common.position_checks``); where ``guard`` is false the result is false and nothing stops
- ``dropout``  seed (an int64 value), constant p, strides, offset: 0 where the element is dropped, else 1/(1-p). Strides and
  offset give the element's number; that and the seed decide, see ``library.philox_dropout``
- reductions over the last dim: reduce_sum reduce_max reduce_min (max and min propagate NaN)

Compute dtypes: ``float32`` (``float64`` when an operand is float64), ``int64``, ``bool``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fusion_advisor.records.op_facts import item_bytes

REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min"})
COMPARES = ("eq", "ne", "lt", "le", "gt", "ge")
LOGIC = ("and", "or", "xor")
COMMUTATIVE = frozenset({"add", "mul", "maximum", "minimum", "eq", "ne", "and", "or", "xor"})
ARITHMETIC = (
    "add", "sub", "mul", "div", "neg", "abs", "maximum", "minimum", "exp", "exp2", "log", "log1p", "expm1", "sqrt", "rsqrt",
    "reciprocal", "sigmoid", "tanh", "erf", "erfc", "sin", "cos", "pow", "floor", "ceil", "trunc", "round", "remainder", "sign",
    "normal_cdf", "tanh_cdf", "round_float16", "round_bfloat16",
)  # fmt: skip
PLACES = ("load", "const", "index", "size", "extent", "quotient", "inside", "dropout")
OPS = frozenset({*ARITHMETIC, *COMPARES, *LOGIC, *PLACES, *REDUCTIONS, "not", "isnan", "where", "cast"})
"""Every op. A language's printer table has a row for each, or says why it has none."""
HALF = frozenset({"float16", "bfloat16"})
ROUNDINGS = {"float16": "round_float16", "bfloat16": "round_bfloat16"}
"""The op that rounds to a dtype inside a kernel; wider dtypes are compute dtypes, and a ``cast`` rounds to those."""
ADDRESSED = frozenset({"load", "dropout"})
"""Values that vary with a linear function of the loop variables: their strides and offset."""
DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
"""Of tensors that a kernel may read and write."""
ITEM_BYTES = {dtype: item_bytes(dtype) for dtype in DTYPES}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """A tensor argument of the kernel; inputs come before outputs."""

    name: str
    """A valid identifier from the allow-list: ``x``, ``weight``, ``residual``, ``in0``, ``out0``."""
    dtype: str
    is_output: bool = False
    element_count: int = 0
    """Distinct elements that the kernel touches: what it moves, in elements."""
    rounded_to: str = ""
    """Of an output that a later launch reads: the dtype that all that comes of it is rounded to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One SSA value; its position in :attr:`Program.values` is its number."""

    op: str
    args: tuple[int, ...] = ()
    dtype: str = "float32"
    constant: float | int | bool | None = None
    constant_name: str = ""
    """Set when a kernel's manifest names the constant (``eps``): it becomes a kernel argument-like literal with that name."""
    operand: int = -1
    strides: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    """Of a load: how far one unit of each of ``args`` moves its address."""
    offset: int = 0
    guard: int | None = None
    """Number of the boolean value that says where this load may read, or where this position counts."""
    dim: int = -1
    check: str = ""
    """Of ``inside``: whose error a position out of range raises (``position_checks``). Kernels are the same for all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """One output: ``value`` is converted to the operand's dtype and written."""

    operand: int
    value: int
    strides: tuple[int, ...]
    offset: int = 0
    args: tuple[int, ...] = ()
    """Numbers of the int64 values that move the address: a position that is read, where a cache's row is written."""
    steps: tuple[int, ...] = ()
    """How far one unit of each of ``args`` moves it."""
    guard: int | None = None
    """Number of the boolean value that says where this store may write; nothing is written elsewhere."""

    @property
    def needs(self) -> tuple[int, ...]:
        """Numbers of all values that it is made of."""
        return (self.value, *self.args, *(() if self.guard is None else (self.guard,)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A loop nest with a straight-line body.

    Attributes:
        dims: sizes, outermost first, already collapsed as far as every address allows. Blocks are numbered in this order.
        is_reduced: whether the last dim is reduced by some ``reduce_*`` value. Values that a reduction feeds are per row;
            a store whose stride over the last dim is 0 then writes one element per row.
        siblings: loop nests of other sizes that the same launch runs (query heads and fewer key heads). ``operands`` then holds
            those of all nests, what they share once.
        is_exact: whether each value is rounded where the ops that it stands for round: a printer then uses no approximation and
            contracts nothing.
    """

    dims: tuple[int, ...]
    operands: tuple[Operand, ...]
    values: tuple[Value, ...]
    stores: tuple[Store, ...]
    is_reduced: bool = False
    siblings: tuple[Part, ...] = ()
    is_exact: bool = False

    @property
    def moved_bytes(self) -> int:
        """Each input read once, each output written once."""
        return sum(o.element_count * ITEM_BYTES[o.dtype] for o in self.operands)

    def depends_on(self) -> tuple[frozenset[int], ...]:
        """For each value, the dims it varies over (a reduction drops the last dim)."""
        return depends_on(self.values, self.dims)


def depends_on(values: Sequence[Value], sizes: tuple[int, ...]) -> tuple[frozenset[int], ...]:
    """For each value of a loop nest, the dims of more than one element that it varies over."""
    last = len(sizes) - 1
    found: list[frozenset[int]] = []
    for value in values:
        dims: set[int] = set()
        for arg in (*value.args, *(() if value.guard is None else (value.guard,))):
            dims |= found[arg]
        if value.op in ADDRESSED:
            dims |= {i for i, stride in enumerate(value.strides) if stride != 0 and sizes[i] != 1}
        elif value.op == "index":
            dims.add(value.dim)
        elif value.op in REDUCTIONS:
            dims.discard(last)
        found.append(frozenset(dims))
    return tuple(found)


def divides_index(values: Sequence[Value], value: Value) -> bool:
    """Whether a value is what an index is over or modulo an extent: both are no less than 0, and fit what an index fits."""
    if value.op == "remainder":
        return value.dtype == "int64" and values[value.args[0]].op == "index" and values[value.args[1]].op == "extent"
    return value.op == "quotient"


def reader_of(program: Program, number: int) -> int:
    """The operand of the first load (or else store) that a value moves or guards, however far on; -1 when there is none."""
    reached = {number}
    for other, value in enumerate(program.values):
        if reached.intersection(value.args) or value.guard in reached:
            if value.op == "load":
                return value.operand
            reached.add(other)
    return next((store.operand for store in program.stores if reached.intersection(store.needs[1:])), -1)


def result_dtypes(program: Program) -> frozenset[str]:
    """The dtypes that a Program's results are rounded to, by itself or by a later launch."""
    return frozenset(operand.rounded_to or operand.dtype for operand in program.operands if operand.is_output)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One loop nest of a launch.

    Attributes:
        program: the nest with its own operands.
        operands: for each of those, its position among the launch's.
    """

    program: Program
    operands: tuple[int, ...]


def nests(program: Program) -> tuple[Part, ...]:
    """Every loop nest of a launch as a Program of its own; mostly there is one."""
    if not program.siblings:
        return (Part(program=program, operands=tuple(range(len(program.operands)))),)
    used = {value.operand for value in program.values if value.op == "load"} | {store.operand for store in program.stores}
    own = {operand: number for number, operand in enumerate(sorted(used))}
    first = replace(
        program,
        operands=tuple(program.operands[operand] for operand in own),
        values=tuple(replace(v, operand=own[v.operand]) if v.op == "load" else v for v in program.values),
        stores=tuple(replace(store, operand=own[store.operand]) for store in program.stores),
        siblings=(),
    )
    return (Part(program=first, operands=tuple(own)), *program.siblings)


TINY_ELEMENTS = 2**16
"""Up to so many, a pointwise kernel takes as long as one thread of it: what counts is how little that has to do.

One row of 4,096 (SwiGLU, bfloat16, H200) took 1.20 µs with 8 elements a thread, torch.compile's kernel of 2 a thread 1.14 µs.
"""


def is_tiny(program: Program) -> bool:
    """Whether a pointwise launch has so few elements that what counts is how little a thread has to do."""
    return not program.is_reduced and sum(math.prod(part.program.dims) for part in nests(program)) <= TINY_ELEMENTS


def with_dims(program: Program, least: int) -> Program:
    """Put dims of size 1 before those of a loop nest until it has ``least`` of them."""
    missing = least - len(program.dims)
    if missing <= 0:
        return program
    values = tuple(
        replace(v, strides=(0,) * missing + v.strides) if v.op in ADDRESSED
        else replace(v, dim=v.dim + missing) if v.op in ("index", "size") else v
        for v in program.values
    )  # fmt: skip
    # One number per row lies at its row, also where there is one row: Triton's reductions are blocks, and so is its address then.
    by_row = program.is_reduced and missing == 1
    stores = tuple(
        replace(s, strides=(int(by_row and s.strides[-1] == 0),) + (0,) * (missing - 1) + s.strides) for s in program.stores
    )
    return replace(program, dims=(1,) * missing + program.dims, values=values, stores=stores)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Loads and stores that alternate along the columns: (2c, 2c + 1), as interleaved rotary embeddings read their halves.

    One access then takes both elements of every column, so that what lies side by side in memory is moved at full width.
    """

    loads: tuple[tuple[int, int], ...]
    """Value numbers (even element, odd element)."""
    stores: tuple[tuple[int, int], ...]
    """Positions in :attr:`Program.stores`, likewise."""
    places: frozenset[tuple[int, tuple[int, ...]]]
    """(operand, strides) of all of them."""


def find_pairs(program: Program) -> Pairs:
    """Find two accesses of one operand with equal strides, 2 the last, at neighbouring offsets, with no guard on either."""
    loads = [
        (n, v.operand, v.strides, v.offset)
        for n, v in enumerate(program.values)
        if v.op == "load" and v.guard is None and not v.args
    ]
    stores = [(n, s.operand, s.strides, s.offset) for n, s in enumerate(program.stores) if s.guard is None and not s.args]
    places: set[tuple[int, tuple[int, ...]]] = set()
    found: list[tuple[tuple[int, int], ...]] = []
    for accesses in (loads, stores):
        at: dict[tuple[int, tuple[int, ...]], dict[int, int]] = {}
        for number, operand, strides, offset in accesses:
            if strides and strides[-1] == 2:
                at.setdefault((operand, strides), {}).setdefault(offset, number)
        matched: list[tuple[int, int]] = []
        for place, numbers in at.items():
            waiting = sorted(numbers)
            while waiting:
                offset = waiting.pop(0)
                if waiting and waiting[0] == offset + 1:
                    matched.append((numbers[offset], numbers[waiting.pop(0)]))
                    places.add(place)
        found.append(tuple(sorted(matched)))
    return Pairs(loads=found[0], stores=found[1], places=frozenset(places))


def layout_key(program: Program) -> str:
    """Text that two Programs share exactly when one compiled kernel serves both.

    Sizes, offsets, and strides other than 0 and 1 are left out: they are the kernel's arguments. A load or store with the strides
    (and steps) of an earlier one of the same operand is marked ``=``: the two share their stride arguments. The odd one of a pair
    is marked ``~``: it is read or written together with the even one.
    """
    text = _LayoutText(program)
    parts = [f"{'exact;' if program.is_exact else ''}{len(program.dims)}{'r' if program.is_reduced else 'p'}"]
    parts += [f"{o.dtype}{'>' if o.is_output else '<'}{o.rounded_to}" for o in program.operands]
    parts += [text.value(number, value) for number, value in enumerate(program.values)]
    parts += [text.store(number, store) for number, store in enumerate(program.stores)]
    parts += [f"&{part.operands}{layout_key(part.program)}" for part in program.siblings]
    return ";".join(parts)


class _LayoutText:
    """The parts of a layout key."""

    def __init__(self, program: Program) -> None:
        self._pairs = find_pairs(program)
        self._even_load, self._even_store = (
            {odd: even for even, odd in matched} for matched in (self._pairs.loads, self._pairs.stores)
        )
        self._first: dict[tuple[str, int, tuple[int, ...], tuple[int, ...]], int] = {}
        """The first load and the first store with some strides, by kind, operand, strides and steps."""

    def value(self, number: int, value: Value) -> str:
        where = ""
        if value.op == "load":
            moved = (
                f"[{self._strides(value.operand, value.strides)}{'|' + self._strides(-1, value.steps) if value.steps else ''}]"
            )
            offset = self._offset(self._even_load, number, value)
            where = f"@{value.operand}{moved}{offset}{self._shared('load', number, value)}?{value.guard}"
        elif value.op == "inside":
            where = f"?{value.guard}"
        elif value.op == "dropout":
            where = f"[{self._strides(-1, value.strides)}]{'+' if value.offset else ''}"
        constant = None if value.op == "extent" else value.constant
        dim = value.dim if value.op in ("index", "size") else ""
        return f"{value.op}{value.args}{value.dtype}{constant!r}{where}{dim}"

    def store(self, number: int, store: Store) -> str:
        shared, offset = self._shared("store", number, store), self._offset(self._even_store, number, store)
        moved = f"|{self._strides(-1, store.steps)}" if store.steps else ""
        where = f"{store.args}?{store.guard}" if store.args or store.guard is not None else ""
        return f"{store.operand}={store.value}[{self._strides(store.operand, store.strides)}{moved}]{offset}{shared}{where}"

    def _strides(self, operand: int, strides: tuple[int, ...]) -> str:
        text = "".join(str(s) if s in (0, 1) else "s" for s in strides)
        return f"{text[:-1]}2" if (operand, strides) in self._pairs.places else text

    def _shared(self, kind: str, number: int, access: Value | Store) -> str:
        same = self._first.setdefault((kind, access.operand, access.strides, access.steps), number)
        return f"={same}" if same != number else ""

    def _offset(self, even: dict[int, int], number: int, access: Value | Store) -> str:
        return f"~{even[number]}" if number in even else "+" if access.offset else ""


def dropout_constants(p: float) -> tuple[int, float]:
    """The random word from which an element is kept (0 to 2**32), and what it is scaled by then."""
    return round(p * 2**32), 0.0 if p == 1 else 1 / (1 - p)
