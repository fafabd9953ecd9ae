"""The loss in chunks against fp64 and eager's own error: dtypes, reductions, smoothing, ignored rows, factors of the loss."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fusion_advisor.fuse.loss.chunked_loss import MEAN, SUM, Form, chunk_bytes, chunk_rows, gradients_again, loss_and_gradients
from fusion_advisor.fuse.loss.loss_op import linear_cross_entropy

ROWS, WIDTH, COLUMNS = 37, 16, 53
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAMES = {MEAN: "mean", SUM: "sum"}


def operands(dtype, *, has_bias=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((ROWS, WIDTH), (COLUMNS, WIDTH), (COLUMNS,))
    )
    labels = torch.randint(0, COLUMNS, (ROWS,), generator=generator)
    labels[::5] = -100
    return hidden, 0.3 * weight, bias if has_bias else None, labels


def eager(hidden, weight, bias, labels, *, reduction=MEAN, smoothing=0.0, ignore_index=-100):
    logits = functional.linear(hidden, weight, bias)
    more = {"reduction": NAMES[reduction], "label_smoothing": smoothing, "ignore_index": ignore_index}
    return functional.cross_entropy(logits, labels, **more)


def chunked(hidden, weight, bias, labels, *, reduction=MEAN, smoothing=0.0, ignore_index=-100):
    dtype = hidden.dtype
    return linear_cross_entropy(hidden, weight, bias, labels, dtype, dtype, reduction, ignore_index, smoothing)


def step(call, tensors, labels, *, factor=1.0, **form):
    """The loss and all gradients of ``factor`` times the loss, in fp64."""
    leaves = [one if one is None else one.detach().clone().requires_grad_() for one in tensors]
    loss = call(*leaves, labels, **form)
    (loss * factor).backward()
    return [loss.detach().double(), *(leaf.grad.double() for leaf in leaves if leaf is not None)]


def assert_as_near(ours, theirs, truth, dtype, times=2.0):
    """Each result is at most twice as far from fp64 as eager's, or a few units in the last place."""
    for mine, own, true in zip(ours, theirs, truth, strict=True):
        scale = true.norm() + 1e-30
        limit = max(times * float((own - true).norm() / scale), 4 * torch.finfo(dtype).eps)
        assert float((mine - true).norm() / scale) <= limit, (mine, true)


@pytest.mark.parametrize(("reduction", "smoothing"), list(itertools.product((MEAN, SUM), (0.0, 0.1))), ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_loss_and_gradients_are_eagers(dtype, has_bias, reduction, smoothing):
    *tensors, labels = operands(dtype, has_bias=has_bias)
    form = {"reduction": reduction, "smoothing": smoothing, "factor": 3.0}
    wide = [one if one is None else one.double() for one in tensors]
    truth = step(eager, wide, labels, **form)
    assert_as_near(step(chunked, tensors, labels, **form), step(eager, tensors, labels, **form), truth, dtype)


def test_another_label_may_be_ignored():
    *tensors, labels = operands(torch.float64)
    labels = labels.clamp(min=0).index_fill(0, torch.tensor([1, 2]), 7)
    ours, theirs = (step(call, tensors, labels, ignore_index=7) for call in (chunked, eager))
    assert all(torch.allclose(mine, own) for mine, own in zip(ours, theirs, strict=True))
    assert not torch.allclose(ours[0], step(chunked, tensors, labels)[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", [MEAN, SUM])
def test_where_all_rows_are_ignored_the_mean_is_nan_and_gradients_are_zero(dtype, reduction):
    *tensors, labels = operands(dtype)
    ours, theirs = (step(call, tensors, torch.full_like(labels, -100), reduction=reduction) for call in (chunked, eager))
    assert math.isnan(ours[0]) == math.isnan(theirs[0]) == (reduction == MEAN)
    assert all(torch.equal(mine, own) and not mine.any() for mine, own in zip(ours[1:], theirs[1:], strict=True))


def test_a_scaled_loss_keeps_small_gradients_in_float16():
    """With a GradScaler's factor in front of the loss; most gradients of the logits would be 0 without it."""
    *tensors, labels = operands(torch.float16)
    hidden, weight, bias = tensors
    bias = bias - 14 * (torch.arange(COLUMNS) % 2)  # half of the classes have a share of about 1e-8
    tensors, form = [hidden, weight, bias.half()], {"factor": 2.0**12}
    truth = step(eager, [one.double() for one in tensors], labels, **form)
    ours, theirs = (step(call, tensors, labels, **form) for call in (chunked, eager))
    assert_as_near(ours, theirs, truth, torch.float16)
    rare = (truth[3].abs() > 0) & (truth[3].abs() < 1e-2)
    assert rare.sum() >= COLUMNS // 5 and ours[3][rare].all()


def test_the_weight_may_be_wider_than_the_logits():
    """Under autocast the parameters are fp32, and so are their gradients."""
    *tensors, labels = operands(torch.float32)
    theirs, truth = [], step(eager, [one.double() for one in tensors], labels)

    def autocast(hidden, weight, bias, labels):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return eager(hidden, weight, bias, labels)

    def ours(hidden, weight, bias, labels):
        return linear_cross_entropy(hidden, weight, bias, labels, torch.bfloat16, torch.float32, MEAN, -100, 0.0)

    theirs = step(autocast, tensors, labels)
    assert_as_near(step(ours, tensors, labels), theirs, truth, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_frozen_weight_gets_no_gradient(dtype):
    hidden, weight, _, labels = operands(dtype)
    hidden = hidden.requires_grad_()
    chunked(hidden, weight, None, labels).backward()
    assert hidden.grad is not None and weight.grad is None
    own = hidden.detach().clone().requires_grad_()
    eager(own, weight, None, labels).backward()
    torch.testing.assert_close(hidden.grad, own.grad, rtol=0.05, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_size_of_a_chunk_changes_no_result_but_its_rounding(dtype):
    hidden, weight, bias, labels = operands(dtype)
    form, every = Form(dtype=dtype, rows=ROWS), (True, True, True)
    whole, gradients = loss_and_gradients(hidden, weight, bias, labels, form, every)
    for rows in (1, 5, 36):
        loss, found = loss_and_gradients(hidden, weight, bias, labels, replace(form, rows=rows), every)
        torch.testing.assert_close(loss, whole)
        for mine, own in zip(found, gradients, strict=True):
            torch.testing.assert_close(mine, own, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_logits_far_apart_or_far_from_zero_lose_no_digits(smoothing):
    """A label whose share is below the smallest fp32, and rows near 1,000, where fp32 has four digits after the point."""
    *tensors, labels = operands(torch.float32)
    tensors[2] = 1000 + 400 * (torch.arange(COLUMNS) % 2) * tensors[2].sign()
    truth = step(eager, [one.double() for one in tensors], labels, smoothing=smoothing)
    ours, theirs = (step(call, tensors, labels, smoothing=smoothing) for call in (chunked, eager))
    assert_as_near(ours, theirs, truth, torch.float32)


def test_torch_takes_it_for_an_op():
    hidden, weight, bias, labels = operands(torch.float32)
    leaves = [one.requires_grad_() for one in (hidden, weight, bias)]
    op = torch.ops.fusion_advisor.linear_cross_entropy.default
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(op, (*leaves, labels, torch.float32, MEAN, -100, 0.0, 8, [True] * 3), test_utils=checks)


def test_a_chunk_is_a_quarter_of_the_rows_or_as_many_as_its_products_need():
    assert [chunk_rows(rows, 768) for rows in (1, 64, 4096, 65536)] == [1, 16, 1024, 4096]  # equal ones
    assert chunk_rows(65537, 768) == 3072
    assert [chunk_rows(65536, width) for width in (64, 8192)] == [1024, 16384]
    assert chunk_bytes(4096, 50257, 768, 2) == 1024 * 50257 * 6


class Made(TorchDispatchMode):
    """Notes the largest tensor that an op makes."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for one in pytree.tree_leaves(result):
            if isinstance(one, torch.Tensor):
                self.largest = max(self.largest, one.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_no_tensor_has_all_logits(dtype):
    rows, width, columns = 512, 16, 2048
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(shape, width, generator=generator).to(dtype) for shape in (rows, columns))
    labels = torch.randint(0, columns, (rows,), generator=generator)
    form, every = Form(dtype=dtype, rows=chunk_rows(rows, width)), (True, True, False)
    with Made() as own:
        eager(hidden, weight, None, labels)
    assert own.largest >= rows * columns * dtype.itemsize
    with Made() as forward:
        loss_and_gradients(hidden, weight, None, labels, form, every)
    with Made() as backward:
        gradients_again(torch.ones(()), hidden, weight, None, labels, form, every)
    # A quarter of the rows in fp32.
    assert forward.largest == backward.largest == rows // 4 * columns * 4


class Products(TorchDispatchMode):
    """Notes the rows of every operand and result of a product, as strides in bytes, and how wide the softmax is."""

    def __init__(self):
        super().__init__()
        self.strides, self.widths, self.products = [], [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.mm.out):
            self.products += 1
            self.strides += [max(one.stride()) * one.itemsize for one in (*args, result) if one.dim() == 2]
        if func is torch.ops.aten._softmax.default:
            self.widths.append(int((result[0] > 0).sum()))
        return result


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_all_three_products_of_an_odd_vocabulary_have_aligned_rows(dtype, has_bias):
    hidden, weight, bias, labels = operands(dtype, has_bias=has_bias)
    form = Form(dtype=dtype, rows=16)
    with Products() as own:
        eager(hidden, weight, bias, labels)
    assert any(one % 16 for one in own.strides)
    with Products() as ours:
        gradients_again(torch.ones(()), hidden, weight, bias, labels, form, (True, True, has_bias))
    assert ours.products == 3 * 3 and not any(one % 16 for one in ours.strides)  # in each of three chunks
    assert set(ours.widths) == {COLUMNS}  # what pads the rows is no part of the softmax
