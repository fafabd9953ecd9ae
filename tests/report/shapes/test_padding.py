"""What a report says about calls that run in a CUDA graph of larger sizes."""

from __future__ import annotations

from dataclasses import replace

from fusion_advisor.report.shapes.padding import padding_cost, padding_lines
from tests.report.fixtures import padded_shapes, shapes


def test_each_piece_names_its_capacities_or_its_reason() -> None:
    lines = padding_lines(padded_shapes())
    assert lines[0] == (
        "batch 2..16, seq 2..4096: padded to the next batch (2, 3, 4, 5, 6, 8, 16) and "
        "seq (8, 16, 24, 32, 40 … 4,032: 39 sizes). The graph proves that padding changes nothing."
    )
    assert lines[1] == (
        "batch 2..16, seq 2..4096: calls near batch 16, seq 1024 are not padded: "
        "its launches take 21.40 ms, the larger graph 22.10 ms."
    )
    assert lines[2].startswith("batch 2..16, seq 1: padded to the next batch (2,")
    assert lines[3].endswith("seq is not padded: what the padding holds changes results at batch=2, seq=9.")


def test_a_reason_of_several_pieces_is_said_once() -> None:
    *_, last = lines = padding_lines(padded_shapes())
    assert len(lines) == 5
    assert last.startswith(
        "decode: batch 2..16, seq 2..4096; padded decode: batch 2..16, seq 1: batch and seq are not padded: each"
    )
    made = padded_shapes()
    decode = made.pieces[3]
    several = [replace(decode, call=f"decode {number}") for number in range(5)]
    (line,) = padding_lines(replace(made, pieces=tuple(several)))
    assert "decode 2: batch 2..16, seq 2..4096; and 2 more pieces: batch and seq are not padded" in line


def test_what_the_trial_took() -> None:
    assert padding_cost(padded_shapes()) == "Running padded calls against their own took 7.8 s of 1 min 37 s."
    assert padding_cost(replace(padded_shapes(), seconds=0.0)) == "Running padded calls against their own took 7.8 s."


def test_masks_that_are_padded_with_zeros_are_named() -> None:
    made = padded_shapes()
    (first, *_) = padding_lines(replace(made, pieces=(replace(made.pieces[0], masked=("seq",)),)))
    assert "and seq (8, 16, 24, 32, 40 … 4,032: 39 sizes) with zeros in the masks. The graph proves" in first


def test_nothing_where_nothing_runs_as_a_graph_and_names_alone_of_an_earlier_version() -> None:
    assert padding_lines(shapes()) == () and padding_cost(shapes()) == ""
    first, *rest = shapes().pieces
    (line,) = padding_lines(replace(shapes(), pieces=(replace(first, padded=("batch",)), *rest)))
    assert line == "batch 2..16, seq 2..4096: padded to the next batch. The graph proves that padding changes nothing."


def test_steps_that_run_in_segments_are_named() -> None:
    made = shapes()
    decode = replace(made.pieces[0], call="decode")
    served = [point for point in decode.points if not point.reason]
    assert len(served) > 1
    points = tuple(replace(point, in_segments=True) for point in decode.points)
    (line,) = padding_lines(replace(made, pieces=(replace(decode, points=points),)))
    assert line == "decode: batch 2..16, seq 2..4096: what does not depend on the cache's length runs as CUDA graphs."
    points = tuple(replace(point, in_segments=point is served[0]) for point in decode.points)
    (line,) = padding_lines(replace(made, pieces=(replace(decode, points=points),)))
    near = ", ".join(f"{name} {size}" for name, size in served[0].sizes)
    assert line.endswith(f"runs as CUDA graphs near {near}.")
