"""Products whose rows have an odd width, written where they belong by one batched GEMM for aligned operands.

This file needs torch alone: an exported package has a copy of it. ``odd_width_gemm.py`` of fusion-advisor says how it works.
"""

from __future__ import annotations

import math

import torch

_MULTIPLE = 8
"""Elements of 16 bits in 16 bytes, the alignment of operands for 128-bit loads and stores."""


def period_of(columns: int) -> int:
    """Return how many rows of this width begin differently: their alignment repeats after so many."""
    return _MULTIPLE // math.gcd(columns, _MULTIPLE)


def with_bias(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x and the weight with eight more columns, whose products add the bias to each row.

    Args:
        x: [M, K], with K a multiple of eight.
        weight: [N, K].
        bias: [N].

    Returns:
        [M, K + 8] and [N + 7, K + 8]; the last rows of the second hold anything.
    """
    rows, columns = len(x), len(weight)
    eighths = x.new_full((rows, _MULTIPLE), 1 / _MULTIPLE)
    repeated = bias.detach()[:, None].expand(columns, _MULTIPLE).contiguous()  # ATen vectorizes only such in cat
    return _joined(x, eighths, rows), _joined(weight.detach(), repeated, columns + _MULTIPLE - 1)


def store(x: torch.Tensor, weight: torch.Tensor, result: torch.Tensor) -> None:
    """Write ``x @ weight.T`` into rows of an odd width.

    Args:
        x: [M, K].
        weight: [N + 7, K], contiguous; its last seven rows may hold anything.
        result: [M, N], contiguous.
    """
    columns = result.shape[1]
    period, shift = period_of(columns), -columns % _MULTIPLE
    left_out = shift * (period - 1)
    middle = (columns - left_out) // _MULTIPLE * _MULTIPLE
    longer = len(x) % period  # so many groups have one row more than the others, and are a batch of their own
    for first, groups in ((0, longer), (longer, period - longer)):
        _batch(x[first:], weight[first * shift :], result[first:, first * shift :], groups, middle)
    for start, end in ((0, left_out), (middle, columns)):
        rows = -(-(end - start) // _MULTIPLE) * _MULTIPLE
        result[:, start:end] = torch.mm(x, weight[start : start + rows].t())[:, : end - start]


def _batch(x: torch.Tensor, weight: torch.Tensor, result: torch.Tensor, groups: int, middle: int) -> None:
    """Write ``middle`` columns of all rows of so many groups, from the places on where the first one's begin."""
    columns = result.stride(0)
    period, shift = period_of(columns), -columns % _MULTIPLE
    each = -(-len(x) // period)
    if not groups or not each:
        return
    row, element = x.stride()
    width = x.shape[1]
    places = x.as_strided((groups, each, width), (row, period * row, element))
    taken = weight.as_strided((groups, width, middle), (shift * width, 1, width))
    stored = result.as_strided((groups, each, middle), (columns + shift, period * columns, 1))
    torch.bmm(places, taken, out=stored)


def _joined(left: torch.Tensor, right: torch.Tensor, rows: int) -> torch.Tensor:
    """Return two matrices side by side, in memory for so many rows; those after theirs may hold anything: no result shows it."""
    width = left.shape[1] + right.shape[1]
    memory = left.new_empty((rows, width))
    torch.cat((left, right), 1, out=memory[: len(left)])
    return memory
