"""A call that was not verified is described by the part that differs."""

from __future__ import annotations

import numpy
import pytest
import torch

from fusion_advisor.fuse.live.call_difference import describe_difference, why_never
from fusion_advisor.fuse.live.call_signature import signature


class Held:
    """An object of a caller's."""

    def __init__(self, value):
        self.value = value


def key(*args, **kwargs):
    return signature(args, kwargs)


@pytest.mark.parametrize(
    ("mine", "verified", "says"),
    [
        (key(torch.zeros(8, 64)), [key(torch.zeros(8, 512))], "input 0 is [8, 64] float32, and [8, 512] float32 was verified"),
        (key(ids=torch.zeros(2).long()), [key(ids=torch.zeros(4).long())], "ids is [2] int64, and [4] int64 was verified"),
        (key(torch.zeros(3).half()), [key(torch.zeros(3))], "input 0 is [3] float16, and [3] float32 was verified"),
        (
            key(torch.zeros(4, 4).t()),
            [key(torch.zeros(4, 4))],
            "input 0 is [4, 4] float32 with strides [1, 4], and [4, 4] float32 with strides [4, 1] was verified",
        ),
        (key({"a": torch.zeros(1)}), [key({"a": torch.zeros(2)})], "input 0.a is [1] float32, and [2] float32 was verified"),
        (key([torch.zeros(1)]), [key([torch.zeros(2)])], "input 0[0] is [1] float32, and [2] float32 was verified"),
        (key(torch.zeros(1), True), [key(torch.zeros(1), False)], "input 1 is True, and False was verified"),
        (key(torch.zeros(1), True), [key(torch.zeros(1), 1)], "input 1 is True, and 1 was verified"),
        (key(x=torch.zeros(1), a=2.5), [key(x=torch.zeros(1), a=1.0)], "a is 2.5, and 1.0 was verified"),
        (key(a=float("nan")), [key(a=-0.0)], "a is nan, and -0.0 was verified"),
        (key(a=1 + 2j), [key(a=2j)], "a is (1+2j), and 2j was verified"),
        (key(a=torch.float16), [key(a=torch.float32)], "a is torch.float16, and torch.float32 was verified"),
        (key(a={"b": [1, "two"]}), [key(a={"b": [1, "three"]})], "a.b[1] is 'two', and 'three' was verified"),
        (key(a={"b": 1}), [key(a={"b": 1, "c": 2})], "a.c is not passed, and was when the call was verified"),
        (key(torch.zeros(1), mask=None), [key(torch.zeros(1))], "mask is passed, and was not when the call was verified"),
        (key([torch.zeros(1)] * 2), [key([torch.zeros(1)])], "input 0[1] is passed, and was not when the call was verified"),
        (key(torch.zeros(1)), [key(torch.zeros(1), torch.zeros(1))], "input 1 is not passed, and was when the call was verified"),
        (key(torch.zeros(1)), [], ""),
        (key({1: 2}), [key({1: 3})], "input 0[1] is 2, and 3 was verified"),
        (key(a=[]), [key(a=())], "the class of a is list, and tuple was verified"),
        (key(a=Held(1)), [key(a=3)], "a is another object, and 3 was verified"),
        (key(Held(1)), [key(Held(2))], "input 0 holds other contents than when the call was verified"),
        (key(a=slice(1, 2)), [key(a=slice(1, 3))], "a[1] is 2, and 3 was verified"),
    ],
)  # fmt: skip
def test_the_first_part_that_differs_is_named(mine, verified, says):
    assert describe_difference(mine, verified) == says


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (key(torch.zeros(1), numpy.zeros(3)), "input 1 is a numpy.ndarray"),
        (key(batch=Held({"image": numpy.zeros(3), "size": 3})), "batch.value.image is a numpy.ndarray"),
        (key([torch.Generator()]), "input 0[0] is a torch._C.Generator"),
    ],
)
def test_what_no_two_calls_can_be_compared_by_is_named(call, says):
    assert why_never(call) == f"{says}, and calls are told apart by tensors and plain values alone"


@pytest.mark.filterwarnings("ignore:.*(nested|Sparse CSR).*:UserWarning")
def test_a_tensor_without_strides_is_told_apart_by_nothing():
    for other in (torch.nested.nested_tensor([torch.zeros(3), torch.zeros(7)]), torch.eye(3).to_sparse_csr()):
        says = "input 0 is a nested or compressed sparse tensor. It has no strides, and two calls are compared by strides"
        assert why_never(key(other)) == says
        assert key(other) != key(other) and key(a=Held(other)) != key(a=Held(other))


def test_tensors_plain_values_and_objects_of_them_are_compared():
    assert why_never(key(torch.zeros(1), 2, a=Held([torch.zeros(2), None, Held(1.5)]), b={"c": "d"}, e=slice(1, 2))) == ""


def test_the_nearest_of_several_verified_calls_is_named():
    mine = key(torch.zeros(2, 8), mask=torch.zeros(8))
    others = [key(torch.zeros(1, 4), mask=torch.zeros(4)), key(torch.zeros(2, 8), mask=torch.zeros(9))]
    assert describe_difference(mine, others) == "mask is [8] float32, and [9] float32 was verified"
