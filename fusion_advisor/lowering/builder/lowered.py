"""A lowered chain, and the elements of its outputs before its loops become dims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fusion_advisor.ir.affine_index import Index
from fusion_advisor.ir.program import Program
from fusion_advisor.records import OpNode


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


def written_by(ops: Mapping[int, OpNode] | Sequence[OpNode], outputs: Sequence[int]) -> tuple[int, ...]:
    """Return the owners of the memory that those of some outputs are written into which are results of in-place ops."""

    def owner_of(index: int) -> int:
        owner = ops[index].alias_of
        return index if owner is None else owner_of(owner)

    return tuple(owner_of(index) for index in outputs if ops[index].mutates)
