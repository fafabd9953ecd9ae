"""Runs calls of a size of which it was proved that padding changes nothing, padded and as they are, and compares.

The proof (:mod:`fusion_advisor.fuse.shapes.proved_sizes`) is of what the model computes. These runs check the kernels: each graph
that serves a point runs at two sizes near the point, as it is and rounded up with two fillings of the padding. What the padding
holds may not change a bit of the results. Another size may choose other kernels: where these change bits, the results must pass
the verification of the plan.

Nobody asked for these runs. They stop when their share of the time is over, and one that fails (no memory, a size that an op
refuses) leaves the piece as it was, with the reason.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule

from fusion_advisor import units
from fusion_advisor.capture.graph.fx_nodes import draws_numbers
from fusion_advisor.capture.graph.tracer import writes_to_inputs
from fusion_advisor.capture.sizes.open_capture import OpenCapture, Sizes
from fusion_advisor.fuse.cuda_graph.capturable import host_work, place_of, writes_of
from fusion_advisor.fuse.shapes.padding import Fill, Padding, PadForm, capacities, listed, rounded_up
from fusion_advisor.fuse.shapes.pieces import Box, Served, contains
from fusion_advisor.fuse.shapes.proved_sizes import ProvedSizes
from fusion_advisor.workload.device import is_out_of_memory

_SIZES = 2
"""At which each graph is run."""
_FAILURES = (RuntimeError, IndexError, ValueError, TypeError, MemoryError)
"""Of a call at sizes that nobody asked for."""
WRITES = "the call writes to its arguments (a decode step writes to its static cache), so it would write padding there"

Given = Callable[[Sizes], Sequence[Any]]
"""Returns what the piece's graph is called with at some sizes."""
Judge = Callable[[Sequence[Any], Callable[..., Any]], str]
"""Verifies what runs in place of the piece's graph on some inputs; says what is wrong."""
Pays = Callable[[GraphModule, Sequence[Any], PadForm, Sizes, Sizes], str]
"""Says why a graph of larger sizes does not pay for a call, given the graph, its inputs, the form, and both sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownPadding:
    """What came of the runs of a piece.

    Attributes:
        padding: what may be rounded up; None: nothing.
        refused: names of the other sizes, with the reason; sizes of points near which it does not pay likewise.
        seconds: that the runs took.
    """

    padding: Padding | None = None
    refused: tuple[tuple[str, str], ...] = ()
    seconds: float = 0.0

    def serves(self, point: Served) -> bool:
        """Whether calls near a point may be rounded up."""
        return self.padding is not None and any(map(self.padding.serves, point.modules))

    @property
    def names(self) -> tuple[str, ...]:
        """The sizes that may be rounded up."""
        return () if self.padding is None else self.padding.names

    def capacities(self, box: Box) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Return what each padded size of a piece is rounded up to."""
        return tuple((one.name, capacities(one)) for one in box if one.name in self.names)


def show_padding(
    opened: OpenCapture, box: Box, points: Sequence[Served], proved: ProvedSizes, given: Given, judge: Judge,
    pays: Pays | None = None, *, names: Sequence[str] | None = None, budget_s: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> ShownPadding:  # fmt: skip
    """Run the graphs of a piece with padding and without, and compare.

    Args:
        opened: the piece's graph.
        box: its sizes.
        points: what runs near which sizes.
        proved: of which sizes it was proved that padding changes nothing.
        given: makes inputs.
        judge: verifies.
        pays: measures; None: nothing is timed.
        names: of sizes that were run before, one by one and together: here they are run together alone. None: all are run.
        budget_s: no run starts after so many seconds; None: all run.
        clock: tells the time in seconds.
    """
    served = [point for point in points if point.module is not None]
    wanted = [one.name for one in box if one.least < one.most and (names is None or one.name in names)]
    if not served or not wanted:
        return ShownPadding()
    started = clock()
    reason = next(filter(None, [why_not_tried(opened, point) for point in served]), "")
    refused = [(name, reason or proved.refused.get(name, "")) for name in wanted if reason or name not in proved.names]
    wanted = [] if reason or (names is not None and refused) else [name for name in wanted if name in proved.names]
    if proved.form is None or not wanted:
        return ShownPadding(refused=tuple(refused))
    watch = _Watch(clock=clock, started=started, budget_s=budget_s)
    trial = _Trial(opened=opened, box=box, points=served, given=given, judge=judge, form=proved.form, watch=watch)
    found, unequal = trial.run(wanted, pays) if names is None else trial.run_together(wanted)
    modules = tuple(trial.modules)
    padding = Padding(names=tuple(found), form=trial.form, modules=modules) if found and modules else None
    return ShownPadding(padding=padding, refused=(*refused, *unequal), seconds=watch.seconds())


def why_not_tried(opened: OpenCapture, point: Served) -> str:
    """Say why a piece's graph may not even be run with padding; empty where it may."""
    if writes_to_inputs(opened.region) or not all(writes_of(module)[1] for module in point.modules):
        return WRITES
    drawn = next(filter(draws_numbers, opened.region.graph.graph.nodes), None)
    if drawn is not None:
        return f"it draws random numbers in {place_of(drawn)}, and a larger call draws others"
    return next(filter(None, map(host_work, point.modules)), "")


class _TimeIsUp(Exception):
    """The text says after how long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Watch:
    """The time that a trial may take."""

    clock: Callable[[], float]
    started: float
    budget_s: float | None

    def seconds(self) -> float:
        """Return how long the trial has taken."""
        return self.clock() - self.started

    def look(self) -> None:
        """End the trial if its time is up.

        Raises:
            _TimeIsUp: it is.
        """
        taken = self.seconds()
        if self.budget_s is not None and taken >= self.budget_s:
            raise _TimeIsUp(f"its trial was cut short after {units.seconds(taken)}, its share of the time")


@dataclass(slots=True, kw_only=True)
class _Trial:
    """The comparisons of one piece."""

    opened: OpenCapture
    box: Box
    points: Sequence[Served]
    given: Given
    judge: Judge
    form: PadForm
    watch: _Watch
    modules: list[GraphModule] = field(default_factory=list)

    def run(self, wanted: Sequence[str], pays: Pays | None) -> tuple[list[str], list[tuple[str, str]]]:
        """Return the names of sizes that may be rounded up, and the others with the reason."""
        found: list[str] = []
        refused: list[tuple[str, str]] = []
        if pays is not None:  # first, as it costs least: long calls rarely gain, and verifying them takes longest
            reasons = [(point, _tried(functools.partial(self.costs, point, wanted, pays))) for point in self.points]
            refused += [(f"{', '.join(wanted)} near {_text(point.sizes)}", reason) for point, reason in reasons if reason]
            self.points = [point for point, reason in reasons if not reason]
        for name in wanted if self.points else ():
            reason = self._alone_and_with(name, found)
            if reason:
                refused.append((name, reason))
            else:
                found.append(name)
        return found, refused

    def _alone_and_with(self, name: str, found: Sequence[str]) -> str:
        """Say why a size may not be rounded up, by itself or with those that may."""
        reason = _tried(functools.partial(self.why_not, (name,)))
        return reason or (_tried(functools.partial(self.why_not, (*found, name))) if found else "")

    def run_together(self, names: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
        """Return all names or none; the latter with the reason."""
        reason = _tried(functools.partial(self.why_not, names))
        return ([], [(name, reason) for name in names]) if reason else (list(names), [])

    def why_not(self, names: Sequence[str]) -> str:
        """Say why sizes may not be rounded up together; empty where they may."""
        for point in self.points:
            trials = list(_near(point.sizes, names, self.box))[:_SIZES]
            if len(trials) < _SIZES:
                return "nearly all of its sizes here are capacities themselves"
            for sizes in trials:
                reason = self._difference(point, sizes, names)
                if reason:
                    return f"{reason} at {_text(sizes)}"
        return ""

    def costs(self, point: Served, names: Sequence[str], pays: Pays) -> str:
        """Say why a graph of larger sizes does not pay near a point; empty where it does, or where there is none to time."""
        self.watch.look()
        sizes = next(_near(point.sizes, names, self.box), None)
        if sizes is None:
            return ""
        larger = rounded_up(sizes, names, self.box)
        if self._why_not_at(point, sizes, larger) or self.form.pad(self.given(sizes), larger) is None:
            return ""
        with torch.no_grad():
            return pays(point.graph_at(_key(self.opened, sizes)), self.given(sizes), self.form, sizes, larger)

    def _difference(self, point: Served, sizes: Sizes, names: Sequence[str]) -> str:
        self.watch.look()
        larger = rounded_up(sizes, names, self.box)
        if reason := self._why_not_at(point, sizes, larger):
            return reason
        own = point.graph_at(_key(self.opened, sizes))
        args = self.given(sizes)
        with torch.no_grad():
            expected = listed(own.forward(*args))
            first: list[Any] | None = None
            for fill in (None, _occurring):
                found = self._padded(own, args, sizes, larger, fill)
                if found is None:
                    return "an input is not contiguous"
                if any(_layout(one) != _layout(other) for one, other in zip(found, expected, strict=True)):
                    return "results are laid out in another way"
                if first is not None and not _are_equal(found, first):
                    return "a kernel lets what the padding holds change results"
                first = found if first is None else first
            problem = ""
            if not _are_equal(first or [], expected):
                problem = self.judge(args, lambda *inputs: self._whole(own, inputs, sizes, larger))
            if not problem and own not in self.modules:
                self.modules.append(own)
        return f"padding changes results: {problem}" if problem else ""

    def _why_not_at(self, point: Served, sizes: Sizes, larger: Sizes) -> str:
        if not self.opened.holds(larger):
            return f"the model does something else at the capacity, {_text(larger)},"
        own, at_capacity = (point.graph_at(_key(self.opened, one)) for one in (sizes, larger))
        return "" if own is at_capacity else "its capacity is served by another graph"

    def _whole(self, module: GraphModule, args: Sequence[Any], sizes: Sizes, larger: Sizes) -> Any:
        padded = self.form.pad(args, larger)
        return self.form.cut(module.forward(*(args if padded is None else padded)), sizes)

    def _padded(
        self, module: GraphModule, args: Sequence[Any], sizes: Sizes, larger: Sizes, fill: Fill | None
    ) -> list[Any] | None:
        padded = self.form.pad(args, larger, fill)
        return None if padded is None else listed(self.form.cut(module.forward(*padded), sizes))


def _tried(why_not: Callable[[], str]) -> str:
    """Return what a trial says, or how it ended."""
    try:
        return why_not()
    except _TimeIsUp as error:
        return str(error)
    except torch.AcceleratorError:  # the device is of no more use in this process: all that follows would fail too
        raise
    except _FAILURES as error:
        if is_out_of_memory(error):
            return "there was no memory for the larger call"
        return f"the larger call fails: {(str(error) or type(error).__name__).strip().splitlines()[0]}"


def _key(opened: OpenCapture, sizes: Sizes) -> tuple[int, ...]:
    return tuple(sizes[name] for name in opened.slots())


def _near(sizes: Sizes, names: Sequence[str], box: Box) -> Iterator[dict[str, int]]:
    """Yield the sizes nearest to a point of which all that are named are rounded up, smaller ones first."""
    ladders: dict[str, list[int]] = {}
    for one in box:
        if one.name in names:
            own = range(one.least, one.most + 1)
            rising = [size for size in own if rounded_up({one.name: size}, names, box)[one.name] > size]
            middle = sizes[one.name]
            by_distance = sorted((abs(size - middle), size) for size in rising)
            ladders[one.name] = [size for _, size in by_distance]
    for together in zip(*ladders.values(), strict=False):
        found = {**sizes, **dict(zip(ladders, together, strict=True))}
        if contains(box, found):
            yield found


def _occurring(like: torch.Tensor, dim: int, count: int) -> torch.Tensor:
    """Fill padding with whole rows of the call in another order: what they hold is sure to be a place in a table."""
    numbers = torch.Generator().manual_seed(0)
    return like.index_select(dim, torch.randint(like.shape[dim], (count,), generator=numbers).to(like.device))


def _text(sizes: Sizes) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


def _layout(value: Any) -> Any:
    return (value.shape, value.stride(), value.dtype) if isinstance(value, torch.Tensor) else value


def _are_equal(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    pairs: Iterator[tuple[Any, Any]] = zip(found, expected, strict=True)
    return all(torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other for one, other in pairs)
