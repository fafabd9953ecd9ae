"""A linear whose output rows are odd, stored where they belong by GEMMs for aligned operands: no padded rows, and no copy.

A row of N elements of 16 bits with N no multiple of eight begins anywhere, and no 128-bit store fits it: cuBLAS falls back to
kernels for operands aligned to nothing. But p = 8 / gcd(N, 8) rows together are a multiple of eight, so every p-th row begins
alike, and rows g, g + p, g + 2p, ... are a matrix whose leading dimension, p * N, is aligned. It begins aligned as well once the
first k = -g * N mod 8 columns are left out. So p products, of every p-th row with the columns from k on, write the result::

    row 0 (k = 0)   |........|........|.....            N = 21, p = 8: the product of group 0 writes 24 columns,
    row 1 (k = 3)                      ^^^|........|........|..         the last three of them at the head of row 1

A width is rounded up to a multiple of eight too. What a row has too much lies exactly in the first columns of the next row, which
that row's own product leaves out. One narrow product and a copy of at most seven columns put there what belongs there. Behind the
last row there are seven elements more.

Each of the p products reads the whole weight. With m rows it does m operations for each byte of it (2 * m * N * K for 2 * N * K
bytes). An H200 does 989e12 operations (bf16, dense) in the time of 4.8e12 bytes: 206 for a byte. From about 256 rows for each
product on, which are whole tiles of its kernels too, a product computes longer than it reads the weight.
"""

from __future__ import annotations

import math

import torch

from fusion_advisor.fuse.held import extended
from fusion_advisor.workload.adjacent import GEMM_MULTIPLE, padded_rows, roomy_rows

LEAST_ROWS = 256
"""Rows of each product, from which on it computes longer than it reads the weight (see above)."""


class OddRows:
    """``aten.linear`` without a bias, for 16-bit weights of an odd number of rows.

    Args:
        name: stands in the graph's code, and in traces.
        columns: of the result: the weight's rows, N.

    Raises:
        LayoutChanged: (when called) the weight has no room for seven more rows behind it.
    """

    def __init__(self, name: str, columns: int) -> None:
        self.__name__ = self.__qualname__ = name
        self._columns = columns
        self._period = period_of(columns)
        self._extended = extended(f"{name}_weight", roomy_rows(columns))

    @property
    def launches(self) -> int:
        """Products, and a copy, where there are rows for each product."""
        return self._period + 2

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return ``x @ weight.T``, contiguous.

        Args:
            x: [..., K].
            weight: [N, K].
        """
        rows, columns, period = math.prod(x.shape[:-1]), self._columns, self._period
        wide, flat_x = self._extended(weight), x.reshape(rows, x.shape[-1])
        memory = x.new_empty(rows * columns + GEMM_MULTIPLE - 1)
        for group in range(min(period, rows)):
            first = -group * columns % GEMM_MULTIPLE
            width = padded_rows(columns - first)
            every = memory.as_strided((-(-(rows - group) // period), width), (period * columns, 1), group * columns + first)
            torch.mm(flat_x[group::period], wide[first : first + width].t(), out=every)
        # Not a view: autograd refuses to write in place to one that was made without gradients.
        out = memory.resize_((*x.shape[:-1], columns))
        heads = GEMM_MULTIPLE - GEMM_MULTIPLE // period  # the most columns that a product leaves out
        out.view(rows, columns)[:, :heads] = torch.mm(flat_x, wide[:GEMM_MULTIPLE].t())[:, :heads]
        return out


def period_of(columns: int) -> int:
    """Return how many rows of this width begin differently: every so many they are aligned alike."""
    return GEMM_MULTIPLE // math.gcd(columns, GEMM_MULTIPLE)
