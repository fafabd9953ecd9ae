"""Stores a linear's odd-width rows in place, by one batched GEMM for aligned operands, without padding.

No 128-bit store fits a row of N 16-bit elements with N no multiple of eight, so cuBLAS falls back to kernels for unaligned
operands. But every p-th row with p = 8 / gcd(N, 8) has the same alignment: rows g, g + p, g + 2p, ... are a matrix with the
aligned leading dimension p * N, once the first a * g columns are left out, with a = -N mod 8. From one such group to the next
x moves by one row, the weight by a rows and the result by N + a elements. So one batch of p products, W columns each, writes
nearly all of the result::

    row 0   |........|........|....           N = 21, a = 3: group 0 writes columns 0 to W,
    row 1      |........|........|..          group 1 columns 3 to W + 3, ...

Two narrow products compute the columns before a * (p - 1), at most 49, and from W on, at most 56. Each product of the batch
reads the whole weight, so it needs about 256 rows before it computes longer than it reads. Figures:
``docs/measurements/odd_width_gemm.md``.
"""

from __future__ import annotations

import math

import torch

from fusion_advisor.fuse.rewrite.derived_tensors import extended
from fusion_advisor.workload.weight_packing import GEMM_MULTIPLE, padded_rows, roomy_rows

LEAST_ROWS = 256
"""Rows of each product of the batch, from which on it computes longer than it reads the weight (see above)."""
LEAST_COLUMNS = GEMM_MULTIPLE**2
"""Of a result: with as many, something is left for the batch."""


class OddRows:
    """``aten.linear`` without a bias, for 16-bit weights of an odd number of rows.

    Args:
        name: stands in the graph's code, and in traces.
        columns: of the result: the weight's rows, N; :data:`LEAST_COLUMNS` at least.

    Raises:
        LayoutChanged: (when called) the weight has no room for seven more rows after it.
    """

    def __init__(self, name: str, columns: int) -> None:
        self.__name__ = self.__qualname__ = name
        self._columns = columns
        self._period = period_of(columns)
        self._shift = -columns % GEMM_MULTIPLE
        self._extended = extended(f"{name}_weight", roomy_rows(columns))

    @property
    def launches(self) -> int:
        """The batch, two narrow products and a copy of each."""
        return 5

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return ``x @ weight.T``, contiguous.

        Args:
            x: [..., K].
            weight: [N, K].
        """
        rows, columns, width = math.prod(x.shape[:-1]), self._columns, x.shape[-1]
        wide, flat_x = self._extended(weight), x.reshape(rows, width)
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


def period_of(columns: int) -> int:
    """Return how many rows of this width begin differently: their alignment repeats after so many."""
    return GEMM_MULTIPLE // math.gcd(columns, GEMM_MULTIPLE)
