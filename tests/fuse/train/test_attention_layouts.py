"""Attention's backward pass is given its result's gradient in the layout that eager gives it.

torch finds a plan of cuDNN's attention without that layout. Where a fused step gave another one than the model's own, one of them
would read gradients by the other's plan.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import fusion_advisor as fa

BATCH, LENGTH, HEADS, WIDTH = 2, 16, 4, 8
_BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"


class Attending(nn.Module):
    """Attention whose result goes on in one of several ways."""

    def __init__(self, follows):
        super().__init__()
        self.follows = follows
        self.packed = nn.Linear(HEADS * WIDTH, 4 * HEADS * WIDTH)
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(HEADS * WIDTH, HEADS * WIDTH)

    def forward(self, x):
        query, key, value, gate = self.packed(x).view(BATCH, LENGTH, 4, HEADS, WIDTH).permute(2, 0, 3, 1, 4)
        result = self.follows(scaled_dot_product_attention(query, key, value, is_causal=True), gate, self.norm)
        rows = result.transpose(1, 2).reshape(BATCH, LENGTH, HEADS * WIDTH)
        return nn.functional.gelu(self.out(rows)).square().mean()


FOLLOWS = {
    "projection": lambda result, gate, norm: result,
    "gate": lambda result, gate, norm: result * torch.sigmoid(gate) * 2,
    "norm": lambda result, gate, norm: torch.tanh(norm(result)) * 2,
    "heads laid out anew": lambda result, gate, norm: torch.exp(result.contiguous() * gate),
}


@pytest.fixture
def layouts():
    """Strides of the gradient, the query, the key and the result of each backward pass of attention."""
    seen, library = [], torch.library.Library("aten", "IMPL")
    op = getattr(torch.ops.aten, _BACKWARD).default

    def noted(gradient, query, key, value, out, *args, **kwargs):
        seen.append([one.stride() for one in (gradient, query, key, out)])
        with torch._C._AutoDispatchBelowAutograd():
            return op(gradient, query, key, value, out, *args, **kwargs)

    library.impl(_BACKWARD, noted, "AutogradCPU")
    yield seen
    library._destroy()
    torch.compiler.reset()


@pytest.mark.parametrize("follows", FOLLOWS)
def test_a_fused_step_gives_attention_the_layouts_of_the_models_own(follows, layouts):
    torch.manual_seed(0)
    model, x = Attending(FOLLOWS[follows]).train(), torch.randn(BATCH, LENGTH, HEADS * WIDTH)

    def step():
        layouts.clear()
        model(x).backward()
        return list(layouts)

    own = step()
    fused = fa.apply(model, (x,), phase="train", keep="verified", min_share=0.0, compile=False, effort="quick")
    assert any(one.status == "kept" for one in fused.report.fusions)
    assert step() == own and len(own) == 1 and not fused.fallbacks
    fused.revert()
