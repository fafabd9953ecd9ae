"""Stores a linear's odd-width rows in place, by one batched GEMM for aligned operands, without padding.

No 128-bit store fits a row of N 16-bit elements with N no multiple of eight, so cuBLAS falls back to kernels for unaligned
operands. But every p-th row with p = 8 / gcd(N, 8) has the same alignment: rows g, g + p, g + 2p, ... are a matrix with the
aligned leading dimension p * N, once the first a * g columns are left out, with a = -N mod 8. From one such group to the next
x moves by one row, the weight by a rows and the result by N + a elements. So one batch of p products, W columns each, writes
nearly all of the result::

    row 0   |........|........|....           N = 21, a = 3: group 0 writes columns 0 to W,
    row 1      |........|........|..          group 1 columns 3 to W + 3, ...

Two narrow products compute the columns before a * (p - 1), at most 49, and from W on, at most 56. Each product of the batch
reads the whole weight, so it needs about 256 rows before it computes longer than it reads.

A bias becomes eight more columns of K. ``addmm`` into strided memory writes the bias to each row of the result first and has its
GEMM read that: a copy of the whole result. So each call packs both operands instead, which is less wherever K is clearly smaller
than the number of rows: eight copies of its bias follow each row of the weight, and eight eighths each row of x. Their products
and sums are exact in fp32, also for infinite biases, and eight equal columns take one launch; a one and seven zeros would take
two. Nothing is kept from call to call: what is written to a weight or a bias is seen. Figures:
``docs/measurements/odd_width_gemm.md``.
"""

from __future__ import annotations

import math

import torch

from fusion_advisor.fuse.rewrite.derived_tensors import Extended
from fusion_advisor.workload.weight_packing import GEMM_MULTIPLE, padded_rows, roomy_rows

LEAST_ROWS = 256
"""Rows of each product of the batch, from which on it computes longer than it reads the weight (see above)."""
LEAST_COLUMNS = GEMM_MULTIPLE**2
"""Of a result: with as many, something is left for the batch."""
_ITEM_BYTES = 2
"""Of every operand and result."""


class OddRows:
    """``aten.linear`` for 16-bit weights of an odd number of rows.

    Args:
        name: stands in the graph's code, and in traces.
        columns: of the result: the weight's rows, N; :data:`LEAST_COLUMNS` at least.
        has_bias: whether calls pass one.

    Raises:
        LayoutChanged: (when called without a bias) the weight has no room for seven more rows after it.
    """

    def __init__(self, name: str, columns: int, *, has_bias: bool = False) -> None:
        self.__name__ = self.__qualname__ = name
        self._columns = columns
        self._has_bias = has_bias
        self._period = period_of(columns)
        self._shift = -columns % GEMM_MULTIPLE
        self._extended = Extended(f"{name}_weight", roomy_rows(columns))

    @property
    def launches(self) -> int:
        """The batch, two narrow products and a copy of each; with a bias, also eight columns and a ``cat`` for each operand."""
        return 9 if self._has_bias else 5

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``x @ weight.T + bias``, contiguous.

        Args:
            x: [..., K].
            weight: [N, K], of x's dtype.
            bias: [N], of x's dtype; K must be a multiple of eight with one.
        """
        rows, columns = math.prod(x.shape[:-1]), self._columns
        flat_x = x.reshape(rows, x.shape[-1])
        if bias is None:
            wide = self._extended(weight)
        else:
            eighths = x.new_full((rows, GEMM_MULTIPLE), 1 / GEMM_MULTIPLE)
            repeated = bias.detach()[:, None].expand(columns, GEMM_MULTIPLE).contiguous()  # ATen vectorizes only such in cat
            flat_x = _joined(flat_x, eighths, rows)
            wide = _joined(weight.detach(), repeated, roomy_rows(columns))
        out = x.new_empty((*x.shape[:-1], columns))
        result = out.view(rows, columns)
        left_out = self._shift * (self._period - 1)
        middle = (columns - left_out) // GEMM_MULTIPLE * GEMM_MULTIPLE
        longer = rows % self._period  # so many groups have one row more than the others, and are a batch of their own
        for first, groups in ((0, longer), (longer, self._period - longer)):
            self._batch(flat_x[first:], wide[first * self._shift :], result[first:, first * self._shift :], groups, middle)
        for start, end in ((0, left_out), (middle, columns)):
            narrow = torch.mm(flat_x, wide[start : start + padded_rows(end - start)].t())
            result[:, start:end] = narrow[:, : end - start]
        return out

    def _batch(self, x: torch.Tensor, weight: torch.Tensor, result: torch.Tensor, groups: int, middle: int) -> None:
        """Write ``middle`` columns of all rows of so many groups, from the places on where the first one's begin."""
        each = -(-len(x) // self._period)
        if not groups or not each:
            return
        row, element = x.stride()
        width = x.shape[1]
        places = x.as_strided((groups, each, width), (row, self._period * row, element))
        taken = weight.as_strided((groups, width, middle), (self._shift * width, 1, width))
        stored = result.as_strided((groups, each, middle), (self._columns + self._shift, self._period * self._columns, 1))
        torch.bmm(places, taken, out=stored)


def packing_bytes(rows: int, columns: int, width: int) -> int:
    """Return how many bytes a call with a bias reads and writes to pack its operands.

    Args:
        rows: of x and of the result.
        columns: of the result, N.
        width: of x and of the weight, K.
    """
    added = 3 * GEMM_MULTIPLE  # written as a piece, read from it, written after the row
    return (rows + columns) * (2 * width + added) * _ITEM_BYTES


def period_of(columns: int) -> int:
    """Return how many rows of this width begin differently: their alignment repeats after so many."""
    return GEMM_MULTIPLE // math.gcd(columns, GEMM_MULTIPLE)


def _joined(left: torch.Tensor, right: torch.Tensor, rows: int) -> torch.Tensor:
    """Return two matrices side by side, in memory for so many rows; those after theirs may hold anything: no result shows it."""
    width = left.shape[1] + right.shape[1]
    memory = left.new_empty((rows, width))
    torch.cat((left, right), 1, out=memory[: len(left)])
    return memory
