"""Which calls run in the CUDA graph of larger sizes, or in segments, why others do not, and what finding that out took."""

from __future__ import annotations

from collections.abc import Sequence

from fusion_advisor import units
from fusion_advisor.records import ShapePiece, ShapePoint, ShapeRanges
from fusion_advisor.report.shapes.rows import piece_rows

PADDED = (
    "A shape has a CUDA graph of its own from its second call on. Till then it may run in the graph of the next capacity, padded."
)
_MOST_CAPACITIES = 8
_FIRST_CAPACITIES = 5
_MOST_PIECES = 3
_NEAR = " near "
_MASKED = " with zeros in the masks"


def padding_lines(shapes: ShapeRanges) -> tuple[str, ...]:
    """Return which sizes are rounded up to what, and why others are not; what is true of several pieces is said once."""
    pieces: dict[str, list[str]] = {}
    for row, piece in zip(piece_rows(shapes), shapes.pieces, strict=True):
        for text in (*_padded(piece), *_not_padded(piece), *_in_segments(piece)):
            pieces.setdefault(text, []).append(row.sizes)
    return tuple(f"{_places(where)}: {text}" for text, where in pieces.items())


def padding_cost(shapes: ShapeRanges) -> str:
    """Return what the trial took; empty where there was none."""
    taken = sum(piece.padding_seconds for piece in shapes.pieces)
    whole = f" of {units.seconds(shapes.seconds)}" if shapes.seconds >= taken else ""
    return f"Running padded calls against their own took {units.seconds(taken)}{whole}." if taken else ""


def _padded(piece: ShapePiece) -> list[str]:
    known = dict(piece.capacities)
    names = [
        f"{name}{f' ({_capacities(known[name])})' if known.get(name) else ''}{_MASKED if name in piece.masked else ''}"
        for name in piece.padded
    ]
    return [f"padded to the next {' and '.join(names)}. The graph proves that padding changes nothing."] if names else []


def _not_padded(piece: ShapePiece) -> list[str]:
    names: dict[str, list[str]] = {}
    for name, reason in piece.not_padded:
        names.setdefault(reason, []).append(name)
    return [f"{_subject(own)} not padded: {reason.strip().rstrip('.')}." for reason, own in names.items()]


def _in_segments(piece: ShapePiece) -> list[str]:
    served = [point for point in piece.points if not point.reason]
    own = [point for point in served if point.in_segments]
    where = "" if len(own) == len(served) else f" near {_points(own)}"
    return [f"what does not depend on the cache's length runs as CUDA graphs{where}."] if own else []


def _points(points: Sequence[ShapePoint]) -> str:
    return " and near ".join(", ".join(f"{name} {size}" for name, size in point.sizes) for point in points)


def _subject(names: Sequence[str]) -> str:
    """Return who is not padded, with its verb: sizes, or calls near points."""
    near = [point.replace("=", " ") for name in names for _, is_near, point in [name.partition(_NEAR)] if is_near]
    if near:
        return f"calls near {' and near '.join(near)} are"
    return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'}"


def _capacities(sizes: Sequence[int]) -> str:
    if len(sizes) <= _MOST_CAPACITIES:
        return ", ".join(map(units.number, sizes))
    first = ", ".join(map(units.number, sizes[:_FIRST_CAPACITIES]))
    return f"{first} … {units.number(sizes[-1])}: {units.number(len(sizes))} sizes"


def _places(pieces: Sequence[str]) -> str:
    left = len(pieces) - _MOST_PIECES
    more = f"; and {left} more piece{'' if left == 1 else 's'}" if left > 0 else ""
    return "; ".join(pieces[:_MOST_PIECES]) + more
