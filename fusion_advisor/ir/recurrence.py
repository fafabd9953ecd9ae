"""A recurrence over time as one loop nest whose first dim is time and is walked in order.

``h[t] = f(h[t-1], inputs at t)`` and ``row[t] = g(h[t], inputs at t)`` are the values of one Program. The state is an operand
that the kernel reads before the first step and writes after the last one. In between, a kernel holds it in registers or in a
cache: a load of it is the state before a step, and the store to it is the state after.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fusion_advisor.ir.program import ADDRESSED, ITEM_BYTES, REDUCTIONS, Program, Value


class NoRecurrence(Exception):
    """Programs that are not one step each of a recurrence that a kernel can walk; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """What a kernel walks.

    Attributes:
        program: its dims are time, rows, columns; at least three.
        state: number of the operand that holds the state: an output that is read too.
    """

    program: Program
    state: int

    @property
    def steps(self) -> int:
        """How many there are."""
        return self.program.dims[0]

    @property
    def state_loads(self) -> frozenset[int]:
        """Numbers of the values that are the state before a step."""
        values = enumerate(self.program.values)
        return frozenset(number for number, value in values if value.op == "load" and value.operand == self.state)

    @property
    def moved_bytes(self) -> int:
        """Each input read once, each output written once; the state read and written once in all steps together."""
        state = self.program.operands[self.state]
        return self.program.moved_bytes + state.element_count * ITEM_BYTES[state.dtype]


def over_time(steps: dict[int, Program], count: int, before: int) -> Recurrence:
    """Join the Programs of some steps, which differ in nothing but where they read, into one over time.

    Args:
        steps: Programs of steps 0, 1, 2 and the last, by number. Each writes its state first and its row second. What each
            address grows by from step 1 to step 2 it is known to grow by at every step.
        count: number of steps.
        before: number of the operand that is the state before a step.

    Raises:
        NoRecurrence: they differ in more, or a kernel cannot walk them.
    """
    first, second = steps[1], steps[2]
    if first.siblings or first.is_exact or len(first.stores) != 2:
        raise NoRecurrence("a step is no single loop nest that writes a state and a row")
    loads = [number for number, value in enumerate(first.values) if value.op == "load"]
    grows = {number: _growth(first.values[number], second.values[number : number + 1]) for number in loads}
    for number, program in steps.items():
        if program != _moved(first, grows, number - 1):
            raise NoRecurrence(f"step {number} reads other elements than step 1, and not by an even distance further on")
    _refuse(first, before, grows)
    return _joined(_moved(first, grows, -1), grows, count, before)


def _growth(value: Value, other: tuple[Value, ...]) -> int:
    return other[0].offset - value.offset if other else 0


def _moved(program: Program, grows: dict[int, int], steps: int) -> Program:
    values = list(program.values)
    for number, distance in grows.items():
        values[number] = replace(values[number], offset=values[number].offset + steps * distance)
    return replace(program, values=tuple(values))


def _refuse(program: Program, before: int, grows: dict[int, int]) -> None:
    """Raise NoRecurrence for what no kernel of ours walks."""
    state, row = program.stores
    reads = [value for value in program.values if value.op == "load" and value.operand == before]
    if not reads:
        raise NoRecurrence("a step reads no state")
    if any(value.strides != state.strides or value.offset or value.guard is not None or value.args for value in reads):
        raise NoRecurrence("a step reads other elements of the state than the one that it writes")
    if any(store.guard is not None or store.args or store.offset for store in (state, row)):
        raise NoRecurrence("a step writes some elements only")
    if any(program.values[number].op in REDUCTIONS for number in _needed(program, state.value)):
        raise NoRecurrence("the state of a step depends on a sum over the state before")
    dtypes = {program.values[store.value].dtype for store in (state, row)}
    if any(program.values[number].op in ("inside", "dropout") for number in range(len(program.values))):
        raise NoRecurrence("a step reads by positions that are computed, or draws random numbers")
    if not dtypes <= {"float32", "float64"}:
        raise NoRecurrence("the state is no floating-point number")
    if any(size > 1 and stride == 0 for size, stride in zip(program.dims, state.strides, strict=True)):
        raise NoRecurrence("a step computes more elements than the state has")
    del grows


def _needed(program: Program, root: int) -> set[int]:
    found: set[int] = set()
    waiting = [root]
    while waiting:
        number = waiting.pop()
        if number not in found:
            found.add(number)
            waiting += program.values[number].args
    return found


def _joined(program: Program, grows: dict[int, int], count: int, before: int) -> Recurrence:
    missing = max(0, 2 - len(program.dims))
    pad = (0,) * missing

    def value_over_time(number: int, value: Value) -> Value:
        if value.op in ADDRESSED:
            return replace(value, strides=(grows.get(number, 0), *pad, *value.strides))
        return replace(value, dim=value.dim + 1 + missing) if value.op in ("index", "size") else value

    state, row = program.stores
    wide = program.values[state.value].dtype
    kept = [number for number in range(len(program.operands)) if number != before]
    new = {old: place for place, old in enumerate(kept)}
    new[before] = new[state.operand]
    operands = [replace(program.operands[old], name="state", dtype=wide) if old == state.operand else program.operands[old]
                for old in kept]  # fmt: skip
    reads = {value.operand for number, value in enumerate(program.values) if grows.get(number)}
    for old in (*reads, row.operand):
        place = new[old]
        operands[place] = replace(operands[place], element_count=operands[place].element_count * count)
    values = [
        replace(over, operand=new[over.operand], dtype=wide if over.operand == before else over.dtype)
        if over.op == "load" else over
        for over in (value_over_time(number, value) for number, value in enumerate(program.values))
    ]  # fmt: skip
    stores = (
        replace(state, operand=new[state.operand], strides=(0, *pad, *state.strides)),
        replace(row, operand=new[row.operand], strides=(0, *pad, *row.strides)),
    )
    whole = replace(
        program, dims=(count, *(1,) * missing, *program.dims), operands=tuple(operands), values=tuple(values), stores=stores
    )
    return Recurrence(program=whole, state=new[state.operand])


def with_row_stride(recurrence: Recurrence, stride: int) -> Recurrence:
    """Return a recurrence whose rows lie ``stride`` elements after one another."""
    state, row = recurrence.program.stores
    stores = (state, replace(row, strides=(stride, *row.strides[1:])))
    return replace(recurrence, program=replace(recurrence.program, stores=stores))
