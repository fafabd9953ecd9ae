"""What the passes of CUDA kernels over resident rows spare one another.

Exponentials and what masks choose stay in registers from the first pass that makes them: the compiler finds neither by itself
(masked softmax of 2,048 columns took 30 instructions an element, and takes 17).

A pack of columns that a causal mask hides costs next to nothing. Half of the scores are hidden; all that follows from them is one
number for a whole pack, NaN and infinity included, so that a branch around each pack's work is all it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fusion_advisor.codegen.common.arguments import Schedule
from fusion_advisor.codegen.common.column_passes import Pass
from fusion_advisor.ir.causal_mask import order_of
from fusion_advisor.ir.program import ADDRESSED

_COSTLY = frozenset({"exp", "exp2", "expm1", "log", "log1p", "pow", "sin", "cos", "erf", "erfc", "sigmoid", "tanh"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """A value that one pass computes and later ones need too: it stays in a register for each column."""

    number: int
    made_in: Pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Hidden:
    """How a pass looks where a causal mask hides a whole pack: what is chosen there is one number for all of its columns."""

    limit: int
    """Number of the last column that is seen."""
    chosen: dict[int, int]
    """For each choice that the mask makes, what is chosen outside of it."""
    values: frozenset[int]
    """What is made of those choices alone; of one number for a pack, like them."""


def carried(plan: Schedule, passes: Sequence[Pass]) -> tuple[Carried, ...]:
    """Return the values that are worth a register per column.

    Where a causal mask is, all passes must skip what it hides: no column is taken then that was not made.

    Args:
        plan: the schedule.
        passes: over columns that stay in registers.
    """
    skips = [hidden(plan, step) is not None for step in passes]
    if any(skips) and not all(skips):
        return ()
    costly = _COSTLY if any(skips) else _COSTLY | {"where"}
    values = plan.program.values
    made_in: dict[int, Pass] = {}
    found: dict[int, Pass] = {}
    for step in passes:

        def is_made(number: int) -> bool:
            return number in made_in and values[number].op in costly

        found |= {n: made_in[n] for n in _reached(plan, targets(plan, step), is_made) if is_made(n)}
        for number in step.values:
            made_in.setdefault(number, step)
    return tuple(Carried(number=number, made_in=step) for number, step in sorted(found.items()))


def hidden(plan: Schedule, step: Pass) -> Hidden | None:
    """Return how a pass looks where a causal mask hides a whole pack; None where something else differs between its columns."""
    program = plan.program
    masks = {n: order_of(program, n) for n in {v.args[0] for v in program.values if v.op == "where"}}
    masks = {n: order for n, order in masks.items() if order is not None and order.column == plan.col_dim}
    if len(masks) != 1:
        return None
    (mask,) = masks
    chosen = {
        n: value.args[2]
        for n, value in enumerate(program.values)
        if value.op == "where" and value.args[0] == mask and not plan.has_col(value.args[2])
    }
    reached = _reached(plan, targets(plan, step), lambda n: n in chosen)
    if not reached & set(chosen):
        return None
    made = reached - set(chosen)
    if any(program.values[n].op in ADDRESSED or not program.values[n].args for n in made):
        return None
    return Hidden(
        limit=program.values[mask].args[1],
        chosen={n: fill for n, fill in chosen.items() if n in reached},
        values=frozenset(made),
    )


def targets(plan: Schedule, step: Pass) -> list[int]:
    """What a pass accumulates and what it writes."""
    values, stores = plan.program.values, plan.program.stores
    written = [number for n in step.stores for number in stores[n].needs]
    return [arg for n in step.reductions for arg in values[n].args] + written


def _reached(plan: Schedule, wanted: Sequence[int], is_end: Callable[[int], bool]) -> set[int]:
    """The column-varying values that others are made of, themselves included; an end is not followed further."""
    found: set[int] = set()
    waiting = list(wanted)
    while waiting:
        number = waiting.pop()
        if number in found or not plan.has_col(number):
            continue
        found.add(number)
        value = plan.program.values[number]
        if not is_end(number):
            waiting += [*value.args, *(() if value.guard is None else (value.guard,))]
    return found
