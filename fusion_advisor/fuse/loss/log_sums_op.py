"""The chunked loss with the logarithm of each row's sum of exponentials, of which models make a z-loss, as an op of torch's.

Its backward pass computes the logits again in every dtype (see :mod:`~fusion_advisor.fuse.loss.chunked_loss`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusion_advisor.fuse.loss.chunked_loss import Form, Gradients, chunk_rows, gradients_again, loss_and_log_sums
from fusion_advisor.fuse.loss.loss_op import empty_gradients


@torch.library.custom_op("fusion_advisor::linear_cross_entropy_and_log_sums", mutates_args=())
def _loss_op(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor, dtype: torch.dtype,
    reduction: int, ignore_index: int, smoothing: float, rows: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    form = Form(dtype=dtype, reduction=reduction, ignore_index=ignore_index, smoothing=smoothing, rows=rows)
    return loss_and_log_sums(hidden, weight, bias, labels, form)


@_loss_op.register_fake
def _(
    hidden: torch.Tensor, _weight: torch.Tensor, _bias: torch.Tensor | None, labels: torch.Tensor, dtype: torch.dtype, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return hidden.new_empty((), dtype=wide), hidden.new_empty(labels.shape, dtype=wide)


@torch.library.custom_op("fusion_advisor::linear_cross_entropy_and_log_sums_backward", mutates_args=())
def _backward_op(
    of_loss: torch.Tensor, of_sums: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
    labels: torch.Tensor, dtype: torch.dtype, reduction: int, ignore_index: int, smoothing: float, rows: int,
    asked: Sequence[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    form = Form(dtype=dtype, reduction=reduction, ignore_index=ignore_index, smoothing=smoothing, rows=rows)
    return gradients_again(of_loss, hidden, weight, bias, labels, form, asked, of_sums)


@_backward_op.register_fake
def _(
    _of_loss: torch.Tensor, _of_sums: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
    _labels: torch.Tensor, dtype: torch.dtype, *rest: Any,
) -> Gradients:  # fmt: skip
    return empty_gradients(hidden, weight, bias, dtype, rest[-1])


def _keep(ctx: Any, inputs: tuple[Any, ...], **_: Any) -> None:
    ctx.rest = inputs[4:]
    ctx.save_for_backward(*inputs[:4])


def _backward(ctx: Any, of_loss: torch.Tensor, of_sums: torch.Tensor) -> tuple[Any, ...]:
    asked = list(ctx.needs_input_grad[:3])
    gradients = _backward_op(of_loss, of_sums, *ctx.saved_tensors, *ctx.rest, asked)
    found = (
        gradient.to(own.dtype) if is_asked else None
        for gradient, own, is_asked in zip(gradients, ctx.saved_tensors, asked, strict=False)  # the labels have none
    )
    return *found, None, *(None for _ in ctx.rest)


_loss_op.register_autograd(_backward, setup_context=_keep)


def linear_cross_entropy_and_log_sums(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor, dtype: torch.dtype,
    loss_dtype: torch.dtype, reduction: int, ignore_index: int, smoothing: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the cross-entropy of ``hidden @ weight.T + bias`` and each row's ``logsumexp``, in fp32 (fp64 for fp64 logits).

    Args:
        hidden: (rows, width), floats.
        weight: (columns, width), floats.
        bias: (columns,) or None.
        labels: (rows,), int64.
        dtype: of the logits.
        loss_dtype: of the loss.
        reduction: ATen's number.
        ignore_index: label of rows that do not count in the loss; their ``logsumexp`` is there.
        smoothing: share of the label's weight that all columns get evenly.
    """
    rows = chunk_rows(*hidden.shape)
    loss, log_sums = _loss_op(hidden, weight, bias, labels, dtype, reduction, ignore_index, smoothing, rows)
    return loss.to(loss_dtype), log_sums
