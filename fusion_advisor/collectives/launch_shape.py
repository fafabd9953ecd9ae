"""How a call of the all-reduce kernel is cut: blocks, rows of a block in a round, rounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Way = Literal["one-shot", "two-shot"]
"""One-shot: each rank gets all rows of all ranks and sums them. Two-shot: each rank sums its share of the rows for all."""

Norm = Literal["rms", "rms-once", "layer"]
"""What follows the sum: RMSNorm as Llama writes it, RMSNorm that rounds once, after the weight (torch's own), LayerNorm."""

DATA_AT = 1 << 17
"""Bytes in front of the rows: counters and flags."""
RING_BYTES = 1 << 25
"""Of the rows that are under way in one round."""
BUFFER_BYTES = DATA_AT + 4 * RING_BYTES
MOST_RANKS = 8
_PACK = 8
"""Numbers of 2 bytes in the 16 bytes that a thread reads at once."""
_MOST_THREADS = 1024
_MOST_PACKS = 4
_MOST_BLOCKS = 512
_MOST_ROWS = 4
"""Of a block in a round. More would wait longer for the first row, and fewer would send more flags."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchShape:
    """Sizes of a launch; equal on all ranks, because a block talks to the blocks of the same number.

    Attributes:
        blocks: of the grid.
        blocks_per_sm: how many fit on a multiprocessor at once; the grid has no more than fit on all.
        threads: of a block.
        packs: 16-byte packs of a thread in a row.
        rows_per_round: of a block.
        rounds: until all rows are done.
    """

    blocks: int
    blocks_per_sm: int
    threads: int
    packs: int
    rows_per_round: int
    rounds: int


def why_unserved(cols: int, item_bytes: int, world_size: int) -> str:
    """Say why the kernel does not compute rows of this kind; empty where it does.

    Args:
        cols: numbers in a row.
        item_bytes: of a number.
        world_size: number of ranks.
    """
    if not 2 <= world_size <= MOST_RANKS:
        return f"{world_size} ranks: it serves 2 to {MOST_RANKS}"
    if item_bytes != 2:
        return f"numbers of {item_bytes} bytes: it serves bfloat16 and float16"
    most = _MOST_THREADS * _MOST_PACKS * _PACK
    if cols % _PACK or not 0 < cols <= most:
        return f"rows of {cols}: it serves multiples of {_PACK} up to {most}"
    return ""


def launch_shape(rows: int, cols: int, world_size: int, multiprocessors: int) -> LaunchShape:
    """Cut a call.

    All blocks of the grid are on the GPU at once. A block that had to wait for a place could not answer the block of another rank
    that waits for it.

    Args:
        rows: of the call, at least one.
        cols: numbers in a row, as :func:`why_unserved` allows.
        world_size: number of ranks.
        multiprocessors: of the smallest GPU.
    """
    packs = cols // _PACK
    packs_of_thread = -(-packs // _MOST_THREADS)
    threads = 32 * -(-packs // (32 * packs_of_thread))
    blocks_per_sm = max(1, min(8, _MOST_THREADS // threads))
    row_bytes = (world_size + 1) * cols * 2
    blocks = min(rows, blocks_per_sm * multiprocessors, _MOST_BLOCKS, RING_BYTES // row_bytes)
    rows_per_round = min(_MOST_ROWS, -(-rows // blocks), RING_BYTES // (row_bytes * blocks))
    return LaunchShape(
        blocks=blocks, blocks_per_sm=blocks_per_sm, threads=threads, packs=packs_of_thread, rows_per_round=rows_per_round,
        rounds=-(-rows // (blocks * rows_per_round)),
    )  # fmt: skip
