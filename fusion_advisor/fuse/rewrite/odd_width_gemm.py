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
from fusion_advisor.fuse.rewrite.odd_rows import store, with_bias
from fusion_advisor.workload.weight_packing import GEMM_MULTIPLE, roomy_rows

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

    Attributes:
        columns: see above.
        has_bias: see above.
        extended: views a weight with the rows after it, which a call without a bias reads.

    Raises:
        LayoutChanged: (when called without a bias) the weight has no room for seven more rows after it.
    """

    def __init__(self, name: str, columns: int, *, has_bias: bool = False) -> None:
        self.__name__ = self.__qualname__ = name
        self.columns = columns
        self.has_bias = has_bias
        self.extended = Extended(f"{name}_weight", roomy_rows(columns))

    @property
    def launches(self) -> int:
        """The batch, two narrow products and a copy of each; with a bias, also eight columns and a ``cat`` for each operand."""
        return 9 if self.has_bias else 5

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``x @ weight.T + bias``, contiguous.

        Args:
            x: [..., K].
            weight: [N, K], of x's dtype.
            bias: [N], of x's dtype; K must be a multiple of eight with one.
        """
        flat_x = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        if bias is None:
            wide = self.extended(weight)
        else:
            flat_x, wide = with_bias(flat_x, weight, bias)
        out = x.new_empty((*x.shape[:-1], self.columns))
        store(flat_x, wide, out.view(len(flat_x), self.columns))
        return out


def packing_bytes(rows: int, columns: int, width: int) -> int:
    """Return how many bytes a call with a bias reads and writes to pack its operands.

    Args:
        rows: of x and of the result.
        columns: of the result, N.
        width: of x and of the weight, K.
    """
    added = 3 * GEMM_MULTIPLE  # written as a piece, read from it, written after the row
    return (rows + columns) * (2 * width + added) * _ITEM_BYTES
