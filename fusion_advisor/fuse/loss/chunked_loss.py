"""Cross-entropy of a linear layer, a few rows at a time: neither pass holds the logits of all rows.

The gradient of the logits needs nothing of the backward pass but one number, the loss's own gradient. So the forward pass makes
the gradients of the layer's operands from each chunk's logits at once, and the backward pass multiplies them by that number: it
reads and writes the gradient of the weight once more. The other way computes each chunk's logits again, a product more: for GPT-2
(50,257 × 768, 4,096 rows) 316 GFLOP instead of 0.3 GB.

In float16 the second way is the right one. A GradScaler's factor must be in the gradient of the logits before it is rounded:
without it most of them are below the smallest float16.

A z-loss is made of each row's logarithm of the sum of exponentials (``torch.logsumexp``). Its share of the logits' gradient is
known when the backward pass has come to these numbers. So a loss with them takes the second way in every dtype.

In 16 bits the weight gets rows of zeros up to a multiple of eight where it is cast, and their logits are minus infinity. So all
three products of a chunk have aligned rows, whatever the vocabulary is; cuBLAS runs slower kernels otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

MULTIPLE = 8
"""Columns of 16-bit logits are a multiple of it, so that each row begins at 16 bytes."""
_PARTS, _LEAST_ROWS, _ROWS_OF_WIDTH = 4, 1024, 4
MEAN, SUM = 1, 2
"""ATen's numbers of the two ways to reduce."""


def chunk_rows(rows: int, width: int) -> int:
    """Return how many rows a chunk has.

    Each chunk adds to the fp32 gradient of the weight, which has a row for each word: 12 bytes an element. In 16 bits a chunk's
    own logits move 20 bytes an element. With four rows for each column of the layer's input the first is 15% of the second. More
    rows cost memory: 3,072 rows of GPT-2's 50,257 words take 0.9 GB. Where there are few rows, a chunk has a quarter of them.

    Chunks are of one size where up to a third more rows make them so: then one kernel serves all.

    Args:
        rows: of the linear layer's input.
        width: of the linear layer's input.
    """
    least = max(1, min(-(-rows // _PARTS), max(_LEAST_ROWS, _ROWS_OF_WIDTH * width)))
    most = min(least * 4 // 3, -(-rows // _PARTS))
    return next((rows // count for count in range(-(-rows // least), -(-rows // most) - 1, -1) if rows % count == 0), least)


def chunk_bytes(rows: int, columns: int, width: int, item_bytes: int) -> int:
    """Return what one chunk holds at most: its logits, which their gradient replaces, and their softmax.

    Args:
        rows: of the linear layer's input.
        columns: of its result.
        width: of its input.
        item_bytes: of a logit.
    """
    return chunk_rows(rows, width) * columns * (item_bytes + max(4, item_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How a loss is computed.

    Attributes:
        dtype: of the logits.
        reduction: :data:`MEAN` or :data:`SUM`.
        ignore_index: label of rows that do not count.
        smoothing: share of the label's weight that all columns get evenly.
        rows: of a chunk.
    """

    dtype: torch.dtype
    reduction: int = MEAN
    ignore_index: int = -100
    smoothing: float = 0.0
    rows: int

    @property
    def wide(self) -> torch.dtype:
        """In which sums are made."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def columns(self, columns: int) -> int:
        """Return the width of a chunk's logits."""
        return -(-columns // MULTIPLE) * MULTIPLE if self.dtype.itemsize == 2 else columns


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operands:
    """The linear layer's operands in the dtype of the logits, the weight and the bias as wide as a chunk."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    labels: torch.Tensor
    counted: torch.Tensor
    """Whether each row counts."""
    columns: int
    form: Form

    @classmethod
    def of(
        cls, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor, form: Form
    ) -> _Operands:  # fmt: skip
        counted = labels != form.ignore_index
        return cls(
            hidden=hidden, weight=_widened(weight, form, 0.0), bias=None if bias is None else _widened(bias, form, -torch.inf),
            labels=torch.where(counted, labels, 0), counted=counted, columns=weight.shape[0], form=form,
        )  # fmt: skip

    def chunks(self) -> Iterator[_Chunk]:
        """Yield each chunk, with its logits."""
        for first in range(0, len(self.labels), self.form.rows):
            rows = slice(first, min(first + self.form.rows, len(self.labels)))
            part = self.hidden[rows].to(self.form.dtype)
            if self.bias is None:
                logits = torch.mm(part, self.weight.t())
                logits[:, self.columns :] = -torch.inf
            else:
                logits = torch.addmm(self.bias, part, self.weight.t())
            yield _Chunk(rows=rows, part=part, logits=logits, operands=self)

    def unit(self) -> torch.Tensor:
        """Return the gradient of the loss by the loss of one row that counts."""
        one = torch.ones((), dtype=self.form.wide, device=self.labels.device)
        return one / self.counted.sum() if self.form.reduction == MEAN else one


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    """Some rows of the linear layer."""

    rows: slice
    part: torch.Tensor
    """The layer's input."""
    logits: torch.Tensor
    operands: _Operands

    def losses_sums_and_softmax(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return what each row adds to the loss, its logarithm of the sum of exponentials and its softmax, in the dtype of sums.

        A row that does not count adds 0.

        The largest share of a row is one divided by the row's sum of exponentials. So no second pass adds these up.
        """
        form, columns = self.operands.form, self.operands.columns
        highest, place = self.logits.max(-1, keepdim=True)
        highest, labels = highest.to(form.wide), self.operands.labels[self.rows, None]
        others = torch.sub(self.logits[:, :columns], highest).sum(-1, keepdim=True) if form.smoothing else None
        softmax = torch.softmax(self.logits, -1, dtype=form.wide)
        log_total = -softmax.gather(1, place).log()
        losses = log_total - (self.logits.gather(1, labels) - highest)
        if others is not None:
            losses = (1 - form.smoothing) * losses - form.smoothing * (others / columns - log_total)
        losses = torch.where(self.operands.counted[self.rows], losses.squeeze(1), 0.0)
        return losses, (highest + log_total).squeeze(1), softmax

    def gradient(self, softmax: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the logits in their own dtype; their memory and the softmax's are used."""
        share, operands = self.operands.form.smoothing, self.operands
        if share:
            softmax[:, : operands.columns] -= share / operands.columns
        softmax[torch.arange(len(softmax), device=softmax.device), operands.labels[self.rows]] -= 1 - share
        scales = torch.where(operands.counted[self.rows], scale, 0.0)[:, None]
        return torch.mul(softmax, scales, out=self.logits)

    def gradient_with_sums(self, softmax: torch.Tensor, scale: torch.Tensor, of_sums: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the logits where the rows' logarithms of sums have gradients too; the same memory is used.

        Args:
            softmax: of :meth:`losses_sums_and_softmax`.
            scale: gradient by the loss of one row that counts.
            of_sums: gradients by the logarithms, (rows of the loss,); rows that do not count have them too.
        """
        share, operands = self.operands.form.smoothing, self.operands
        scales = torch.where(operands.counted[self.rows], scale, 0.0)[:, None]
        factors, labels = scales + of_sums[self.rows, None], operands.labels[self.rows, None]
        even = scales * (share / operands.columns)
        of_labels = softmax.gather(1, labels) * factors - even - (1 - share) * scales
        if share:
            softmax.mul_(factors)
            softmax[:, : operands.columns] -= even
            self.logits.copy_(softmax)
        else:
            torch.mul(softmax, factors, out=self.logits)
        return self.logits.scatter_(1, labels, of_labels.to(self.logits.dtype))


def _widened(parameter: torch.Tensor, form: Form, filler: float) -> torch.Tensor:
    columns = form.columns(parameter.shape[0])
    if columns == parameter.shape[0]:
        return parameter.to(form.dtype)
    made = parameter.new_empty((columns, *parameter.shape[1:]), dtype=form.dtype)
    made[: parameter.shape[0]] = parameter
    made[parameter.shape[0] :] = filler
    return made


class _Sums:
    """Gradients of the linear layer's operands, added up over chunks; empty for what asks for none."""

    def __init__(self, operands: _Operands, asked: Sequence[bool]) -> None:
        of_hidden, of_weight, of_bias = asked
        hidden, form = operands.hidden, operands.form
        self._operands = operands
        self.hidden = hidden.new_empty(hidden.shape if of_hidden else (0,), dtype=form.dtype)
        self.weight = hidden.new_zeros(operands.weight.shape if of_weight else (0,), dtype=form.wide)
        self.bias = hidden.new_zeros((len(operands.weight),) if of_bias else (0,), dtype=form.wide)

    def add(self, chunk: _Chunk, gradient: torch.Tensor) -> None:
        if self.hidden.numel():
            torch.mm(gradient, self._operands.weight, out=self.hidden[chunk.rows])
        if self.weight.numel():
            if gradient.dtype == self.weight.dtype:
                self.weight.addmm_(gradient.t(), chunk.part)
            else:
                self.weight += torch.mm(gradient.t(), chunk.part)
        if self.bias.numel():
            self.bias += gradient.sum(0, dtype=self.bias.dtype)

    def results(self, weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        columns = self._operands.columns
        of_bias = self.bias[:columns].to(weight.dtype if bias is None else bias.dtype, copy=True)
        return self.hidden, _in_dtype(self.weight[:columns], weight.dtype), of_bias


def _in_dtype(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The first rows of a sum. Without a copy where the dtype is right: it would be as large as the weight."""
    return rows.to(dtype) if rows.dtype != dtype else rows


Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Of hidden, weight and bias."""


def loss_and_gradients(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor, form: Form,
    asked: Sequence[bool],
) -> tuple[torch.Tensor, Gradients]:  # fmt: skip
    """Compute the loss, and the gradients of the operands for a gradient of 1 of the loss.

    Args:
        hidden: (rows, width), floats.
        weight: (columns, width), floats; read in the dtype of the logits, as autocast does.
        bias: (columns,) or None.
        labels: (rows,), int64: 0 to columns - 1, or ``form.ignore_index``.
        form: of the loss.
        asked: which of hidden, weight and bias ask for a gradient.

    Returns:
        The loss, one number in fp32 (fp64 for fp64); NaN for the mean of no rows, like eager. Gradients in the dtype of the
        logits for hidden and of the parameter for the others, shape (0,) for what was not asked.
    """
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        operands = _Operands.of(hidden, weight, bias, labels, form)
        sums, scale = _Sums(operands, asked), operands.unit()
        total = torch.zeros((), dtype=form.wide, device=hidden.device)
        for chunk in operands.chunks():
            losses, _, softmax = chunk.losses_sums_and_softmax()
            total += losses.sum()
            if any(asked):
                sums.add(chunk, chunk.gradient(softmax, scale))
        loss = total / operands.counted.sum() if form.reduction == MEAN else total
        return loss, sums.results(weight, bias)


def loss_and_log_sums(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor, form: Form
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the loss, and the logarithm of the sum of exponentials of each row, whether it counts or not.

    Args:
        hidden: as for :func:`loss_and_gradients`.
        weight: likewise.
        bias: likewise.
        labels: likewise.
        form: likewise.

    Returns:
        The loss as of :func:`loss_and_gradients`, and (rows,) in its dtype.
    """
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        operands = _Operands.of(hidden, weight, bias, labels, form)
        total = torch.zeros((), dtype=form.wide, device=hidden.device)
        log_sums = torch.empty(len(labels), dtype=form.wide, device=hidden.device)
        for chunk in operands.chunks():
            losses, log_sums[chunk.rows], _ = chunk.losses_sums_and_softmax()
            total += losses.sum()
        return total / operands.counted.sum() if form.reduction == MEAN else total, log_sums


def gradients_again(
    of_loss: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor,
    form: Form, asked: Sequence[bool], of_sums: torch.Tensor | None = None,
) -> Gradients:  # fmt: skip
    """Compute the logits of each chunk again, and the gradients for a gradient of the loss.

    Args:
        of_loss: the loss's gradient, one number.
        hidden: as for :func:`loss_and_gradients`, with its result.
        weight: likewise.
        bias: likewise.
        labels: likewise.
        form: likewise.
        asked: likewise.
        of_sums: gradients of the rows' logarithms of sums, (rows,); None where the loss is all that is read.
    """
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        operands = _Operands.of(hidden, weight, bias, labels, form)
        sums, scale = _Sums(operands, asked), operands.unit() * of_loss
        for chunk in operands.chunks():
            softmax = torch.softmax(chunk.logits, -1, dtype=form.wide)
            if of_sums is None:
                sums.add(chunk, chunk.gradient(softmax, scale))
            else:
                sums.add(chunk, chunk.gradient_with_sums(softmax, scale, of_sums))
        return sums.results(weight, bias)
