"""Shows by running both that a call rounded up gives the results of the call itself, or says why not.

For each size that may vary, each graph that serves a point runs at two sizes near the point: as it is, and rounded up with
several fillings of the padding. What the padding holds may not change a bit of the results. Another size may choose other
kernels: where these change bits, the results must pass the verification of the plan. Where the padding changes results, it is
tried once more with zeros in the masks: a mask says which tokens count.

Nobody asked for these runs. They stop when their share of the time is over, and one that fails (no memory, a size that an op
refuses) leaves the piece as it was, with the reason.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fusion_advisor import units
from fusion_advisor.capture.graph.fx_nodes import draws_numbers, tensors_of
from fusion_advisor.capture.graph.tracer import writes_to_inputs
from fusion_advisor.capture.sizes.open_capture import OpenCapture, Sizes
from fusion_advisor.fuse.cuda_graph.capturable import host_work, place_of, writes_of
from fusion_advisor.fuse.shapes.padding import CannotPad, Fill, Padding, PadForm, capacities, listed, pad_form, rounded_up
from fusion_advisor.fuse.shapes.pieces import Box, contains
from fusion_advisor.fuse.shapes.serve import Served
from fusion_advisor.fuse.shapes.trial_inputs import with_turned_ends, without_evidence
from fusion_advisor.workload.device import is_out_of_memory

_SIZES = 2
"""At which each graph is run."""
_LARGE = 100.0
"""Times a normal number: far outside of what a model reads, and no infinity in float16 after a product."""
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
    """What was shown of a piece.

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
    opened: OpenCapture, box: Box, points: Sequence[Served], given: Given, judge: Judge, pays: Pays | None = None,
    *, names: Sequence[str] | None = None, masked: Sequence[str] = (), budget_s: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> ShownPadding:  # fmt: skip
    """Run the graphs of a piece with padding and without, and compare.

    Args:
        opened: the piece's graph.
        box: its sizes.
        points: what runs near which sizes.
        given: makes inputs.
        judge: verifies.
        pays: measures; None: nothing is timed.
        names: of sizes that were shown before, one by one and together: here they are tried together alone. None: all are tried.
        masked: of those, the sizes along which masks were padded with zeros.
        budget_s: no run starts after so many seconds; None: all run.
        clock: tells the time in seconds.
    """
    served = [point for point in points if point.module is not None]
    wanted = [one.name for one in box if one.least < one.most and (names is None or one.name in names)]
    if not served or not wanted:
        return ShownPadding()
    started = clock()
    reason = next(filter(None, [why_not_tried(opened, point) for point in served]), "")
    try:
        form = pad_form(opened)
    except CannotPad as error:
        reason = reason or str(error)
    if reason:
        return ShownPadding(refused=tuple((name, reason) for name in wanted))
    watch = _Watch(clock=clock, started=started, budget_s=budget_s)
    form = replace(form, masked=frozenset(masked))
    trial = _Trial(opened=opened, box=box, points=served, given=given, judge=judge, form=form, watch=watch)
    found, refused = trial.run(wanted, pays) if names is None else trial.run_together(wanted)
    modules = tuple(trial.modules)
    padding = Padding(names=tuple(found), form=trial.form, modules=modules) if found and modules else None
    return ShownPadding(padding=padding, refused=tuple(refused), seconds=watch.seconds())


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
            if reason and self.form.has_masks(name):
                before, self.form = self.form, replace(self.form, masked=self.form.masked | {name})
                if self._alone_and_with(name, found):
                    self.form = before
                else:
                    reason = ""
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
        if reason := without_evidence(self.opened, self.form, args, names):
            return reason
        reason = self._difference_of(own, args, sizes, larger)
        turned = with_turned_ends(self.form, args)
        return reason if reason or turned is None else self._difference_of(own, turned, sizes, larger)

    def _difference_of(self, own: GraphModule, args: Sequence[Any], sizes: Sizes, larger: Sizes) -> str:
        with torch.no_grad():
            expected = listed(own.forward(*args))
            first: list[Any] | None = None
            for fill in (None, *_fillings(self.opened.region.graph)):  # fused kernels hide which integers are counts
                found = self._padded(own, args, sizes, larger, fill)
                if found is None:
                    return "an input is not contiguous"
                if any(_layout(one) != _layout(other) for one, other in zip(found, expected, strict=True)):
                    return "results are laid out in another way"
                if first is not None and not _are_equal(found, first):
                    return "what the padding holds changes results"
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


def _fillings(module: GraphModule) -> Iterator[Fill]:
    """Yield ways to fill padding: rows that occur, in two orders, and large numbers.

    An integer may be the place of a row in a table, and so may the difference of two: whole rows that the call holds, the same
    ones of all its tensors, are sure to be places. Where a graph computes integers from floats, these stay as they occur too: a
    GPU that reads outside of a table ends its process.
    """
    yield _occurring(seed=0)
    yield _occurring(seed=1)
    if not any(map(_makes_places, module.graph.nodes)):
        yield functools.partial(_large, scale=_LARGE)
        yield functools.partial(_large, scale=-_LARGE)  # what asks whether a number is above another one sees both


def _occurring(seed: int) -> Fill:
    def fill(like: torch.Tensor, dim: int, count: int) -> torch.Tensor:
        numbers = torch.Generator().manual_seed(seed)
        places = torch.randint(like.shape[dim], (count,), generator=numbers)
        return like.index_select(dim, places.to(like.device))

    return fill


def _large(like: torch.Tensor, dim: int, count: int, scale: float) -> torch.Tensor:
    shape = (*like.shape[:dim], count, *like.shape[dim + 1 :])
    if not like.is_floating_point():
        return like.narrow(dim, like.shape[dim] - 1, 1).expand(shape)
    numbers = torch.Generator().manual_seed(2)
    return (torch.randn(shape, generator=numbers) * scale).to(like.device, like.dtype)


_BOUNDED = frozenset({"argmax", "argmin", "argsort", "bucketize", "max", "min", "searchsorted", "sort", "topk"})
"""Ops whose integers lie in their operands, whatever these hold."""


def _makes_places(node: Node) -> bool:
    """Whether an op makes integers of floats, which may be places in a table then."""
    made = {value.dtype for value in tensors_of(node.meta.get("val")) if not value.is_floating_point()} - {torch.bool}
    if node.op != "call_function" or not made:
        return False
    name = getattr(node.target, "_schema", None)
    is_bounded = name is not None and name.name.partition("::")[2] in _BOUNDED
    return not is_bounded and any(
        value.is_floating_point() for source in node.all_input_nodes for value in tensors_of(source.meta.get("val"))
    )


def _text(sizes: Sizes) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


def _layout(value: Any) -> Any:
    return (value.shape, value.stride(), value.dtype) if isinstance(value, torch.Tensor) else value


def _are_equal(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    pairs: Iterator[tuple[Any, Any]] = zip(found, expected, strict=True)
    return all(torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other for one, other in pairs)
