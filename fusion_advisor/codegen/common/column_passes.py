"""Walks over the columns of a reduced Program: which values, reductions and stores belong to which.

In: a schedule, and the sums that are accumulated together. Out: the values known before the first walk, and the walks in order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fusion_advisor.codegen.common.arguments import Schedule
from fusion_advisor.codegen.common.online_softmax import OnlineSum
from fusion_advisor.codegen.common.welford import Moments
from fusion_advisor.ir.program import REDUCTIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One walk over the columns, in kernels that walk them more than once."""

    values: tuple[int, ...]
    """Column-varying values that the pass computes, in order."""
    reductions: tuple[int, ...]
    """What it accumulates."""
    stores: tuple[int, ...]
    """Positions in ``program.stores`` of what it writes."""
    after: tuple[int, ...] = ()
    """Row values that are known once it has run, the reductions left out."""
    online: tuple[OnlineSum, ...] = ()
    """Pairs of a maximum and a sum that it accumulates together; they are not in ``reductions``."""
    moments: tuple[Moments, ...] = ()
    """Pairs of a sum and a sum of squares that it accumulates together; they are not in ``reductions``. Their means are in
    ``after``, and known before the squares are."""


def column_passes(
    plan: Schedule, online: tuple[OnlineSum, ...] = (), moments: tuple[Moments, ...] = ()
) -> tuple[tuple[int, ...], tuple[Pass, ...]]:
    """Split a reduced Program into walks over the columns.

    A reduction belongs to the pass after the reductions that it depends on; a store to the first pass that can write it.

    Args:
        plan: the schedule.
        online: sums that belong to the pass of their maximum.
        moments: sums of squares that belong to the pass of their sum.

    Returns:
        the row values that are known before the first pass, and the passes.
    """
    levels = _levels(plan, online, moments)
    writable = _writable(plan, levels)
    row_values: dict[int, list[int]] = {}
    for number, value in enumerate(plan.program.values):
        if not plan.has_col(number) and value.op not in REDUCTIONS:
            row_values.setdefault(levels[number], []).append(number)
    passes = []
    for level in range(max(levels, default=0) + 1):
        stores = tuple(n for n, ready in enumerate(writable) if ready == level and plan.stores_col(n))
        found = _pass_at(plan, levels, level, stores, online, moments)
        if found is not None:
            passes.append(replace(found, after=tuple(row_values.get(level + 1, ()))))
    return tuple(row_values.get(0, ())), tuple(passes)


def _levels(plan: Schedule, online: tuple[OnlineSum, ...], moments: tuple[Moments, ...]) -> list[int]:
    """Return for each value how many walks end before it is known."""
    together = _first_of(online, moments)
    levels: list[int] = []
    for number, value in enumerate(plan.program.values):
        if number in together:
            levels.append(levels[together[number]])
            continue
        args = (*value.args, *(() if value.guard is None else (value.guard,)))
        levels.append(max((levels[a] for a in args), default=0) + (value.op in REDUCTIONS))
    return levels


def _first_of(online: tuple[OnlineSum, ...], moments: tuple[Moments, ...]) -> dict[int, int]:
    """Return for each reduction that is accumulated together with another the one that comes first."""
    return {pair.total: pair.highest for pair in online} | {pair.squares: pair.total for pair in moments}


def _writable(plan: Schedule, levels: list[int]) -> list[int]:
    """Return for each store the level from which it can be written; a pair is written as one."""
    found = [max(levels[number] for number in store.needs) for store in plan.program.stores]
    for even, odd in plan.pairs.stores:
        found[even] = found[odd] = max(found[even], found[odd])
    return found


def _pass_at(
    plan: Schedule,
    levels: list[int],
    level: int,
    stores: tuple[int, ...],
    online: tuple[OnlineSum, ...],
    moments: tuple[Moments, ...],
) -> Pass | None:
    """Return the walk of a level, but for ``after``; None where it has nothing to accumulate or to write."""
    values = plan.program.values
    reductions = [n for n, v in enumerate(values) if v.op in REDUCTIONS and levels[n] == level + 1]
    if not reductions and not stores:
        return None
    together = _first_of(online, moments)
    paired = {*together, *together.values()}
    targets = [a for r in reductions for a in values[r].args if r not in together]
    targets += [number for n in stores for number in plan.program.stores[n].needs]
    return Pass(
        values=tuple(needed_in_columns(plan, targets)),
        reductions=tuple(r for r in reductions if r not in paired),
        stores=stores,
        online=tuple(pair for pair in online if levels[pair.highest] == level + 1),
        moments=tuple(pair for pair in moments if levels[pair.total] == level + 1),
    )


def late_loads(plan: Schedule) -> frozenset[int]:
    """Loads that nothing needs before the last reduction is known and that all rows share, where there are two or more.

    Weight and bias come from the cache and would only hold registers until the row's statistics are known.
    """
    values = plan.program.values
    last = max((n for n, v in enumerate(values) if v.op in REDUCTIONS), default=len(values))
    used_before = {a for v in values[: last + 1] for a in (*v.args, *(() if v.guard is None else (v.guard,)))}
    late = {n for n, v in enumerate(values) if v.op == "load" and v.guard is None and not plan.has_row(n)} - used_before
    return frozenset(late if len(late) > 1 else ())


def needed_in_columns(plan: Schedule, targets: list[int]) -> list[int]:
    """The column-varying values that some others are made of, themselves included, in order."""
    found: set[int] = set()
    waiting = list(targets)
    while waiting:
        number = waiting.pop()
        if number in found or not plan.has_col(number):
            continue
        found.add(number)
        value = plan.program.values[number]
        waiting += [*value.args, *(() if value.guard is None else (value.guard,))]
    return sorted(found)


def parts_of(plan: Schedule) -> frozenset[int]:
    """Quotients of the column, and what is read at them: one number for all columns of a tile that no part of the row ends in.

    Empty where anything is added up or written per column that is made of nothing else.
    """
    program, col = plan.program, plan.col_dim
    found: set[int] = set()
    for number, value in enumerate(program.values):
        is_read_at_them = value.op == "load" and value.guard is None and value.strides[-1] == 0
        if value.op == "quotient" or (is_read_at_them and any(arg in found for arg in value.args)):
            found.add(number)
    used = {arg for value in program.values if value.op in REDUCTIONS for arg in value.args}
    used |= {number for store in program.stores for number in store.needs}
    made = set(found)
    for number, value in enumerate(program.values):
        if not made.isdisjoint(value.args):
            made.add(number)
    is_plain = all(col in plan.varies[number] for number in found) and used.isdisjoint(found)
    for number, value in enumerate(program.values):
        if value.op == "load" and number not in found and not made.isdisjoint(value.args):
            # Where nothing else moves it along the row, its address would be one number for a tile, and its mask would not.
            is_plain = is_plain and value.strides[-1] != 0 and found.isdisjoint(value.args)
    return frozenset(found if is_plain else ())
