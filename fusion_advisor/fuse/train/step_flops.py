"""Counts the floating-point operations of a training step: torch's own counter, with formulas of ours for attention.

Torch 2.11 refuses attention whose KV heads are fewer than its query heads, and no torch counts attention on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

_aten = torch.ops.aten
_CANNOT_COUNT = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Raised by a formula of torch's that knows an op's shapes otherwise, and by what does not run under a dispatch mode."""


def attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **_more: Any) -> int:
    """Return the operations of attention's two products: every query head has them, however few KV heads there are.

    What a causal mask hides counts too, as in torch's own formula.

    Args:
        query: shape (batch, heads, queries, width).
        key: shape (batch, KV heads, keys, width).
        value: shape (batch, KV heads, keys, width of a result).
    """
    batch, heads, queries, width = query
    return 2 * batch * heads * queries * key[-2] * (width + value[-1])


def attention_backward_flops(
    _of_result: Sequence[int], query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **_more: Any
) -> int:  # fmt: skip
    """Return the operations of the five products of attention's backward pass; the first makes the scores again.

    Args:
        query: as for :func:`attention_flops`.
        key: likewise.
        value: likewise.
    """
    batch, heads, queries, width = query
    return 2 * batch * heads * queries * key[-2] * (3 * width + 2 * value[-1])


_FORMULAS: dict[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention: attention_flops,
    _aten._scaled_dot_product_efficient_attention: attention_flops,
    _aten._scaled_dot_product_cudnn_attention: attention_flops,
    _aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
    _aten._scaled_dot_product_flash_attention_backward: attention_backward_flops,
    _aten._scaled_dot_product_efficient_attention_backward: attention_backward_flops,
    _aten._scaled_dot_product_cudnn_attention_backward: attention_backward_flops,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward_flops,
}


def step_flops(step: Callable[[], object]) -> int:
    """Return the floating-point operations of a step's matrix products, convolutions and attention; 0 where torch cannot count.

    Args:
        step: both passes of the model's own ops.
    """
    counter = FlopCounterMode(display=False, custom_mapping=_FORMULAS)
    try:
        with counter:
            step()
    except _CANNOT_COUNT:
        return 0
    return counter.get_total_flops()
