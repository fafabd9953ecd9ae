"""Ranges of sizes in a terminal: a short table, and what it leaves out is counted."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console, Group

from fusion_advisor.records import ShapePiece, ShapeRanges
from fusion_advisor.report.terminal.sizes import size_lines
from tests.report.fixtures import padded_shapes, point, shapes


def lines(made: ShapeRanges | None, width: int = 100) -> list[str]:
    console = Console(file=(stream := io.StringIO()), width=width, color_system=None, highlight=False)
    console.print(Group(*size_lines(made, console)))
    return stream.getvalue().rstrip("\n").splitlines()


def test_the_table_is_short_and_counts_the_rest() -> None:
    many = tuple(point(2, size, 2_000_000, 1_000_000, "gelu_tanh") for size in range(1, 31))
    found = lines(replace(shapes(), pieces=(ShapePiece(ranges=shapes().asked, points=many), *shapes().pieces)))
    assert len(found) <= 9
    assert found[0].split()[:3] == ["Sizes", "Eager", "Ours"]
    assert found[-1] == "31 more points, 2 more places with original ops in the report."


@pytest.mark.parametrize("width", [60, 80, 120])
def test_sizes_and_speedups_stay_whole(width: int) -> None:
    found = "\n".join(lines(shapes(), width))
    assert "batch 16, seq 1024" in found and "1.42×" in found and "– original ops" in found
    assert ("batch 2..16, seq 2..4096  ✓" in found) is (width == 120)


def test_nothing_without_ranges_and_a_reason_without_points() -> None:
    assert lines(None) == []
    refused = ShapePiece(ranges=shapes().asked, refusal="it branches on seq")
    assert lines(replace(shapes(), pieces=(refused,))) == [
        "batch 1..16, seq 1..4096 (65,536 sizes): the original ops run. It branches on seq."
    ]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_padded_sizes_what_they_took_and_what_is_left_out(width: int) -> None:
    found = " ".join(" ".join(lines(padded_shapes(), width)).split())
    assert "padded to the next batch (2, 3, 4, 5, 6, 8, 16) and seq (8, 16, 24, 32, 40 … 4,032: 39 sizes)" in found
    assert "Running padded calls against their own took 7.8 s of 1 min 37 s." in found
    assert "3 more lines on padding in the report." in found
