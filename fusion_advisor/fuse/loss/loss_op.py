"""The chunked loss as an op of torch's: AOTAutograd puts its forward and its backward pass into its two graphs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fusion_advisor.fuse.loss.chunked_loss import Form, Gradients, chunk_rows, gradients_again, loss_and_gradients

_NOTHING = (False, False, False)
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten.slice.Tensor, torch.ops.aten.alias.default)


def is_computed_again(dtype: torch.dtype) -> bool:
    """Whether the backward pass computes the logits again (see :mod:`~fusion_advisor.fuse.loss.chunked_loss`).

    Args:
        dtype: of the logits.
    """
    return dtype == torch.float16


@torch.library.custom_op("fusion_advisor::linear_cross_entropy", mutates_args=())
def _loss_op(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor, dtype: torch.dtype,
    reduction: int, ignore_index: int, smoothing: float, rows: int, asked: Sequence[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    form = Form(dtype=dtype, reduction=reduction, ignore_index=ignore_index, smoothing=smoothing, rows=rows)
    loss, gradients = loss_and_gradients(
        hidden, weight, bias, labels, form, _NOTHING if is_computed_again(dtype) else asked
    )  # fmt: skip
    return loss, *gradients


@_loss_op.register_fake
def _(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, _labels: torch.Tensor, dtype: torch.dtype, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    asked = rest[-1]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    made = _NOTHING if is_computed_again(dtype) else asked
    return hidden.new_empty((), dtype=wide), *empty_gradients(hidden, weight, bias, dtype, made)


def empty_gradients(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, asked: Sequence[bool]
) -> Gradients:  # fmt: skip
    """Return the gradients' shapes and dtypes for torch's traces: of hidden in the logits' dtype, (0,) for what was not asked.

    Args:
        hidden: (rows, width).
        weight: (columns, width).
        bias: (columns,) or None.
        dtype: of the logits.
        asked: which of the three ask for a gradient.
    """
    of_hidden, of_weight, of_bias = asked
    return (
        hidden.new_empty(hidden.shape if of_hidden else (0,), dtype=dtype),
        weight.new_empty(weight.shape if of_weight else (0,)),
        (weight if bias is None else bias).new_empty(weight.shape[:1] if of_bias else (0,)),
    )


@torch.library.custom_op("fusion_advisor::linear_cross_entropy_backward", mutates_args=())
def _backward_op(
    of_loss: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor,
    dtype: torch.dtype, reduction: int, ignore_index: int, smoothing: float, rows: int, asked: Sequence[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    form = Form(dtype=dtype, reduction=reduction, ignore_index=ignore_index, smoothing=smoothing, rows=rows)
    return gradients_again(of_loss, hidden, weight, bias, labels, form, asked)


@_backward_op.register_fake
def _(
    _of_loss: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, _labels: torch.Tensor,
    dtype: torch.dtype, *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    return empty_gradients(hidden, weight, bias, dtype, rest[-1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    operands, (dtype, *_) = inputs[:4], inputs[4:]
    ctx.rest = inputs[4:]
    ctx.dtypes = tuple(None if one is None else one.dtype for one in operands[:3])
    ctx.save_for_backward(*(operands if is_computed_again(dtype) else (*output[1:], inputs[3])))


def _backward(ctx: Any, of_loss: torch.Tensor, *_: Any) -> tuple[Any, ...]:
    dtype, asked = ctx.rest[0], ctx.rest[-1]
    is_again = is_computed_again(dtype)
    if is_again:
        gradients = _backward_op(of_loss, *ctx.saved_tensors, *ctx.rest)
    else:
        *gradients, labels = ctx.saved_tensors
        of_loss = _of_rows(of_loss, labels, ctx.rest[2])
    found: list[torch.Tensor | None] = []
    for gradient, own, is_asked in zip(gradients, ctx.dtypes, asked, strict=True):
        found.append(None if not is_asked else gradient.to(own) if is_again else gradient.to(own) * of_loss)
    return *found, *(None for _ in ctx.rest), None  # the labels' is the last


def _of_rows(of_loss: torch.Tensor, labels: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Return the loss's gradient, or 0 where no row counts.

    A sum over no row that is divided by their number has infinity as its gradient, and times the zeros of rows that do not count
    that is NaN. Eager writes zeros for them. One number is mended: a choice for each element needs as much memory as a weight.
    """
    return torch.where((labels != ignore_index).any(), of_loss, 0.0)


_loss_op.register_autograd(_backward, setup_context=_keep)


def read_at_once(joint: GraphModule) -> Iterator[Node]:
    """Yield the weights and labels in a graph of both passes that a loss reads in the forward pass alone.

    Gradients are made there, so a write to one between the passes would change nothing. In eager it is an error.

    Args:
        joint: AOTAutograd's.
    """
    for node in joint.graph.find_nodes(op="call_function", target=torch.ops.fusion_advisor.linear_cross_entropy.default):
        for source in map(_behind_views, (node.args[1], node.args[3])):
            if isinstance(source, Node) and source.op == "placeholder":
                yield source


def _behind_views(value: Any) -> Any:
    while isinstance(value, Node) and value.target in _VIEWS:
        value = value.args[0]
    return value


def linear_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor, dtype: torch.dtype,
    loss_dtype: torch.dtype, reduction: int, ignore_index: int, smoothing: float,
) -> torch.Tensor:  # fmt: skip
    """Return the cross-entropy of ``hidden @ weight.T + bias``; autograd knows its gradients, and AOTAutograd traces it.

    The gradients have none: AOTAutograd refuses a second backward pass over the graph that holds it.

    Args:
        hidden: (rows, width), floats.
        weight: (columns, width), floats.
        bias: (columns,) or None.
        labels: (rows,), int64.
        dtype: of the logits.
        loss_dtype: of the loss.
        reduction: ATen's number.
        ignore_index: label of rows that do not count.
        smoothing: share of the label's weight that all columns get evenly.
    """
    asked = [one is not None and one.requires_grad for one in (hidden, weight, bias)]
    rows = chunk_rows(*hidden.shape)
    loss, *_ = _loss_op(hidden, weight, bias, labels, dtype, reduction, ignore_index, smoothing, rows, asked)
    return loss.to(loss_dtype)
