"""All points of one piece: one is decided in full; where an answer is wanted soon, the others take over what stays there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusion_advisor.capture.sizes.open_capture import OpenCapture
from fusion_advisor.fuse.live.padding_trial import tried_padding
from fusion_advisor.fuse.plan.size_ranges import CACHED
from fusion_advisor.fuse.points.carry import carried
from fusion_advisor.fuse.points.choose_layouts import choose_layouts
from fusion_advisor.fuse.points.decide import MOST_ELEMENTS, Decided, RangeWork, not_decided
from fusion_advisor.fuse.points.in_full import decided
from fusion_advisor.fuse.points.time_limit import OutOfTime
from fusion_advisor.fuse.shapes.pieces import Piece, beside_holes, points_of
from fusion_advisor.fuse.shapes.proved_sizes import ProvedSizes, prove_sizes
from fusion_advisor.fuse.shapes.ranged_calls import ROOM, with_room
from fusion_advisor.fuse.shapes.serve import ServedPiece, serving
from fusion_advisor.fuse.shapes.show_padding import ShownPadding
from fusion_advisor.fuse.shapes.sized_fusion import LooksAtSizes, Workpiece
from fusion_advisor.fuse.start.record import piece_of
from fusion_advisor.records import RenderedKernel, ShapePiece

_DECIDED, _CARRIED = "decide a point", "take over a point"


def _in_graph(piece: Piece, points: Sequence[dict[str, int]]) -> list[dict[str, int]]:
    """Return sizes near some at which a piece's graph is the model's, each once: those that were traced are, at least."""
    opened = piece.opened
    assert opened is not None
    found = [point if opened.holds(point) else beside_holes(point, piece.box, opened.holds) for point in points]
    known = [point for point in found if point is not None] or [{one.name: opened.sizes[one.name] for one in piece.box}]
    return [point for at, point in enumerate(known) if point not in known[:at]]


class PiecePoints:
    """The points of a piece, and what was decided at them.

    Attributes:
        piece: with its graph.

    Args:
        work: on the piece's call.
        piece: with a graph.
    """

    def __init__(self, work: RangeWork, piece: Piece) -> None:
        self.piece = piece
        self._work = work
        self._started_s = work.limit.clock()
        self._spent_s = 0.0
        assert work.options.shapes is not None
        names = [one.name for one in work.options.shapes.ranges]
        asked = [with_room(dict(zip(names, point, strict=True))) for point in work.options.shape_points]
        most = MOST_ELEMENTS["cuda" if work.on_cuda else "cpu"]
        self._points = _in_graph(piece, points_of(piece.box, most=most, asked=asked))
        self._found: dict[int, Decided] = {}
        self._kernels: dict[str, RenderedKernel] = {}
        self._open(self._opened)

    @property
    def _opened(self) -> OpenCapture:
        assert self.piece.opened is not None
        return self.piece.opened

    def _open(self, opened: OpenCapture) -> None:
        """Begin with a graph that nothing was done to."""
        work = self._work
        self.piece = replace(self.piece, opened=opened)
        work.starts[self.piece.box] = piece_of(work.loaded.model, opened, work.ranged.name, work.ranged.at, self.piece.box)
        # Where no graph serves a call nothing is padded, whatever is proved.
        self._proved = prove_sizes(opened, self.piece.box) if work.may_pad else ProvedSizes() if work.pads else None
        captured = opened.as_captured()
        try:
            self._changes = choose_layouts(work, self.piece, self._points)
        except LooksAtSizes as error:
            work.refused.add(str(error))
            work.progress.note(f"{error} decides by one size: left out for all sizes")
            self._open(work.capture(dict(opened.sizes)))
        else:
            self._workpiece = Workpiece(self.piece, work.ahead, captured=captured if self._changes else None)
            self._found.clear()
            self._kernels.clear()

    def decide(self) -> None:
        """Decide all points, each in full, or but for the first as that one was; large sizes, which take longest, come first."""
        started = self._work.limit.clock()
        first = self._first
        for number in (first, *(one for one in reversed(range(len(self._points))) if one != first)):
            self._found[number] = self._at(number)
        self._spent_s += self._work.limit.clock() - started

    def decide_again(self) -> None:
        """Decide points in full that could not take over what another has, as long as there is time."""
        started = self._work.limit.clock()
        for number, one in [*self._found.items()]:
            if one.row.carried_from and one.row.reason and self._work.limit.has_room_for(_DECIDED):
                self._found[number] = self._in_full(number, one)
        self._spent_s += self._work.limit.clock() - started

    @property
    def may_decide_again(self) -> bool:
        """Whether a point could not take over what another has, and may be decided in full."""
        return any(one.row.carried_from and one.row.reason for one in self._found.values())

    @property
    def _first(self) -> int:
        """The point that is decided in full, where an answer is wanted soon.

        The largest sizes, where the device is the limit and not the host: what pays there by little is lost elsewhere. Where
        tokens in a cache vary, attention takes most of the largest step, and one in between shows what the other ops cost.
        """
        is_of_cache = any(one.name in (CACHED, ROOM) for one in self.piece.box)
        return len(self._points) // 2 if is_of_cache else len(self._points) - 1

    def _at(self, number: int) -> Decided:
        work, sizes = self._work, self._points[number]
        first = self._found.get(self._first)
        otherwise = not_decided(sizes, f"not decided: {work.limit.sentence}")
        is_carried = work.options.effort == "quick" and not work.options.shape_points  # points with a name are decided
        if not is_carried or first is None or first.row.reason:
            return self._in_full(number, otherwise) if work.limit.has_room_for(_DECIDED) else otherwise
        if not work.limit.has_room_for(_CARRIED):
            return otherwise
        try:
            with work.limit.spent_on(_CARRIED):
                return carried(work, self._workpiece, first, sizes, tries_passes=number == len(self._points) - 1)
        except LooksAtSizes as error:
            return self._again_without(error, number)

    def _in_full(self, number: int, otherwise: Decided) -> Decided:
        """Decide a point; return ``otherwise`` where the time ends before it is."""
        work = self._work
        try:
            with work.limit.spent_on(_DECIDED):
                return decided(work, self._workpiece, self._points[number], self._changes, self._kernels)
        except OutOfTime:
            return otherwise
        except LooksAtSizes as error:
            return self._again_without(error, number)

    def _again_without(self, error: LooksAtSizes, number: int) -> Decided:
        """Return a point, and decide those before it again, on a graph of which a pass has not asked for a number."""
        self._work.refused.add(str(error))
        before = [one for one in self._found if one != number]
        self._open(self._work.capture(dict(self._opened.sizes)))
        for other in before:
            self._found[other] = self._at(other)
        return self._at(number)

    @property
    def in_order(self) -> Sequence[Decided]:
        """What was decided, in the order of the points."""
        return [self._found[number] for number in range(len(self._points))]

    def finish(self) -> tuple[ServedPiece, ShapePiece]:
        """Try padding, and return the piece in service with its row."""
        work, points = self._work, self.in_order
        found = [one.served for one in points]
        self._workpiece.forget_records()
        shown = ShownPadding()
        if self._proved is not None:
            shown = tried_padding(
                work.ranged, self._opened, self.piece.box, found, self._proved, work.instruments, spent_s=self._spent_s,
                most_s=work.limit.left_s, is_timed=work.on_cuda and work.options.is_timed,
            )  # fmt: skip
        row = ShapePiece(
            call=work.ranged.name,
            ranges=self.piece.box,
            points=tuple(replace(one.row, pads=shown.serves(one.served)) for one in points),
            kernels=tuple(self._kernels.values()),
            layouts=tuple(self._changes),
            graph=self._workpiece.graph_hash(),
            padded=shown.names,
            masked=tuple(name for name in shown.names if shown.padding is not None and name in shown.padding.form.masked),
            capacities=shown.capacities(self.piece.box),
            not_padded=shown.refused,
            padding_seconds=round(shown.seconds, 3),
        )
        return serving(self.piece, found, shown.padding), row
