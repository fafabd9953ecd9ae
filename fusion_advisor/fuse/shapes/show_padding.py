"""Shows by running both that a call rounded up gives the results of the call itself, or says why not.

For each size that may vary, each graph that serves a point runs at two sizes near the point: as it is, and rounded up with
several fillings of the padding. What the padding holds may not change a bit of the results. Another size may choose other
kernels: where these change bits, the results must pass the verification of the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fusion_advisor.capture.graph.tracer import writes_to_inputs
from fusion_advisor.capture.sizes.open_capture import OpenCapture, Sizes
from fusion_advisor.fuse.shapes.padding import CannotPad, Fill, Padding, PadForm, pad_form, rounded_up
from fusion_advisor.fuse.shapes.pieces import Box, contains
from fusion_advisor.fuse.shapes.serve import Served

_SIZES = 2
"""At which each graph is run."""
_LARGE = 100.0
"""Times a normal number: far outside of what a model reads, and no infinity in float16 after a product."""

Given = Callable[[Sizes], Sequence[Any]]
"""Returns what the piece's graph is called with at some sizes."""
Judge = Callable[[Sequence[Any], Callable[..., Any]], str]
"""Verifies what runs in place of the piece's graph on some inputs; says what is wrong."""
Pays = Callable[[torch.fx.GraphModule, Sequence[Any], PadForm, Sizes, Sizes], str]
"""Says why a graph of larger sizes does not pay for a call, given the graph, its inputs, the form, and both sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownPadding:
    """What was shown of a piece.

    Attributes:
        padding: what may be rounded up; None: nothing.
        refused: names of the other sizes, with the reason; sizes of points near which it does not pay likewise.
    """

    padding: Padding | None = None
    refused: tuple[tuple[str, str], ...] = ()

    def serves(self, point: Served) -> bool:
        """Whether calls near a point may be rounded up."""
        return self.padding is not None and any(map(self.padding.serves, point.modules))


def show_padding(
    opened: OpenCapture, box: Box, points: Sequence[Served], given: Given, judge: Judge, pays: Pays | None = None,
    *, names: Sequence[str] | None = None,
) -> ShownPadding:  # fmt: skip
    """Run the graphs of a piece with padding and without, and compare.

    Args:
        opened: the piece's graph.
        box: its sizes.
        points: what runs near which sizes.
        given: makes inputs.
        judge: verifies.
        pays: measures; None: nothing is timed.
        names: of the sizes to try; None: all.
    """
    served = [point for point in points if point.module is not None]
    wanted = [one.name for one in box if one.least < one.most and (names is None or one.name in names)]
    if not served or not wanted:
        return ShownPadding()
    if writes_to_inputs(opened.region):
        reason = "the call writes to what it is given, and it would write the padding there too"
        return ShownPadding(refused=tuple((name, reason) for name in wanted))
    try:
        trial = _Trial(opened, box, served, given, judge, pad_form(opened))
    except CannotPad as error:
        return ShownPadding(refused=tuple((name, str(error)) for name in wanted))
    found: list[str] = []
    refused: list[tuple[str, str]] = []
    if pays is not None:  # first, as it costs least: long calls take as long as their launches, and verifying them takes longest
        reasons = [(point, trial.costs(point, wanted, pays)) for point in served]
        refused += [(f"{', '.join(wanted)} near {_text(point.sizes)}", reason) for point, reason in reasons if reason]
        trial.points = [point for point, reason in reasons if not reason]
    for name in wanted if trial.points else ():
        reason = trial.why_not((name,)) or (trial.why_not((*found, name)) if found else "")
        if reason:
            refused.append((name, reason))
        else:
            found.append(name)
    modules = tuple(trial.modules)
    padding = Padding(names=tuple(found), form=trial.form, modules=modules) if found and modules else None
    return ShownPadding(padding=padding, refused=tuple(refused))


@dataclass(slots=True)
class _Trial:
    """The comparisons of one piece."""

    opened: OpenCapture
    box: Box
    points: Sequence[Served]
    given: Given
    judge: Judge
    form: PadForm
    modules: list[torch.fx.GraphModule] = field(default_factory=list)

    def why_not(self, names: Sequence[str]) -> str:
        """Say why sizes may not be rounded up together; empty where they may."""
        for point in self.points:
            trials = list(_near(point.sizes, names, self.box))[:_SIZES]
            if len(trials) < _SIZES:
                return f"fewer than {_SIZES} of its sizes are rounded up"
            for sizes in trials:
                reason = self._difference(point, sizes, names)
                if reason:
                    return f"{reason} at {_text(sizes)}"
        return ""

    def costs(self, point: Served, names: Sequence[str], pays: Pays) -> str:
        """Say why a graph of larger sizes does not pay near a point; empty where it does, or where there is none to time."""
        sizes = next(_near(point.sizes, names, self.box), None)
        if sizes is None:
            return ""
        larger = rounded_up(sizes, names, self.box)
        if self._why_not_at(point, sizes, larger) or self.form.pad(self.given(sizes), larger) is None:
            return ""
        with torch.no_grad():
            return pays(point.graph_at(_key(self.opened, sizes)), self.given(sizes), self.form, sizes, larger)

    def _difference(self, point: Served, sizes: Sizes, names: Sequence[str]) -> str:
        larger = rounded_up(sizes, names, self.box)
        if reason := self._why_not_at(point, sizes, larger):
            return reason
        own = point.graph_at(_key(self.opened, sizes))
        args = self.given(sizes)
        with torch.no_grad():
            expected = _listed(own.forward(*args))
            first: list[Any] | None = None
            for fill in (None, *_fillings()):
                found = self._padded(own, args, sizes, larger, fill)
                if found is None:
                    return "an input is not contiguous"
                if any(_layout(one) != _layout(other) for one, other in zip(found, expected, strict=True)):
                    return "results are laid out in another way"
                if first is not None and not _are_equal(found, first):
                    return "what the padding holds changes results"
                first = found if first is None else first
            if own not in self.modules:
                self.modules.append(own)
            if _are_equal(first or [], expected):
                return ""
            problem = self.judge(args, lambda *inputs: self._whole(own, inputs, sizes, larger))
        return f"padding changes results: {problem}" if problem else ""

    def _why_not_at(self, point: Served, sizes: Sizes, larger: Sizes) -> str:
        if not self.opened.holds(larger):
            return f"the model does something else at the capacity, {_text(larger)},"
        own, at_capacity = (point.graph_at(_key(self.opened, one)) for one in (sizes, larger))
        return "" if own is at_capacity else "its capacity is served by another graph"

    def _whole(self, module: torch.fx.GraphModule, args: Sequence[Any], sizes: Sizes, larger: Sizes) -> Any:
        padded = self.form.pad(args, larger)
        return self.form.cut(module.forward(*(args if padded is None else padded)), sizes)

    def _padded(
        self, module: torch.fx.GraphModule, args: Sequence[Any], sizes: Sizes, larger: Sizes, fill: Fill | None
    ) -> list[Any] | None:
        padded = self.form.pad(args, larger, fill)
        return None if padded is None else _listed(self.form.cut(module.forward(*padded), sizes))


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


def _fillings() -> Iterator[Fill]:
    """Yield ways to fill padding: values as the tensor has them, twice, and large ones; integers and truth values are the former.

    An integer may be the place of a row in a table, so that only values that occur are sure to be places.
    """
    for seed in range(3):
        yield _filling(seed, is_large=seed == 2)


def _filling(seed: int, *, is_large: bool) -> Fill:
    def fill(like: torch.Tensor, count: int) -> torch.Tensor:
        numbers = torch.Generator().manual_seed(seed)
        if is_large and like.is_floating_point():
            return (torch.randn(count, generator=numbers) * _LARGE).to(like.device, like.dtype)
        flat = like.flatten()
        places = torch.randint(len(flat), (count,), generator=numbers)
        return flat[places.to(like.device)]

    return fill


def _text(sizes: Sizes) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


def _listed(results: Any) -> list[Any]:
    return list(results) if isinstance(results, tuple | list) else [results]


def _layout(value: Any) -> Any:
    return (value.shape, value.stride(), value.dtype) if isinstance(value, torch.Tensor) else value


def _are_equal(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    pairs: Iterator[tuple[Any, Any]] = zip(found, expected, strict=True)
    return all(torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other for one, other in pairs)
