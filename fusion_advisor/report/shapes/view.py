"""Everything that a template prints about ranges of sizes, by name."""

from __future__ import annotations

from dataclasses import dataclass

from fusion_advisor.records import ShapeRanges
from fusion_advisor.report.shapes import padding, sentences
from fusion_advisor.report.shapes.rows import Matrix, PieceRow, PointRow, matrix, piece_rows, point_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class SizesView:
    """Rows and sentences; see :mod:`~fusion_advisor.report.shapes.sentences` and :mod:`~fusion_advisor.report.shapes.padding`."""

    summary: str
    share: str
    dims: str
    cost: str
    clock: str
    general: str
    carried: str
    crossover: str
    original: tuple[str, ...]
    padding: tuple[str, ...]
    padding_note: str
    outside: str
    nearest: str
    points: tuple[PointRow, ...]
    pieces: tuple[PieceRow, ...]
    matrix: Matrix


def sizes_view(shapes: ShapeRanges) -> SizesView:
    """Return the rows and sentences of a report's ranges."""
    summary = sentences.summary(shapes)
    return SizesView(
        summary=f"{summary[0].upper()}{summary[1:]}",
        share=sentences.share_line(shapes),
        dims=sentences.dims_line(shapes),
        cost=sentences.cost_line(shapes),
        clock=sentences.clock_line(shapes),
        general=sentences.general_line(shapes),
        carried=sentences.carried_line(shapes),
        crossover=sentences.crossover_line(shapes),
        original=sentences.left_to_original_ops(shapes),
        padding=padding.padding_lines(shapes),
        padding_note=f"{padding.PADDED} {padding.padding_cost(shapes)}".strip(),
        outside=sentences.OUTSIDE,
        nearest=sentences.NEAREST,
        points=point_rows(shapes),
        pieces=piece_rows(shapes),
        matrix=matrix(shapes),
    )
