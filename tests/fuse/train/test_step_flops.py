"""FLOPs of a training step: attention of grouped heads counts its query heads, and what torch cannot count ends nothing."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from fusion_advisor.fuse.train.step_flops import attention_backward_flops, attention_flops, step_flops

BATCH, HEADS, LENGTH, WIDTH, OUT = 2, 6, 32, 16, 8
SCORES = 2 * BATCH * HEADS * LENGTH * LENGTH * WIDTH
VALUES = 2 * BATCH * HEADS * LENGTH * LENGTH * OUT
KERNELS = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")


def _operands(kv_heads, device="cpu"):
    return tuple(
        torch.randn(BATCH, heads, LENGTH, width, device=device, requires_grad=True)
        for heads, width in ((HEADS, WIDTH), (kv_heads, WIDTH), (kv_heads, OUT))
    )


@pytest.mark.parametrize("kv_heads", [HEADS, 2, 1])
def test_attention_counts_two_products_and_five_behind_it(kv_heads):
    query, key, value = (tuple(one.shape) for one in _operands(kv_heads))
    assert attention_flops(query, key, value) == SCORES + VALUES
    assert attention_backward_flops((BATCH, HEADS, LENGTH, OUT), query, key, value) == 3 * SCORES + 2 * VALUES


@pytest.mark.parametrize("kernel", KERNELS[:3])
def test_kernels_for_gpus_count_the_query_heads_of_grouped_attention(kernel):
    query, key, value = _operands(2, device="meta")
    more = {"efficient_attention": (None, True), "cudnn_attention": (None, True)}.get(kernel, ())
    operator = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}").default
    assert step_flops(lambda: operator(query, key, value, *more)) == SCORES + VALUES


@pytest.mark.parametrize("is_grouped", [False, True])
def test_a_step_with_attention_on_a_cpu_is_counted_whole(is_grouped):
    query = torch.randn(BATCH, HEADS, LENGTH, WIDTH, requires_grad=True)
    key = torch.randn(BATCH, 2 if is_grouped else HEADS, LENGTH, WIDTH, requires_grad=True)
    counted = step_flops(lambda: sdpa(query, key, key, enable_gqa=is_grouped).sum().backward())
    assert counted == 7 * SCORES


@pytest.mark.parametrize("error", [AssertionError, RuntimeError, NotImplementedError, IndexError, ValueError])
def test_a_step_that_cannot_be_counted_counts_nothing_and_goes_on(error):
    def step():
        torch.randn(4, 4) @ torch.randn(4, 4)
        raise error("this op has other shapes")

    assert step_flops(step) == 0
