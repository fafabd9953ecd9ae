"""Splits ranges of sizes into pieces that one graph serves each.

What a model assumes of its sizes (a branch on the length, a batch of one, a table that ends) are the guards of its graph: the
largest box of sizes around the traced call in which they hold is a piece, and what is left of the range is traced again.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt, log, prod
from typing import Any

import torch
from torch.fx import GraphModule

from fusion_advisor.capture.sizes.open_capture import OneSizeOnly, OpenCapture, Sizes
from fusion_advisor.errors import CannotCapture
from fusion_advisor.records import SizeRange

MOST_PIECES = 12
"""Captures of one model; a model with more cases is no model of any size."""
_EACH_ITS_OWN = 3
"""Pieces of a single size each, after which a range is taken to have another graph for each of its sizes."""
_LARGEST_SAMPLE = 64
_APART, _CORNERS_APART = 8, 2
"""Points whose products differ by less are one: what pays at one pays at the other. The largest sizes are a point
of their own from twice the least on: by what was decided for 2, 6 windows of Whisper took 1.2 times what a plan for 6 took."""
_NEAR = 3
"""Sizes on either side that are tried where a point lies in a hole."""
_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61)

Box = tuple[SizeRange, ...]
Capture = Callable[[dict[str, int]], OpenCapture]
"""Captures the call at some sizes, open ones of 2 and more. Raises OneSizeOnly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Sizes that one graph serves.

    Attributes:
        box: the ranges.
        opened: the graph; None where the original ops run.
        refusal: why they do.
    """

    box: Box
    opened: OpenCapture | None = None
    refusal: str = ""


def find_pieces(ranges: Sequence[SizeRange], capture: Capture, *, most: int = MOST_PIECES) -> list[Piece]:
    """Capture a call as often as its sizes make other graphs of it.

    Args:
        ranges: of all sizes.
        capture: at some sizes.
        most: pieces; what is left of the ranges runs the original ops.
    """
    return PieceFinder(ranges, capture, most=most).all()


class PieceFinder:
    """Captures a call piece by piece: between two captures others may be worked on.

    Attributes:
        found: the pieces so far. Where the model makes too many graphs, one piece without a graph takes the place of all.

    Args:
        ranges: of all sizes.
        capture: at some sizes.
        most: pieces; what is left of the ranges runs the original ops.
    """

    def __init__(self, ranges: Sequence[SizeRange], capture: Capture, *, most: int = MOST_PIECES) -> None:
        self.found: list[Piece] = []
        self._ranges, self._capture, self._most = tuple(ranges), capture, most
        self._waiting: list[Box] = [tuple(ranges)]

    def all(self) -> list[Piece]:
        """Return all pieces."""
        while self.next() is not None:
            pass
        return self.found

    def next(self) -> Piece | None:
        """Return one more piece; None where the pieces make up the ranges."""
        if not self._waiting:
            return None
        box = self._waiting.pop(0)
        piece = self._piece(box)
        self.found.append(piece)
        if piece.opened is not None:
            self._waiting += _rest(box, piece.box)
            name = _size_of_many_graphs(self._ranges, self.found, self._most)
            if name:
                piece = Piece(box=self._ranges, refusal=f"the model makes another graph for each size of {name}")
                self.found, self._waiting = [piece], []
        return piece

    def _piece(self, box: Box) -> Piece:
        if len(self.found) >= self._most:
            return Piece(box=box, refusal=f"the model makes more than {self._most} graphs of these ranges")
        sample = sample_of(box)
        try:
            opened = self._capture(sample)
        except (OneSizeOnly, CannotCapture) as error:
            return Piece(box=box, refusal=str(error.facts["detail"] if isinstance(error, CannotCapture) else error))
        own = _largest_box(box, sample, opened)
        if own is None:
            return Piece(box=box, refusal="what the model assumes of its sizes holds for no range around one of them")
        return Piece(box=own, opened=opened)


class OtherPieces(Exception):
    """A model that no longer makes the pieces that it was decided for."""


def find_again(ranges: Sequence[SizeRange], known: Sequence[tuple[Box, bool]], capture: Capture) -> list[Piece]:
    """Capture the pieces that something stays in, at the sizes at which :func:`find_pieces` did; the others need no graph.

    Args:
        ranges: of all sizes.
        known: the box of each piece in order, and whether something stays in it.
        capture: at some sizes.

    Raises:
        OtherPieces: a graph serves other sizes than its piece has.
    """
    waiting = [tuple(ranges)]
    found: list[Piece] = []
    for own, is_served in known:
        if not waiting:
            raise OtherPieces
        box = waiting.pop(0)
        opened = None
        if is_served:
            try:
                opened = capture(sample_of(box))
            except (OneSizeOnly, CannotCapture) as error:
                raise OtherPieces from error
        if not _lies_in(own, box) or (opened is not None and _largest_box(box, sample_of(box), opened) != own):
            raise OtherPieces
        found.append(Piece(box=own, opened=opened))
        waiting += _rest(box, own)
    if waiting:
        raise OtherPieces
    return found


def _lies_in(own: Box, box: Box) -> bool:
    names = [one.name for one in box]
    return names == [one.name for one in own] and all(
        whole.holds(part.least) and whole.holds(part.most) for whole, part in zip(box, own, strict=True)
    )


def _size_of_many_graphs(ranges: Sequence[SizeRange], found: Sequence[Piece], most: int) -> str:
    """Return the dim of which each size has a graph of its own, more than may be; empty where there is none.

    Torch's associative scan (Mamba's, on a CPU) is such a model: its levels follow the bits of the length.
    """
    boxes = [piece.box for piece in found if piece.opened is not None]
    for place, whole in enumerate(ranges):
        own = [box[place] for box in boxes]
        is_alone = all(one.least == one.most > 1 for one in own) and len({one.least for one in own}) >= _EACH_ITS_OWN
        if is_alone and whole.most - whole.least >= most:
            return whole.name
    return ""


def sample_of(box: Box) -> dict[str, int]:
    """Return sizes in a box at which to trace: different primes where it has some, of a moderate size; 1 only where it must."""
    found: dict[str, int] = {}
    for one in sorted(box, key=lambda one: sum(map(one.holds, _PRIMES))):  # which has the fewest primes chooses first
        middle = isqrt(one.least * min(one.most, max(one.least, _LARGEST_SAMPLE)))
        free = [prime for prime in _PRIMES if one.holds(prime) and prime not in found.values()]
        other = min(max(middle, one.least, 2), one.most)
        found[one.name] = min(free, key=lambda prime: abs(prime - middle)) if free else other
    return {one.name: found[one.name] for one in box}


def _largest_box(box: Box, sample: dict[str, int], opened: OpenCapture) -> Box | None:
    """Widen the traced call's sizes, one dim after the other, as far as the guards hold; None where they do not in between.

    Guards that rule out combinations of several sizes (height x width != 16) are holes, which a call may fall into. A size of 1
    is a number in the graph, of which there are no guards.
    """
    runs = {one.name: _run_around(sample[one.name], one, opened) for one in box}
    runs |= {name: SizeRange(name=name, least=1, most=1) for name, size in sample.items() if size == 1}
    own = {name: SizeRange(name=name, least=size, most=size) for name, size in sample.items()}

    def holds(name: str, size: int) -> bool:
        corners = itertools.product(*({one.least, one.most} if one.name != name else {size} for one in own.values()))
        return all(opened.holds_but_for_holes(dict(zip(own, sizes, strict=True))) for sizes in corners)

    for name, run in runs.items():
        least = _furthest(sample[name], run.least, functools.partial(holds, name))
        most = _furthest(sample[name], run.most, functools.partial(holds, name))
        own[name] = SizeRange(name=name, least=least, most=most)
    inside = [sorted({*range(one.least, min(one.least + 9, one.most) + 1), *_spread(one)}) for one in own.values()]
    points = itertools.islice(itertools.product(*inside), 4096)
    if not all(opened.holds_but_for_holes(dict(zip(own, sizes, strict=True))) for sizes in points):
        return None
    return tuple(own.values())


def _run_around(start: int, within: SizeRange, opened: OpenCapture) -> SizeRange:
    """Return the sizes around one for which what was taken for granted of this dim alone is true, without a gap."""
    if not opened.guards:
        return within
    least = most = start
    while least > within.least and opened.holds_alone(within.name, least - 1):
        least -= 1
    while most < within.most and opened.holds_alone(within.name, most + 1):
        most += 1
    return SizeRange(name=within.name, least=least, most=most)


def _spread(one: SizeRange) -> set[int]:
    return {one.least + (one.most - one.least) * step // 16 for step in range(17)}


def _furthest(start: int, end: int, holds: Callable[[int], bool]) -> int:
    """Return the size nearest to ``end`` up to which something holds from ``start`` on, by bisection."""
    if holds(end):
        return end
    good, bad = start, end
    while abs(bad - good) > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if holds(middle) else (good, middle)
    return good


def _rest(box: Box, own: Box) -> list[Box]:
    """Return boxes that make up what is left of a box without another that lies in it."""
    left: list[Box] = []
    inner = list(box)
    for place, (whole, part) in enumerate(zip(box, own, strict=True)):
        for least, most in ((whole.least, part.least - 1), (part.most + 1, whole.most)):
            if least <= most:
                left.append((*inner[:place], SizeRange(name=whole.name, least=least, most=most), *inner[place + 1 :]))
        inner[place] = part
    return left


def contains(box: Box, sizes: Mapping[str, int]) -> bool:
    """Whether sizes lie in a box."""
    return all(one.holds(sizes[one.name]) for one in box)


def points_of(box: Box, *, most: int, asked: Sequence[Mapping[str, int]] = ()) -> list[dict[str, int]]:
    """Return the sizes at which rewrites are decided.

    Args:
        box: of a piece.
        most: product of the sizes at the largest point.
        asked: sizes by name, by the user; those inside are taken as they are.
    """
    names = [one.name for one in box]
    mine = [{name: point[name] for name in names} for point in asked if all(one.holds(point[one.name]) for one in box)]
    if mine:
        return [point for at, point in enumerate(mine) if point not in mine[:at]]
    least, largest = {one.name: one.least for one in box}, {one.name: one.most for one in box}
    while prod(largest.values()) > most and any(largest[one.name] > one.least for one in box):
        widest = max(box, key=lambda one: largest[one.name] / one.least)
        largest[widest.name] = max(widest.least, largest[widest.name] // 2)
    middle = {name: isqrt(least[name] * largest[name]) for name in names}
    found = [least]
    for point in (middle, largest):
        if prod(point.values()) >= _APART * prod(found[-1].values()):
            found.append(point)
    ahead = prod(largest.values()) / prod(found[-1].values())
    if len(found) > 1 and ahead > 1:
        found[-1] = largest
    elif ahead >= _CORNERS_APART:
        found.append(largest)
    return found


def beside_holes(point: Sizes, box: Box, holds: Callable[[Sizes], bool]) -> dict[str, int] | None:
    """Return the sizes nearest to some at which the graph of a piece is the model's; None where there are none around.

    Args:
        point: sizes in the box.
        box: of the piece.
        holds: whether sizes in it are none that the model's assumptions rule out (height x width != 16).
    """
    steps = sorted(itertools.product(range(-_NEAR, _NEAR + 1), repeat=len(point)), key=lambda step: sum(map(abs, step)))
    for step in steps:
        near = {name: size + more for (name, size), more in zip(point.items(), step, strict=True)}
        if contains(box, near) and holds(near):
            return near
    return None


def hold_ones(given: Sequence[Any], masks: Sequence[int]) -> bool:
    """Whether masks hold ones alone: on a GPU the host waits for the answer, as it does in models that look at them.

    Args:
        given: what a graph is called with.
        masks: their places.

    Returns:
        False where the call is being captured into a CUDA graph of somebody's: nobody may wait there.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return False
    return all(bool((given[place] == 1).all()) for place in masks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What runs near one point of a piece.

    Attributes:
        sizes: of the point.
        module: the piece's graph with the rewrites that stay there; None: the original ops.
        reason: why the original ops run.
        plain: the same with masks, for shapes at which they say more than a flag does.
        says_flags: whether the masks of a shape, by its open sizes, say what the flags in ``module`` do; None: there are none.
        in_segments: what does not depend on a growing cache's length may run as CUDA graphs.
        unmasked: the graph for calls whose ``masks`` hold ones alone; None where they have the same one.
        masks: places of these inputs.
    """

    sizes: Sizes
    module: GraphModule | None
    reason: str = ""
    plain: GraphModule | None = None
    says_flags: Callable[..., bool] | None = None
    in_segments: bool = False
    unmasked: GraphModule | None = None
    masks: tuple[int, ...] = ()

    @property
    def modules(self) -> list[GraphModule]:
        """Its graphs."""
        return [module for module in (self.module, self.plain, self.unmasked) if module is not None]

    def graph_at(self, point: tuple[int, ...]) -> GraphModule:
        """Return the graph that runs at a shape, whatever its masks hold.

        Args:
            point: its open sizes.
        """
        flagged = self.says_flags is None or self.says_flags(*point)
        chosen = self.module if flagged else self.plain
        assert chosen is not None  # `find` sends a call without a graph to the original ops
        return chosen

    def graph_for(self, point: tuple[int, ...], given: Sequence[Any]) -> GraphModule:
        """Return the graph that runs in a call.

        Args:
            point: its open sizes.
            given: what the graph is called with.
        """
        return self.unmasked if self.unmasked is not None and hold_ones(given, self.masks) else self.graph_at(point)

    def distance(self, sizes: Sizes) -> float:
        """Return how far other sizes are: by their product first (what a kernel moves), then by each."""
        volume, own = prod(sizes.values()), prod(self.sizes.values())
        each = sum(abs(log(sizes[name] / size)) for name, size in self.sizes.items())
        return abs(log(volume / own)) + 0.1 * each
