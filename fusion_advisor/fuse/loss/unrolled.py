"""A loss in chunks as the ops of its chunks, in the pass that holds it: chains find them, and products are seen one by one.

As one op a chunk moves 28 bytes for each 16-bit logit, launch by launch. Torch's softmax to fp32 is a cast and a softmax, the
largest logit of a row is looked for before, and the gradient is scaled after. Here a chunk has the ops that AOTAutograd writes
for a loss of all logits, and they are one chain. It reads the logits, and writes their gradient and a number for each row: 10
bytes with all three products. Chunks of one size share its kernel. What pads the logits is minus infinity to it, so the gradient
that it writes is padded with zeros.

The gradient of the weight is a product for each chunk in the dtype of the logits, and one sum of them all in fp32 at the end,
which is one chain too. Added up chunk by chunk it would be read and written in fp32 each time. GPT-2's are 77 MB a chunk.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fusion_advisor.fuse.loss.chunked_loss import MEAN, Form
from fusion_advisor.fuse.loss.loss_op import is_computed_again
from fusion_advisor.fuse.loss.peak_memory import is_op
from fusion_advisor.runtime.torch_internals import fake_mode

_ATEN = torch.ops.aten
_OP = "fusion_advisor::linear_cross_entropy"
_NO_REDUCTION = 0
_LOSS, _HIDDEN, _WEIGHT = 0, 1, 2
"""Numbers of the op's results."""


def unroll_losses(graph_module: GraphModule) -> GraphModule:
    """Put the ops of their chunks in place of losses in chunks; returns the graph.

    Left alone are losses with a bias or with label smoothing, and those whose backward pass computes the logits again.

    Args:
        graph_module: one of AOTAutograd's passes, with the fake results of its nodes; it is changed.
    """
    found = [node for node in graph_module.graph.nodes if is_op(node, _OP)]
    for node in filter(is_unrolled, found):
        _Unrolled.of(graph_module, node).put()
    graph_module.graph.lint()
    graph_module.recompile()
    return graph_module


def holds_unrolled(passes: Mapping[str, GraphModule]) -> bool:
    """Whether a step has a loss that becomes its chunks' ops.

    Args:
        passes: both by name, as AOTAutograd made them.
    """
    return any(is_op(node, _OP) and is_unrolled(node) for one in passes.values() for node in one.graph.nodes)


def is_unrolled(node: Node) -> bool:
    """Whether a loss in chunks can be its chunks' ops.

    Args:
        node: of the op.
    """
    _, _, bias, _, dtype, _, _, smoothing, _, asked = node.args
    assert isinstance(dtype, torch.dtype) and isinstance(asked, Sequence)
    read = {user.args[1] for user in node.users if user.target is operator.getitem}
    made = {_LOSS, *(number for number, is_asked in ((_HIDDEN, asked[0]), (_WEIGHT, asked[1])) if is_asked)}
    is_plain = bias is None and not smoothing and not is_computed_again(dtype)
    return is_plain and len(made) > 1 and read <= made and all(user.target is operator.getitem for user in node.users)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unrolled:
    """A loss, and what all of its chunks read."""

    module: GraphModule
    node: Node
    form: Form
    columns: int
    asked: tuple[bool, bool]

    @classmethod
    def of(cls, module: GraphModule, node: Node) -> _Unrolled:
        _, weight, _, _, dtype, reduction, ignored, _, rows, asked = node.args
        assert isinstance(weight, Node) and isinstance(asked, Sequence)
        assert isinstance(dtype, torch.dtype)
        assert isinstance(reduction, int) and isinstance(ignored, int) and isinstance(rows, int)
        form = Form(dtype=dtype, reduction=reduction, ignore_index=ignored, rows=rows)
        return cls(
            module=module, node=node, form=form, columns=weight.meta["val"].shape[0], asked=(bool(asked[0]), bool(asked[1]))
        )  # fmt: skip

    def put(self) -> None:
        """Replace the op's results."""
        with self.module.graph.inserting_before(self.node):
            results = self._results()
        for user in list(self.node.users):
            user.replace_all_uses_with(results[user.args[1]])
            self.module.graph.erase_node(user)
        self.module.graph.erase_node(self.node)

    def _results(self) -> dict[Any, Node]:
        hidden, weight, _, labels, *_ = self.node.args
        assert isinstance(hidden, Node) and isinstance(weight, Node) and isinstance(labels, Node)
        wide, count = self.form.wide, len(hidden.meta["val"])
        hidden, weight_dtype = self._cast(hidden, self.form.dtype), weight.meta["val"].dtype
        padded = self._padded(self._cast(weight, self.form.dtype))
        turned = self._make(_ATEN.t.default, padded)
        device = labels.meta["val"].device
        one = self._make(_ATEN.full.default, [], 1.0, dtype=wide, device=device)
        counted = self._make(_ATEN.sum.default, self._cast(self._make(_ATEN.ne.Scalar, labels, self.form.ignore_index), wide))
        losses: list[Node] = []
        of_hidden: list[Node] = []
        of_weight: list[Node] = []
        of_rows = self._make(_ATEN.split_copy.Tensor, labels, self.form.rows)
        for number, first in enumerate(range(0, count, self.form.rows)):
            part = self._make(_ATEN.slice.Tensor, hidden, 0, first, min(first + self.form.rows, count))
            loss, gradient = self._chunk(part, self._make(operator.getitem, of_rows, number), turned, one, counted)
            losses.append(loss)
            if self.asked[0]:
                of_hidden.append(self._make(_ATEN.mm.default, gradient, padded))
            if self.asked[1]:
                of_weight.append(self._make(_ATEN.mm.default, self._make(_ATEN.t.default, gradient), part))
        total = self._make(_ATEN.sum.default, self._joined(losses))
        if self.form.reduction == MEAN:
            total = self._make(_ATEN.div.Tensor, total, counted)
        found = {_LOSS: total}
        if of_hidden:
            found[_HIDDEN] = self._joined(of_hidden)
        if of_weight:
            found[_WEIGHT] = self._sum(of_weight, weight_dtype)
        return found

    def _chunk(self, part: Node, labels: Node, turned: Node, one: Node, counted: Node) -> tuple[Node, Node]:
        """Return the loss of each row of a chunk, and the gradient of its logits as wide as the products want it."""
        wide, ignored = self.form.wide, self.form.ignore_index
        logits = self._make(_ATEN.mm.default, part, turned)
        logs = self._make(_ATEN._log_softmax.default, self._without_padding(self._cast(logits, wide)), 1, False)
        losses = self._make(_ATEN.nll_loss.default, logs, labels, None, _NO_REDUCTION, ignored)
        of_logs = self._make(
            _ATEN.nll_loss_backward.default, one, logs, labels, None, self.form.reduction, ignored, counted
        )  # fmt: skip
        of_logits = self._make(_ATEN._log_softmax_backward_data.default, of_logs, logs, 1, wide)
        return losses, self._cast(of_logits, self.form.dtype)

    def _padded(self, weight: Node) -> Node:
        """Return the weight with rows of zeros up to the columns of a chunk."""
        more = self.form.columns(self.columns) - self.columns
        return self._make(_ATEN.constant_pad_nd.default, weight, [0, 0, 0, more], 0.0) if more else weight

    def _without_padding(self, logits: Node) -> Node:
        """Return logits of minus infinity in the columns that pad them: their shares are 0, and so are their gradients."""
        count = self.form.columns(self.columns)
        if count == self.columns:
            return logits
        places = self._make(_ATEN.arange.default, count, device=logits.meta["val"].device)
        is_padding = self._make(_ATEN.ge.Scalar, places, self.columns)
        return self._make(_ATEN.masked_fill.Scalar, logits, is_padding, -math.inf)

    def _sum(self, products: list[Node], dtype: torch.dtype) -> Node:
        """Return the sum of the chunks' gradients of the weight, rounded once, without the rows that pad it."""
        parts = [self._cast(one, self.form.wide) for one in products]
        total = self._cast(
            next(reversed(list(itertools.accumulate(parts, lambda one, other: self._make(_ATEN.add.Tensor, one, other))))), dtype
        )  # fmt: skip
        if self.form.columns(self.columns) == self.columns:
            return total
        return self._make(_ATEN.slice.Tensor, total, 0, 0, self.columns)

    def _joined(self, parts: list[Node]) -> Node:
        return parts[0] if len(parts) == 1 else self._make(_ATEN.cat.default, parts)

    def _cast(self, value: Node, dtype: torch.dtype) -> Node:
        if value.meta["val"].dtype == dtype:
            return value
        return self._make(_ATEN._to_copy.default, value, dtype=dtype)

    def _make(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        made = self.module.graph.call_function(target, args, kwargs)
        made.meta = {key: self.node.meta[key] for key in ("nn_module_stack", "stack_trace") if key in self.node.meta}
        with fake_mode.fake_mode_of([source.meta["val"] for source in self.node.all_input_nodes]):  # of ops without operands too
            made.meta["val"] = fake_mode.fake_result(self.module, made)
        return made
