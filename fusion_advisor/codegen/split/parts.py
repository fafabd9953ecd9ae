"""A Program as a sequence of smaller ones: what each reads and writes, and the scratch tensors between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fusion_advisor.ir.program import Operand, Program, Store, Value
from fusion_advisor.records import Tuning


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One launch of the sequence.

    Attributes:
        program: what it computes.
        operands: for each of its operands, its number among the whole Program's, or -1 - n for scratch tensor n.
        tuning: its launch parameters.
        does: what it is for, in a word that may stand in its kernel's name.
    """

    program: Program
    operands: tuple[int, ...]
    tuning: Tuning
    does: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Scratch:
    """A tensor that lives as long as one call."""

    dtype: str
    elements: int
    rounded_to: str = ""
    """The dtype that all that comes of it is rounded to; empty where that is no narrower one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A Program as several launches, in order."""

    parts: tuple[Part, ...]
    scratch: tuple[Scratch, ...]


class Copier:
    """Writes values of a Program into another nest.

    Args:
        program: whose values are copied.
        dims: of the new nest.
        leaf: given a value's number, returns what stands for it in the new nest; None: a copy with its arguments.
    """

    def __init__(self, program: Program, dims: tuple[int, ...], leaf: Callable[[Copier, int], Value | int | None]) -> None:
        self._program = program
        self._dims = dims
        self._leaf = leaf
        self._made: dict[int, int] = {}
        self.values: list[Value] = []

    def emit(self, value: Value) -> int:
        """Append a value, or return the number of an equal one."""
        constant = str(value.constant)  # 0.0 and -0.0 are equal
        found = next((n for n, one in enumerate(self.values) if one == value and str(one.constant) == constant), None)
        if found is not None:
            return found
        self.values.append(value)
        return len(self.values) - 1

    def copy(self, number: int) -> int:
        """Copy a value and all that it is made of; returns its new number."""
        if number not in self._made:
            found = self._leaf(self, number)
            if found is None:
                value = self._program.values[number]
                found = replace(value, args=tuple(self.copy(arg) for arg in value.args))
            self._made[number] = found if isinstance(found, int) else self.emit(found)
        return self._made[number]

    def part(
        self, stores: Sequence[Store], scratch: Sequence[Scratch], tuning: Tuning, does: str, *, is_reduced: bool
    ) -> Part:  # fmt: skip
        """Return the launch of what was copied.

        Args:
            stores: with new numbers of values; operands as in the values: -1 - n is scratch tensor n.
            scratch: all scratch tensors.
            tuning: launch parameters.
            does: what it is for.
            is_reduced: whether its last dim is reduced.
        """
        read = sorted({value.operand for value in self.values if value.op == "load"}, key=_inputs_first)
        order = (*read, *dict.fromkeys(store.operand for store in stores))
        place = {operand: number for number, operand in enumerate(order)}
        written = {store.operand for store in stores}

        def operand_of(number: int) -> Operand:
            if number >= 0:
                return self._program.operands[number]
            one = scratch[-1 - number]
            is_output = number in written
            return Operand(
                name=scratch_name(number), dtype=one.dtype, is_output=is_output, element_count=one.elements,
                rounded_to=one.rounded_to if is_output else "",
            )  # fmt: skip

        program = Program(
            dims=self._dims,
            operands=tuple(map(operand_of, order)),
            values=tuple(replace(v, operand=place[v.operand]) if v.op == "load" else v for v in self.values),
            stores=tuple(replace(store, operand=place[store.operand]) for store in stores),
            is_reduced=is_reduced,
        )
        return Part(program=program, operands=order, tuning=tuning, does=does)


def scratch_name(number: int) -> str:
    """Return the name of scratch tensor n, of which ``number`` is -1 - n."""
    return f"scratch{-number}"


def _inputs_first(operand: int) -> tuple[bool, int]:
    """The whole Program's operands in their order, then scratch tensors in theirs."""
    return operand < 0, abs(operand)
