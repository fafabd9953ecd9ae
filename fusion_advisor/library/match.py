"""Match a chain against the library on what it computes, never on a class name.

Both sides are Programs made by the same ``lower``, so they are compared in one canonical form: commutative arguments in a fixed
order, operands distinguished by how they vary over the loop nest, constants moved into a list. Equal texts compute the same thing
up to those constants. Constants that a kernel's reference takes as keyword floats (``eps``) bind; every other constant must be
equal. A rounding to 16 bits is written the same way for float16 and bfloat16, and a reference that casts is traced in a wide and
in a narrow dtype: its patterns serve every dtype that the manifest declares.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from fusion_advisor.ir.causal_mask import Order, order_of
from fusion_advisor.ir.operand_names import with_names
from fusion_advisor.ir.program import COMMUTATIVE, ROUNDINGS, Program, Value, nests
from fusion_advisor.records import Tuning

_RELATIVE = 1e-6
"""Constants closer than this are the same: eager code writes sqrt(2/pi) in more than one way."""
_ARITHMETIC = re.compile(r"=(\w+)\.b?float\d+\(")


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """The canonical form of a Program."""

    text: str
    constants: tuple[float, ...]
    constant_values: tuple[int, ...]
    """Value numbers of the constants, in the same order; loop nests count on from one another."""
    operands: tuple[int, ...]
    """Operand indices in canonical order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """One reference of one kernel, traced at one example shape."""

    kernel: str
    variant: str
    structure: Structure
    operand_names: tuple[str, ...]
    """Parameter names in canonical order."""
    constant_names: tuple[str, ...]
    """One per constant; empty where the value must be equal."""
    constant_factors: tuple[float, ...]
    """What the lowering multiplied each named constant by: 0.5 where 0.5 · (x · scale) became x · (0.5 · scale)."""
    dtypes: tuple[str, ...]
    tunables: tuple[Tuning, ...] = ()
    license: str = ""
    """SPDX name of the kernel's licence; empty for this project's own."""
    """Launch parameters that the manifest declares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A pattern that a chain's Program is an instance of; ``program`` carries the kernel's own names."""

    kernel: str
    variant: str
    constants: tuple[tuple[str, float], ...]
    program: Program
    tunables: tuple[Tuning, ...] = ()
    license: str = ""
    """SPDX name of the kernel's licence; empty for this project's own."""
    """Launch parameters that the manifest declares."""


def structure(program: Program) -> Structure:
    """Return the canonical form of a Program; that of several loop nests is theirs, with the operands counted through."""
    operands: dict[int, int] = {}
    texts: list[str] = []
    constants: list[float] = []
    constant_values: list[int] = []
    before = 0
    for part in nests(program):
        found = _Canonical(part.program, part.operands, operands).run()
        texts.append(found.text)
        constants += found.constants
        constant_values += [before + number for number in found.constant_values]
        before += len(part.program.values)
    return Structure(
        text=" | ".join(texts),
        constants=tuple(constants),
        constant_values=tuple(constant_values),
        operands=tuple(operands),
    )


Patterns = Iterable[Pattern] | Callable[[str], Iterable[Pattern]]
"""All of them, or what gives those that a canonical text may be equal to."""


def arithmetic_in(text: str) -> frozenset[str]:
    """Return the ops of a canonical text that compute floating-point values: equal texts have the same ones."""
    return frozenset(_ARITHMETIC.findall(text))


def find_match(program: Program, patterns: Patterns) -> Found | None:
    """Return the first pattern that the Program is an instance of; None when there is none."""
    mine = structure(program)
    floats = {operand.dtype for operand in program.operands if operand.dtype.startswith(("float", "bfloat"))}
    for pattern in patterns(mine.text) if callable(patterns) else patterns:
        if pattern.structure.text != mine.text or not floats <= set(pattern.dtypes):
            continue
        bound = _bound(pattern, mine.constants)
        if bound is not None:
            found = tuple(bound.items())
            return Found(
                kernel=pattern.kernel,
                variant=pattern.variant,
                constants=found,
                program=_renamed(program, mine, pattern),
                tunables=pattern.tunables,
                license=pattern.license,
            )
    return None


def _bound(pattern: Pattern, constants: Sequence[float]) -> dict[str, float] | None:
    """The values of the pattern's named constants; None where one has two values, or a constant of the formula differs."""
    found: dict[str, float] = {}
    terms = zip(pattern.constant_names, pattern.constant_factors, pattern.structure.constants, constants, strict=True)
    for name, factor, wanted, constant in terms:
        if not name and not _is_same(wanted, constant):
            return None
        if name and not _is_same(found.setdefault(name, constant / factor), constant / factor):
            return None
    return found


def _is_same(one: float, other: float) -> bool:
    return one == other or math.isclose(one, other, rel_tol=_RELATIVE) or (math.isnan(one) and math.isnan(other))


def _renamed(program: Program, mine: Structure, pattern: Pattern) -> Program:
    names = dict(zip(mine.operands, pattern.operand_names, strict=True))
    terms = zip(mine.constant_values, pattern.constant_names, pattern.constant_factors, strict=True)
    named = {number: name for number, name, factor in terms if name and factor == 1}
    return with_names(program, [names.get(number, operand.name) for number, operand in enumerate(program.operands)], named)


class _Canonical:
    """One loop nest; ``operands`` collects what it reads and writes by the position in the launch, ``places``."""

    def __init__(self, program: Program, places: Sequence[int], operands: dict[int, int]) -> None:
        self.program = program
        self.places = places
        self.operands = operands
        self.ranks = _ranks(program)
        self.hashes: list[str] = []
        for value in program.values:
            order = order_of(program, len(self.hashes))
            self.hashes.append(self._hash(value) if order is None else self._triangle(order))
        self.seen: dict[int, int] = {}
        self.constants: list[float] = []
        self.constant_values: list[int] = []
        self.parts: list[str] = []

    def run(self) -> Structure:
        stores = sorted(self.program.stores, key=lambda store: (self.hashes[store.value], store.offset, store.value))
        for store in stores:
            rank = self.ranks[store.operand, store.strides, store.offset]
            moved = f"({','.join(self._show(arg) for arg in store.args)})" if store.args else ""
            guard = "" if store.guard is None else f"?{self._show(store.guard)}"
            self.parts.append(f"store[{self._varies(store.strides)}{rank}]{moved}{guard}{self._show(store.value)}")
            self.operands.setdefault(self.places[store.operand], len(self.operands))
        return Structure(
            text=f"{'reduced' if self.program.is_reduced else 'pointwise'};" + ";".join(self.parts),
            constants=tuple(self.constants),
            constant_values=tuple(self.constant_values),
            operands=tuple(self.operands),
        )

    def _children(self, value: Value) -> Sequence[int]:
        if value.op in COMMUTATIVE:
            return sorted(value.args, key=lambda arg: self.hashes[arg])
        return value.args

    def _hash(self, value: Value) -> str:
        """A text that ignores which operand and which constant, for ordering commutative arguments."""
        if value.op == "const":
            return f"{value.dtype}#"
        if value.op == "load":
            guard = "" if value.guard is None else f"?{self.hashes[value.guard]}"
            moved = f"({','.join(self.hashes[arg] for arg in value.args)})" if value.args else ""
            return f"load[{self._varies(value.strides)}{self._shift(value)}]{moved}{guard}"
        arguments = [self.hashes[arg] for arg in value.args]
        if value.op == "dropout":
            arguments.append(self._varies(value.strides))
        if value.op in COMMUTATIVE:
            arguments.sort()
        if value.guard is not None:
            arguments.append(f"?{self.hashes[value.guard]}")
        text = f"{_op_of(value)}.{value.dtype}({','.join(arguments)})"
        return text if len(text) < 400 else f"{value.op}~{hash_text(text)}"

    def _show(self, number: int) -> str:
        if number in self.seen:
            return f"v{self.seen[number]}"
        value = self.program.values[number]
        if value.op == "const":
            return self._show_constant(number, value)
        if value.op == "extent":  # two tables of one length are still two
            return "extent"
        self.seen[number] = len(self.seen)
        name = f"v{self.seen[number]}="
        if value.op == "load":
            operand = self.operands.setdefault(self.places[value.operand], len(self.operands))
            moved = f"({','.join(self._show(arg) for arg in value.args)})" if value.args else ""
            guard = "" if value.guard is None else f"?{self._show(value.guard)}"
            return f"{name}load{operand}[{self._varies(value.strides)}{self._shift(value)}]{moved}{guard}"
        if value.op == "dropout":
            self._show_constant(number, value)
            return f"{name}dropout.{value.dtype}[{self._varies(value.strides)}]({self._show(value.args[0])})"
        if (order := order_of(self.program, number)) is not None:
            return f"{name}{self._triangle(order)}"
        if value.op in ("eq", "ne", "lt", "le", "gt", "ge") and (place := self._place(value)) is not None:
            return f"{name}{value.op}(index,{place})"
        guard = "" if value.guard is None else f"?{self._show(value.guard)}"
        return f"{name}{_op_of(value)}.{value.dtype}({','.join(self._show(arg) for arg in self._children(value))}){guard}"

    def _show_constant(self, number: int, value: Value) -> str:
        self.constants.append(float(value.constant or 0.0))
        self.constant_values.append(number)
        return f"{value.dtype}#"

    def _triangle(self, order: Order) -> str:
        """A triangle is identified by its end in the last row: there causal masks agree, with a cache of keys or without."""
        dims = self.program.dims
        side = "c" if order.column == len(dims) - 1 else "r"
        return f"triangle({side},{order.offset - (dims[order.column] - dims[order.row])})"

    def _place(self, value: Value) -> Fraction | None:
        """``index < 64`` of a dim of 128 is ``index < 1/2``: where a half ends depends on no model's head size."""
        left, right = (self.program.values[arg] for arg in value.args)
        if left.op == "index" and right.op == "const":
            return Fraction(int(right.constant or 0), max(self.program.dims[left.dim], 1))
        return None

    def _varies(self, strides: tuple[int, ...]) -> str:
        """Which dims an address moves along: f all, c the last only, r all but the last, s none, m another mix."""
        sized = [stride != 0 for stride, size in zip(strides, self.program.dims, strict=True) if size != 1]
        if not sized or not any(sized):
            return "s"
        if all(sized):
            return "f"
        if sized[-1] and not any(sized[:-1]):
            return "c"
        return "r" if not sized[-1] and all(sized[:-1]) else "m"

    def _shift(self, value: Value) -> str:
        if value.guard is None or order_of(self.program, value.guard) is not None:
            return self.ranks[value.operand, value.strides, value.offset]
        if value.args or not value.strides or not value.strides[-1]:
            return ""
        return f"{Fraction(value.offset, value.strides[-1] * max(self.program.dims[-1], 1))}"


def _ranks(program: Program) -> dict[tuple[int, tuple[int, ...], int], str]:
    """Which of several like accesses of an operand each is: first half, second half; ``~`` where they alternate column by column.

    A single access has no rank: where a slice begins is the model's business.
    """
    places: dict[tuple[int, tuple[int, ...]], set[int]] = {}
    for value in program.values:
        if value.op == "load" and (value.guard is None or order_of(program, value.guard) is not None):
            places.setdefault((value.operand, value.strides), set()).add(value.offset)
    for store in program.stores:
        places.setdefault((store.operand, store.strides), set()).add(store.offset)
    ranks = {}
    for (operand, strides), offsets in places.items():
        first = min(offsets)
        for rank, offset in enumerate(sorted(offsets)):
            is_between = bool(strides) and offset - first < abs(strides[-1])
            ranks[operand, strides, offset] = "" if len(offsets) == 1 else f"{'~' if is_between and rank else '#'}{rank}"
    return ranks


def _op_of(value: Value) -> str:
    return "round_half" if value.op in ROUNDINGS.values() else value.op


def hash_text(text: str) -> str:
    """Return a short digest."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
