"""Points, pieces and rewrites of ``--shapes`` as rows; the sentences are in :mod:`fusion_advisor.report.shapes.sentences`."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from fusion_advisor import units
from fusion_advisor.records import ShapePiece, ShapePoint, ShapeRanges, SizeRange
from fusion_advisor.timing.paired import Comparison, compare_rounds

_DIGEST = re.compile(r"_[0-9a-f]{4}$")
"""Ends the name of a generated kernel. It is of the layout, so that each piece has another for the same chain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PointRow:
    """One point, formatted.

    Attributes:
        number: from 1 on, through all pieces.
        piece: number of its piece.
        sizes: ``batch 2, seq 16``.
        elements: product of the sizes.
        eager: time of the original step; ``–`` where none was taken.
        ours: time of the rewritten step.
        speedup: eager's time over ours.
        spread: interval of the speedup.
        compared: the same as figures; None where nothing was timed.
        outcome: ``faster``, ``slower``, ``within noise``, ``not timed`` or ``original ops``.
        mark: sign of the outcome.
        tone: ``gain``, ``loss``, ``warn`` or ``plain``.
        error: relative L2 error of the outputs, with eager's own.
        reason: why the original ops run near it.
    """

    number: int
    piece: int
    sizes: str
    elements: int
    eager: str
    ours: str
    speedup: str
    spread: str
    compared: Comparison | None
    outcome: str
    mark: str
    tone: str
    error: str
    reason: str

    @property
    def is_served(self) -> bool:
        """Whether rewrites run near it."""
        return not self.reason


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceRow:
    """One piece, formatted.

    Attributes:
        number: from 1 on.
        sizes: ``batch 2..16, seq 1``.
        count: how many sizes it holds.
        points: numbers of its points.
        refusal: why the original ops run in all of it.
    """

    number: int
    sizes: str
    count: int
    points: tuple[int, ...]
    refusal: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRows:
    """The points of one way to call the model.

    Attributes:
        call: ``prefill``, ``decode``, … of ``generate``; empty for the example's.
        volume: ``batch × seq``: what the product of the sizes is.
        points: with the numbers that they have among all points.
    """

    call: str
    volume: str
    points: tuple[PointRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What became of a rewrite at a point.

    Attributes:
        mark: a sign.
        words: ``kept``, ``dropped``, ``original ops`` or nothing.
        note: letter of the reason, as in :attr:`Matrix.reasons`.
        tone: ``gain``, ``loss`` or ``plain``.
    """

    mark: str
    words: str = ""
    note: str = ""
    tone: str = "plain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """Rewrites by points.

    Attributes:
        points: heads of the columns.
        rows: name of a rewrite, and its cell at each point.
        reasons: letter and text.
    """

    points: tuple[PointRow, ...]
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]
    reasons: tuple[tuple[str, str], ...]


def point_rows(shapes: ShapeRanges) -> tuple[PointRow, ...]:
    """Return all points in the order of their pieces."""
    found: list[PointRow] = []
    for at, piece in enumerate(shapes.pieces):
        found += [_point_row(point, piece.call, len(found) + 1 + more, at + 1) for more, point in enumerate(piece.points)]
    return tuple(found)


def call_rows(shapes: ShapeRanges) -> tuple[CallRows, ...]:
    """Return all points by the way in which the model is called: their sizes are products of other dims."""
    found, rows = [], point_rows(shapes)
    for call in dict.fromkeys(piece.call for piece in shapes.pieces):
        pieces = [at + 1 for at, piece in enumerate(shapes.pieces) if piece.call == call]
        volume = " × ".join(one.name for one in shapes.pieces[pieces[0] - 1].ranges)
        found.append(CallRows(call=call, volume=volume, points=tuple(row for row in rows if row.piece in pieces)))
    return tuple(found)


def piece_rows(shapes: ShapeRanges) -> tuple[PieceRow, ...]:
    """Return all pieces."""
    rows, points = [], point_rows(shapes)
    for at, piece in enumerate(shapes.pieces):
        own = tuple(point for point in points if point.piece == at + 1)
        rows.append(
            PieceRow(
                number=at + 1,
                sizes=_of_call(piece.call, range_words(piece.ranges)),
                count=size_count(piece.ranges),
                points=tuple(point.number for point in own),
                refusal=piece.refusal,
            )
        )
    return tuple(rows)


def matrix(shapes: ShapeRanges) -> Matrix:
    """Return which rewrite stays near which point; the same chain's kernel has one row, whatever its digest in each piece."""
    points = [point for piece in shapes.pieces for point in piece.points]
    names = list(dict.fromkeys(plain_name(name) for point in points for name in (*point.rewrites, *_dropped_names(point))))
    texts = list(dict.fromkeys(text for point in points for text in (*(why for _, why in point.dropped), point.reason) if text))
    letters = {text: _letter(at) for at, text in enumerate(texts)}
    cells = {name: tuple(_cell(point, name, letters) for point in points) for name in names}
    used = {cell.note for row in cells.values() for cell in row}
    reasons = tuple((letter, text) for text, letter in letters.items() if letter in used)
    return Matrix(points=point_rows(shapes), rows=tuple(cells.items()), reasons=reasons)


def plain_name(rewrite: str) -> str:
    """Return a rewrite's name without the digest that ends a generated kernel's."""
    return _DIGEST.sub("", rewrite) or rewrite or "unnamed"


def range_words(ranges: Sequence[SizeRange]) -> str:
    """``batch 1..16, seq 1``."""
    return ", ".join(f"{one.name} {one.least}{f'..{one.most}' if one.most != one.least else ''}" for one in ranges)


def asked_text(shapes: ShapeRanges) -> str:
    """``batch=1..16,seq=1..4096``, as the option takes it."""
    return ",".join(one.text for one in shapes.asked)


def size_words(sizes: Sequence[tuple[str, int]]) -> str:
    """``batch 2, seq 16``."""
    return ", ".join(f"{name} {size}" for name, size in sizes)


def size_count(ranges: Sequence[SizeRange]) -> int:
    """How many sizes lie in ranges."""
    return math.prod(max(0, one.most - one.least + 1) for one in ranges)


def compared(point: ShapePoint) -> Comparison | None:
    """Compare a point's two steps by their paired rounds; None where nothing was timed."""
    if point.eager is None or point.ours is None or not point.eager.times_ns or not point.ours.times_ns:
        return None
    return compare_rounds(point.eager.times_ns, point.ours.times_ns)


def is_served(piece: ShapePiece) -> bool:
    """Whether rewrites run anywhere in a piece."""
    return not piece.refusal and any(not point.reason for point in piece.points)


def _of_call(call: str, sizes: str) -> str:
    return f"{call}: {sizes}" if call else sizes


def _point_row(point: ShapePoint, call: str, number: int, piece: int) -> PointRow:
    found = compared(point)
    outcome, mark, tone = _outcome(point, found)
    errors = (point.rel_l2, point.eager_rel_l2)
    return PointRow(
        number=number,
        piece=piece,
        sizes=_of_call(call, size_words(point.sizes)),
        elements=math.prod(size for _, size in point.sizes),
        eager=units.duration(point.eager.median_ns) if point.eager else "–",
        ours=units.duration(point.ours.median_ns) if point.ours else "–",
        speedup=units.speedup(found.ratio) if found else "–",
        spread=units.speedup_interval(found.ratio_low, found.ratio_high) if found else "",
        compared=found,
        outcome=outcome,
        mark=mark,
        tone=tone,
        error=" / ".join(units.error(value) for value in errors if value is not None) or "–",
        reason=point.reason,
    )


def _outcome(point: ShapePoint, found: Comparison | None) -> tuple[str, str, str]:
    if point.reason:
        return "original ops", "–", "plain"
    if found is None:
        return "not timed", "·", "plain"
    if found.ratio_low > 1:
        return "faster", "✓", "gain"
    return ("slower", "✗", "loss") if found.ratio_high < 1 else ("within noise", "~", "warn")


def _dropped_names(point: ShapePoint) -> list[str]:
    return [name for name, _ in point.dropped]


def _cell(point: ShapePoint, name: str, letters: dict[str, str]) -> Cell:
    count = sum(plain_name(one) == name for one in point.rewrites)
    why = next((reason for one, reason in point.dropped if plain_name(one) == name), None)
    if count and point.reason:
        return Cell(mark="–", words="original ops", note=letters[point.reason])
    if count:
        # A part of its sites may have been dropped where another part stays.
        words = "kept" if count == 1 else f"kept ({count})"
        return Cell(mark="✓", words=words, note=letters.get(why, "") if why else "", tone="gain")
    if why is not None:
        return Cell(mark="✗", words="dropped", note=letters.get(why, ""), tone="loss")
    return Cell(mark="·")


def _letter(at: int) -> str:
    """Return ``a`` to ``z``, then ``aa``."""
    return (_letter(at // 26 - 1) if at >= 26 else "") + chr(ord("a") + at % 26)
