"""Kernel sequences that a trace repeats, found on names alone.

A run is what stands between two kernels that no chain may hold (GEMMs, attention, copies); layers and steps repeat their runs,
so the runs that differ are few however long the trace is. Among them the sequence is taken that promises most: the time of all
its places, less the one kernel that would be left of n (n − 1 of n parts). It is cut out everywhere, and the rest is searched
again. A sequence that is itself a repeat (both rotations of one attention block) counts as its shortest period.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

LONGEST = 32
_MOST_ITEMS = 20_000
"""Different items that are searched at most; a trace of a model has some hundred. What is found is counted in the others too."""
_MOST_BEYOND = 10
"""Sequences that are taken at most where not all items can be searched: each is looked for everywhere, and noise has no end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """One sequence and its places."""

    items: tuple[Hashable, ...]
    places: tuple[tuple[int, int], ...]
    """(run, position of its first item), in the order of the runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """Repeats found in a trace's runs."""

    found: tuple[Repeat, ...]
    """In the order in which they were taken."""
    searched_share: float
    """Share of the runs' cost in which sequences were looked for; below 1 only where more than 20,000 items differ."""


@dataclass(frozen=True, slots=True)
class _Fragment:
    """What is left of a run; equal runs share theirs."""

    group: int
    start: int
    items: tuple[Hashable, ...]
    costs: tuple[int, ...]
    """Summed over the equal runs."""
    count: int
    """How many runs are equal."""


def find_repeats(runs: Sequence[Sequence[Hashable]], costs: Sequence[Sequence[int]], *, least_cost: float = 0.0) -> Repeats:
    """Return the sequences of at least two items that occur at least twice.

    Args:
        runs: names in order; equal items compare equal.
        costs: of each item, in any unit.
        least_cost: sequences whose places cost less together are left.
    """
    members, fragments, others = _grouped(runs, costs)
    searched = sum(sum(fragment.costs) for fragment in fragments)
    total = searched + sum(sum(fragment.costs) for fragment in others)
    share = searched / total if total else 1.0
    found: list[Repeat] = []
    while (not others or len(found) < _MOST_BEYOND) and (best := _best(fragments)) is not None:
        items, cost = best
        if cost < least_cost * share or cost <= 0:
            break
        places: list[tuple[int, int]] = []
        fragments = list(_taken(fragments, items, members, places))
        others = list(_taken(others, items, members, places))
        found.append(Repeat(items=items, places=tuple(sorted(places))))
    return Repeats(found=tuple(found), searched_share=share)


def _taken(
    fragments: Iterable[_Fragment], items: tuple[Hashable, ...], members: Sequence[Sequence[int]], places: list[tuple[int, int]]
) -> Iterator[_Fragment]:
    """Cut a sequence out of fragments: add its places to ``places`` and yield what is left."""
    for fragment in fragments:
        starts = list(_starts(fragment.items, items))
        places += [(run, fragment.start + start) for run in members[fragment.group] for start in starts]
        yield from _without(fragment, starts, len(items))


def _grouped(
    runs: Sequence[Sequence[Hashable]], costs: Sequence[Sequence[int]]
) -> tuple[list[list[int]], list[_Fragment], list[_Fragment]]:
    """Group equal runs, most expensive first: (their numbers, what can be searched, what is beyond that)."""
    equal: dict[tuple[Hashable, ...], list[int]] = {}
    for number, run in enumerate(runs):
        equal.setdefault(tuple(run), []).append(number)
    summed = {
        items: tuple(map(sum, zip(*(costs[number] for number in numbers), strict=True))) for items, numbers in equal.items()
    }
    members: list[list[int]] = []
    searched: list[_Fragment] = []
    others: list[_Fragment] = []
    room = _MOST_ITEMS
    for items, numbers in sorted(equal.items(), key=lambda entry: -sum(summed[entry[0]])):
        group, own, count = len(members), summed[items], len(numbers)
        members.append(numbers)
        if room:
            searched.append(_Fragment(group, 0, items[:room], own[:room], count))
        if items[room:]:
            others.append(_Fragment(group, room, items[room:], own[room:], count))
        room = max(0, room - len(items))
    return members, searched, others


def _best(fragments: Sequence[_Fragment]) -> tuple[tuple[Hashable, ...], int] | None:
    """Return the sequence that promises most, as its shortest period, and the cost of all its places.

    Sequences grow item by item, and only where the shorter one occurs twice, since a longer one cannot occur more often.
    """
    best: tuple[float, tuple[Hashable, ...], int] | None = None
    names: dict[Hashable, int] = {}
    rows = [[names.setdefault(item, len(names)) for item in fragment.items] for fragment in fragments]
    sums = [_running(fragment.costs) for fragment in fragments]
    ids = [list(row) for row in rows]
    for length in range(2, LONGEST + 1):
        grown: dict[tuple[int, int], int] = {}
        counts: list[int] = []
        costs: list[int] = []
        last: list[tuple[int, int]] = []
        first: list[tuple[int, int]] = []
        for number, (row, row_ids, run_sums) in enumerate(zip(rows, ids, sums, strict=True)):
            count = fragments[number].count
            for at in range(len(row) - length + 1):
                if row_ids[at] < 0:
                    continue
                key = (row_ids[at], row[at + length - 1])
                own = grown.setdefault(key, len(grown))
                if own == len(counts):
                    counts.append(0)
                    costs.append(0)
                    last.append((-1, 0))
                    first.append((number, at))
                row_ids[at] = own
                if last[own][0] != number or last[own][1] <= at:  # places do not overlap
                    last[own] = (number, at + length)
                    counts[own] += count
                    costs[own] += run_sums[at + length] - run_sums[at]
            del row_ids[max(0, len(row) - length + 1) :]
        for own, count in enumerate(counts):
            promise = costs[own] * (length - 1) / length
            if count >= 2 and (best is None or promise > best[0]):
                number, at = first[own]
                best = (promise, fragments[number].items[at : at + length], costs[own])
        repeated = [count >= 2 for count in counts]
        if not any(repeated):
            break
        ids = [[own if own >= 0 and repeated[own] else -1 for own in row_ids] for row_ids in ids]
    return None if best is None else (_period(best[1]), best[2])


def _running(costs: Sequence[int]) -> list[int]:
    sums = [0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    return sums


def _period(items: tuple[Hashable, ...]) -> tuple[Hashable, ...]:
    """Return the shortest sequence of at least two items that ``items`` repeats."""
    for length in range(2, len(items) // 2 + 1):
        if len(items) % length == 0 and items == items[:length] * (len(items) // length):
            return items[:length]
    return items


def _starts(items: Sequence[Hashable], wanted: tuple[Hashable, ...]) -> Iterator[int]:
    at = 0
    while at <= len(items) - len(wanted):
        if items[at] == wanted[0] and tuple(items[at : at + len(wanted)]) == wanted:
            yield at
            at += len(wanted)
        else:
            at += 1


def _without(fragment: _Fragment, starts: Sequence[int], length: int) -> Iterator[_Fragment]:
    """Yield what is left of a fragment between the places that were taken, if it is more than one item."""
    at = 0
    for start in (*starts, len(fragment.items)):
        if start - at > 1:
            yield _Fragment(
                fragment.group, fragment.start + at, fragment.items[at:start], fragment.costs[at:start], fragment.count
            )
        at = start + length
