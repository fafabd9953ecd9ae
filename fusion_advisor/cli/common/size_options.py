"""``--shapes`` and ``--points``: ranges of sizes that a fused model serves, read before anything heavy is loaded."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Annotated

import typer

from fusion_advisor.errors import UsageError

if TYPE_CHECKING:
    from fusion_advisor.fuse.plan.size_ranges import ShapeRequest

_PANEL = "Input"
_HELP = "write --shapes 'batch=1..16,seq=1..4096'"
_REFUSED = {
    "decode": "that step holds a cache of fixed size; `cached=1..4096` in --shapes serves one that grows",
    "generate": "its steps hold a cache of fixed size; `cached=1..4096` in --shapes serves one that grows",
    "train": "a training step is verified for the sizes of its example",
}
"""Phases whose calls cannot be resized, with the reason."""

ShapesOpt = Annotated[
    str | None,
    typer.Option(
        "--shapes",
        metavar="RANGES",
        help="Serve ranges of sizes too: batch=1..16,seq=1..4096. Dims: batch, seq, cached, frames, height, width.",
        rich_help_panel=_PANEL,
    ),
]
PointsOpt = Annotated[
    str | None,
    typer.Option(
        "--points",
        metavar="SIZES",
        help="Sizes of --shapes at which rewrites are timed: 'batch=1 seq=512; batch=16 seq=1'.",
        rich_help_panel=_PANEL,
    ),
]


def read_sizes(
    shapes: str | None, points: str | None, *, phase: str, is_dry: bool
) -> tuple[ShapeRequest | None, tuple[tuple[int, ...], ...]]:
    """Return what the two options ask for; (None, ()) where ranges were not asked for.

    Args:
        shapes: of ``--shapes``.
        points: of ``--points``.
        phase: of the workload.
        is_dry: whether ``--dry-run`` was given.

    Raises:
        UsageError: one cannot be read, points lie outside the ranges, or the run serves no ranges.
    """
    if shapes is None:
        if points is not None:
            raise UsageError(detail="--points names sizes of --shapes, and there is no --shapes", help=_HELP)
        return None, ()
    if reason := _REFUSED.get(phase):
        raise UsageError(
            detail=f"--shapes cannot vary the sizes of --phase {phase}: {reason}", help="use --phase forward or prefill"
        )
    if is_dry:
        raise UsageError(
            detail="--shapes and --dry-run contradict each other: ranges are decided by timing, and a dry run times nothing",
            help="leave one of them out",
        )
    from fusion_advisor.fuse.plan.size_ranges import KNOWN, read_points, read_shapes

    request = read_shapes(shapes)
    for name in (one.name for one in request.ranges):
        if name not in KNOWN:
            near = difflib.get_close_matches(name, KNOWN, n=1) or [known for known in KNOWN if name.startswith(known)]
            meant = f"did you mean {near[0]}? " if near else ""
            raise UsageError(
                detail=f"--shapes: `{name}` is no dim that is found by itself",
                help=f"{meant}use {', '.join(KNOWN[:-1])} or {KNOWN[-1]}; in Python, shapes={{...}} names dims of yours",
            )
    return request, read_points(points or "", request.ranges)
