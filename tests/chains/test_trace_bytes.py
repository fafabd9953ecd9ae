"""Bytes from recorded shapes: bounds lean to their own side."""

from __future__ import annotations

import pytest

from fusion_advisor.chains.trace_bytes import floor_bytes, moved_bytes, read_bytes
from fusion_advisor.records import TensorMeta


def tensor(*shape, dtype="float32", stride=()):
    return TensorMeta(shape=shape, stride=stride, dtype=dtype)


def test_an_expanded_dim_holds_one_element():
    assert read_bytes(tensor(8, 1, 512, 512, dtype="bfloat16", stride=(0, 0, 512, 1))) == 512 * 512 * 2
    assert read_bytes(tensor(8, 4)) == 128
    assert read_bytes(tensor()) == 4
    assert read_bytes(tensor(0, 4, stride=(0, 1))) == 0


def test_a_pointwise_kernel_moves_its_inputs_and_its_broadcast_result():
    assert moved_bytes("pointwise", "add", (tensor(8, 4), tensor(4), None)) == 128 + 16 + 128
    assert moved_bytes("pointwise", "where", (tensor(8, 1, dtype="bool"), tensor(4))) == 8 + 16 + 128


@pytest.mark.parametrize(
    ("category", "label", "inputs"),
    [
        ("reduction", "mean", (tensor(8, 4),)),
        ("pointwise", "to", (tensor(8, 4),)),
        ("pointwise", "add", None),
        ("pointwise", "add", (None, tensor(4))),
        ("pointwise", "add", (tensor(3), tensor(4))),
    ],
)
def test_where_shapes_do_not_tell_nothing_is_claimed(category, label, inputs):
    assert moved_bytes(category, label, inputs) is None


X, HALF, W = tensor(64, 128), tensor(64, 128, dtype="bfloat16"), tensor(128, dtype="bfloat16")


@pytest.mark.parametrize(
    ("ops", "floor"),
    [
        # read x once, write once, however many ops
        ([("pointwise", "mul", (X, None)), ("pointwise", "tanh", (X,)), ("pointwise", "add", (X, X))], 2 * 64 * 128 * 4),
        # a residual of the same shape may be the same tensor
        ([("pointwise", "add", (X, X)), ("pointwise", "tanh", (X,))], 2 * 64 * 128 * 4),
        # a bias of another shape is read too
        ([("pointwise", "tanh", (X,)), ("pointwise", "add", (X, tensor(128)))], 2 * 64 * 128 * 4 + 128 * 4),
        # behind a reduction any shape may have been made inside: only the first inputs and the result count
        ([("memory", "to", (HALF,)), ("reduction", "mean", (X,)), ("pointwise", "mul", (HALF, W))], 2 * 64 * 128 * 2),
        # a cast's result may have one byte for each element
        ([("pointwise", "mul", (X, X)), ("memory", "to", (X,))], 64 * 128 * 4 + 64 * 128),
        ([("pointwise", "add", (X, X)), ("reduction", "layer_norm", (X, None, tensor(128)))], 2 * 64 * 128 * 4 + 512),
        # a table is read in places: its rows are not known
        ([("memory", "embedding", (tensor(50257, 128), tensor(64, dtype="int64"))), ("pointwise", "add", (X, X))], 64 * 128 * 4),
        ([("memory", "cat", (None,)), ("pointwise", "add", (X, X))], None),
        ([("pointwise", "mul", None), ("pointwise", "add", (X, X))], None),
    ],
)  # fmt: skip
def test_the_floor_counts_only_what_is_certain(ops, floor):
    assert floor_bytes(ops) == floor
