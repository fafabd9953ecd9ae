"""Large results compared piece by piece.

A comparison in fp64 makes up to twenty tensors of a result's size. Compared at once, the logarithms of probabilities of a small
model took 60 times their own size. In pieces they take what the oracle and the original ops hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

MOST = 1 << 24
"""Elements of a piece: 134 MB in fp64."""


def pieces(tensors: Sequence[torch.Tensor], *, keeps_rows: bool = False, most: int = MOST) -> Iterator[tuple[torch.Tensor, ...]]:
    """Cut tensors of one shape at the same places; small ones are one piece, as they are.

    Args:
        tensors: of one shape, any layouts and dtypes.
        keeps_rows: no row (along the last dim) is cut, and pieces have two dims.
        most: elements of a piece, which one row may exceed.
    """
    count = tensors[0].numel()
    if count <= most:
        yield tuple(tensors)
        return
    shape = (-1, tensors[0].shape[-1]) if keeps_rows else (-1,)
    flat = [tensor.detach().reshape(shape) for tensor in tensors]
    step = max(most // shape[-1], 1) if keeps_rows else most
    for start in range(0, len(flat[0]), step):
        yield tuple(one[start : start + step] for one in flat)
