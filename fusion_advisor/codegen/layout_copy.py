"""Copies to plain strides.

:func:`rows_copy` takes rows whose stride is larger than their length: what is left of a padded GEMM's result once its padding is
cut off. Rows of 50,257 16-bit elements start at odd places, so that no vector store fits a row: ATen's copy of 4,096 of them
takes 474 µs on an H200, whose memory would move them in 195 µs. All rows together are one run, though. A kernel that walks the
result by one index writes it in whole 16-byte packs, wherever rows begin, and only its reads are element by element.

:func:`permuted_copy` takes dims in another order: the patches of pictures, gathered for a GEMM, and what it gives as a
convolution would.
"""

from __future__ import annotations

import math

from fusion_advisor.ir.program import Operand, Program, Store, Value


def rows_copy(rows: int, cols: int, stride: int, dtype: str) -> Program:
    """Return the Program that copies rows to a contiguous tensor.

    Args:
        rows: how many.
        cols: elements of a row.
        stride: from the start of a row to that of the next, in elements; not below ``cols``.
        dtype: of both tensors.
    """
    count = rows * cols
    values = (
        Value(op="index", dim=0, dtype="int64"),
        Value(op="index", dim=0, dtype="int64"),  # its own number: an index that is only divided stays one of 32 bits
        Value(op="extent", constant=cols, dtype="int64"),
        Value(op="quotient", args=(1, 2), dtype="int64"),
        Value(op="load", operand=0, strides=(0,), args=(0, 3), steps=(1, stride - cols)),
    )
    return Program(
        dims=(count,),
        operands=(
            Operand(name="wide", dtype=dtype, element_count=count),
            Operand(name="rows", dtype=dtype, is_output=True, element_count=count),
        ),
        values=values,
        stores=(Store(operand=1, value=4, strides=(1,)),),
    )


def permuted_copy(shape: tuple[int, ...], stride: tuple[int, ...], dtype: str) -> Program:
    """Return the Program that copies a tensor of permuted dims to a contiguous one.

    Args:
        shape: of both.
        stride: of the tensor, in elements.
        dtype: of both.
    """
    dims: list[list[int]] = []  # size and stride; dims that lie in memory as they do here are one
    for size, step in zip(shape, stride, strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == size * step:
            dims[-1] = [dims[-1][0] * size, step]
        else:
            dims.append([size, step])
    sizes = tuple(size for size, _ in dims) or (1,)
    count = math.prod(sizes)
    plain = tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))
    return Program(
        dims=sizes,
        operands=(
            Operand(name="permuted", dtype=dtype, element_count=count),
            Operand(name="plain", dtype=dtype, is_output=True, element_count=count),
        ),
        values=(Value(op="load", operand=0, strides=tuple(step for _, step in dims) or (1,)),),
        stores=(Store(operand=1, value=0, strides=plain),),
    )


_LEAST_TILE = 16
"""Elements of a run that Triton makes tiles of."""


def faster_language(program: Program, *, is_of_rows: bool, has_cuda: bool) -> str | None:
    """Return the backend whose copy is faster than ATen's; None where ATen's copy serves.

    Args:
        program: of :func:`rows_copy` or :func:`permuted_copy`.
        is_of_rows: whether it is the former.
        has_cuda: whether CUDA C++ can be launched.
    """
    if is_of_rows:
        return "cuda" if has_cuda else "triton"
    is_turned = program.values[0].strides[-1] != 1
    is_short = program.dims[-1] < _LEAST_TILE
    if has_cuda and (is_short or not is_turned):
        return "cuda"
    return None if is_short else "triton"
