"""Reads ``batch=1..16,seq=1..4096``: which dims of a call may vary, and how far."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fusion_advisor.errors import UsageError
from fusion_advisor.records import SizeRange

CACHED = "cached"
"""How many tokens a KV cache holds before a decode step: the steps of ``generate`` are served where it is named."""
KNOWN = ("batch", "seq", "frames", "height", "width", CACHED)
"""Names whose dims are found by themselves."""
MOST_NAMES = 3
"""Each further name triples the sizes at which a chain is looked at, and doubles the pieces where 1 is among its sizes."""
_PART = re.compile(r"\s*([A-Za-z_]\w*)\s*(?:=\s*(-?\d+)\s*(?:\.\.\s*(-?\d+)\s*)?)?\Z")
_HELP = "write --shapes 'batch=1..16,seq=1..4096'"
_POINTS_HELP = "write --points 'batch=1 seq=512; batch=16 seq=1'"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeRequest:
    """What ``--shapes`` asks for.

    Attributes:
        ranges: of the dims that may vary.
        dims: by path of a tensor the names of its dims, where the user said so; empty: they are found by their names.
    """

    ranges: tuple[SizeRange, ...]
    dims: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @property
    def text(self) -> str:
        """``batch=1..16,seq=1..4096``."""
        return ",".join(one.text for one in self.ranges)

    def points_text(self, points: Sequence[Sequence[int]]) -> str:
        """Return points as ``--points`` takes them.

        Args:
            points: sizes in the order of the ranges.
        """
        return "; ".join(" ".join(f"{one.name}={size}" for one, size in zip(self.ranges, point, strict=True)) for point in points)


def read_shapes(shapes: str | Mapping[str, Sequence[str | None]]) -> ShapeRequest:
    """Read ranges of sizes.

    Args:
        shapes: ``batch=1..16,seq=1..4096``, or by path of a tensor what each of its dims is called:
            ``{"ids": ("batch=1..16", "seq=1..4096"), "mask": ("batch", "seq"), "table": (None, "seq")}``.

    Raises:
        UsageError: it cannot be read, or ranges contradict each other.
    """
    if isinstance(shapes, str):
        return ShapeRequest(ranges=_checked(_read(part) for part in shapes.split(",") if part.strip()))
    dims = tuple((path, tuple("" if name is None else _read(name)[0] for name in names)) for path, names in shapes.items())
    return ShapeRequest(
        ranges=_checked(_read(name) for names in shapes.values() for name in names if name is not None), dims=dims
    )


def asked_shapes(shapes: str | Mapping[str, Sequence[str | None]] | ShapeRequest | None) -> ShapeRequest | None:
    """Return what ``shapes`` asks for in any of its forms; None where nothing is asked."""
    return shapes if shapes is None or isinstance(shapes, ShapeRequest) else read_shapes(shapes)


def _read(part: str) -> tuple[str, int | None, int | None]:
    found = _PART.match(part)
    if found is None:
        raise UsageError(detail=f"--shapes: `{part.strip()}` is no range of sizes", help=_HELP)
    name, least, most = found[1], found[2], found[3]
    return name, None if least is None else int(least), None if least is None else int(most or least)


def _checked(parts: object) -> tuple[SizeRange, ...]:
    found: dict[str, SizeRange] = {}
    named: set[str] = set()
    for name, least, most in parts:  # type: ignore[attr-defined]
        named.add(name)
        if least is None or most is None:
            continue
        if least < 1:
            raise UsageError(detail=f"--shapes: {name} begins at {least}, and a tensor without elements has no step", help=_HELP)
        if most < least:
            raise UsageError(detail=f"--shapes: {name}={least}..{most} holds no size", help="write the least size first")
        one = SizeRange(name=name, least=least, most=most)
        if found.setdefault(name, one) != one:
            detail = f"--shapes: {found[name].text} and {one.text} contradict each other"
            raise UsageError(detail=detail, help="give each name one range")
    missing = sorted(named - set(found))
    if missing or not found:
        what = f"{', '.join(missing)} has no range" if missing else "no range is given"
        raise UsageError(detail=f"--shapes: {what}", help=_HELP)
    if len(found) > MOST_NAMES:
        detail = f"--shapes: {len(found)} dims may vary ({', '.join(found)}); {MOST_NAMES} can"
        raise UsageError(detail=detail, help="leave the others at the size of the example")
    return tuple(found.values())


def read_points(points: str, ranges: Sequence[SizeRange]) -> tuple[tuple[int, ...], ...]:
    """Read ``batch=1 seq=512; batch=16 seq=1``: the sizes at which rewrites are timed.

    Args:
        points: separated by semicolons.
        ranges: in which each must lie.

    Raises:
        UsageError: it cannot be read, a dim is missing, or a point lies outside the ranges.
    """
    found = []
    for text in filter(None, map(str.strip, points.split(";"))):
        sizes = dict(map(_read_size, re.split(r"[\s,]+(?=[A-Za-z_])", text)))
        for one in ranges:
            size = sizes.get(one.name)
            if size is None or not one.holds(size):
                what = "has no size" if size is None else f"is {size}"
                raise UsageError(detail=f"--points: in `{text}` {one.name} {what}", help=f"--shapes says {one.text}")
        if others := sorted(set(sizes) - {one.name for one in ranges}):
            raise UsageError(detail=f"--points: --shapes has no {', '.join(others)}", help="name the dims of --shapes alone")
        found.append(tuple(sizes[one.name] for one in ranges))
    return tuple(found)


def _read_size(part: str) -> tuple[str, int]:
    found = _PART.match(part)
    if found is None or found[2] is None or found[3] is not None:
        raise UsageError(detail=f"--points: `{part.strip()}` is no size of a dim", help=_POINTS_HELP)
    return found[1], int(found[2])
