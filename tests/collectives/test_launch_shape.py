"""A call is cut so that every row is done once, what is under way fits the buffer, and all blocks fit on the GPU."""

from __future__ import annotations

import pytest

from fusion_advisor.collectives.launch_shape import RING_BYTES, launch_shape, why_unserved

SIZES = [(rows, cols) for rows in (1, 2, 7, 263, 265, 1024, 16384) for cols in (8, 2048, 3584, 8192, 8200, 32768)]


@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize(("rows", "cols"), SIZES)
def test_rows_are_covered_and_buffers_suffice(rows, cols, world_size):
    shape = launch_shape(rows, cols, world_size, 132)
    covered = shape.blocks * shape.rows_per_round * shape.rounds
    assert covered >= rows > covered - shape.blocks * shape.rows_per_round
    assert shape.blocks * shape.rows_per_round * (world_size + 1) * cols * 2 <= RING_BYTES
    assert shape.threads * shape.packs * 8 >= cols and shape.threads <= 1024 and shape.threads % 32 == 0
    assert shape.blocks <= 132 * shape.blocks_per_sm and shape.blocks_per_sm * shape.threads <= 2048


def test_one_row_takes_one_block_and_one_round():
    shape = launch_shape(1, 3584, 2, 132)
    assert (shape.blocks, shape.rows_per_round, shape.rounds, shape.threads, shape.packs) == (1, 1, 1, 448, 1)


@pytest.mark.parametrize(
    ("cols", "item_bytes", "world_size", "word"),
    [
        (3584, 2, 1, "ranks"), (3584, 2, 9, "ranks"), (3584, 4, 2, "bytes"), (3583, 2, 2, "rows"), (32776, 2, 2, "rows"),
        (0, 2, 2, "rows"),
    ],
)  # fmt: skip
def test_what_it_does_not_serve_it_names(cols, item_bytes, world_size, word):
    assert word in why_unserved(cols, item_bytes, world_size)
    assert not why_unserved(3584, 2, 2)
