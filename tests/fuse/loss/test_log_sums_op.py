"""The loss in chunks with each row's ``logsumexp`` against fp64 and eager's own error: the z-losses of PaLM, OLMo and Liger."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional

from fusion_advisor.fuse.loss.chunked_loss import MEAN, SUM, Form, chunk_rows, gradients_again, loss_and_log_sums
from fusion_advisor.fuse.loss.log_sums_op import linear_cross_entropy_and_log_sums
from tests.fuse.loss.test_chunked_loss import COLUMNS, DTYPES, NAMES, ROWS, Made, assert_as_near, operands, step

Z = 0.05


def of_all_rows(loss, log_sums, labels):
    """As PaLM writes it."""
    return loss + Z * log_sums.square().mean()


def of_counted_rows(loss, log_sums, labels):
    """As OLMo writes it, and what Liger's ``lse_square_scale`` means."""
    is_counted = labels != -100
    return loss + Z * (log_sums.pow(2) * is_counted).sum() / is_counted.sum()


def eager(hidden, weight, bias, labels, *, z_loss, reduction=MEAN, smoothing=0.0):
    logits = functional.linear(hidden, weight, bias)
    loss = functional.cross_entropy(logits, labels, reduction=NAMES[reduction], label_smoothing=smoothing)
    return z_loss(loss, logits.float().logsumexp(-1) if logits.itemsize < 4 else logits.logsumexp(-1), labels)


def chunked(hidden, weight, bias, labels, *, z_loss, reduction=MEAN, smoothing=0.0):
    dtype = hidden.dtype
    return z_loss(
        *linear_cross_entropy_and_log_sums(hidden, weight, bias, labels, dtype, dtype, reduction, -100, smoothing), labels
    )


@pytest.mark.parametrize("z_loss", [of_all_rows, of_counted_rows])
@pytest.mark.parametrize(("reduction", "smoothing"), list(itertools.product((MEAN, SUM), (0.0, 0.1))), ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_loss_and_gradients_are_eagers(dtype, has_bias, reduction, smoothing, z_loss):
    *tensors, labels = operands(dtype, has_bias=has_bias)
    form = {"reduction": reduction, "smoothing": smoothing, "factor": 3.0, "z_loss": z_loss}
    wide = [one if one is None else one.double() for one in tensors]
    truth = step(eager, wide, labels, **form)
    assert_as_near(step(chunked, tensors, labels, **form), step(eager, tensors, labels, **form), truth, dtype)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_in_float64_gradients_are_the_slopes(smoothing):
    hidden, weight, bias, labels = (one[:7] if one.shape[0] == ROWS else one for one in operands(torch.float64))
    leaves = [one.clone().requires_grad_() for one in (hidden, weight, bias)]
    assert torch.autograd.gradcheck(lambda *given: chunked(*given, labels, z_loss=of_all_rows, smoothing=smoothing), leaves)


def test_rows_that_do_not_count_have_their_logarithm_and_its_gradient():
    *tensors, labels = operands(torch.float64)
    ours, theirs = (step(call, tensors, torch.full_like(labels, -100), z_loss=last_of_sums) for call in (chunked, eager))
    for mine, own in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, own)
    assert ours[1][-1].any() and not ours[1][:-1].any()


def last_of_sums(loss, log_sums, labels):
    return log_sums[-1]


def test_the_loss_alone_may_be_differentiated():
    *tensors, labels = operands(torch.float64)
    ours, theirs = (step(call, tensors, labels, z_loss=lambda loss, *_: loss) for call in (chunked, eager))
    assert all(torch.allclose(mine, own) for mine, own in zip(ours, theirs, strict=True))


def test_logits_far_from_zero_lose_no_digits():
    *tensors, labels = operands(torch.float32)
    tensors[2] = 1000 + 400 * (torch.arange(COLUMNS) % 2) * tensors[2].sign()
    truth = step(eager, [one.double() for one in tensors], labels, z_loss=of_all_rows)
    ours, theirs = (step(call, tensors, labels, z_loss=of_all_rows) for call in (chunked, eager))
    assert_as_near(ours, theirs, truth, torch.float32)


def test_a_frozen_weight_gets_no_gradient():
    hidden, weight, _, labels = operands(torch.float32)
    hidden = hidden.requires_grad_()
    chunked(hidden, weight, None, labels, z_loss=of_all_rows).backward()
    own = hidden.detach().clone().requires_grad_()
    eager(own, weight, None, labels, z_loss=of_all_rows).backward()
    torch.testing.assert_close(hidden.grad, own.grad)
    assert weight.grad is None


def test_torch_takes_it_for_an_op():
    hidden, weight, bias, labels = operands(torch.float32)
    leaves = [one.requires_grad_() for one in (hidden, weight, bias)]
    op = torch.ops.fusion_advisor.linear_cross_entropy_and_log_sums.default
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(op, (*leaves, labels, torch.float32, MEAN, -100, 0.0, 8), test_utils=checks)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_tensor_has_all_logits(dtype):
    rows, width, columns = 512, 16, 2048
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(shape, width, generator=generator).to(dtype) for shape in (rows, columns))
    labels = torch.randint(0, columns, (rows,), generator=generator)
    form, of_sums = Form(dtype=dtype, rows=chunk_rows(rows, width)), torch.ones(rows)
    with Made() as forward:
        loss_and_log_sums(hidden, weight, None, labels, form)
    with Made() as backward:
        gradients_again(torch.ones(()), hidden, weight, None, labels, form, (True, True, False), of_sums)
    assert forward.largest == backward.largest == rows // 4 * columns * 4  # a quarter of the rows in fp32
