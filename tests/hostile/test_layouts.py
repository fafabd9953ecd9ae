"""Results have eager's strides, whatever the inputs' are and wherever a fake kernel's strides differ from the real one's."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
from torch.nn import functional

from fusion_advisor.fuse.live.fused_model import FusedModel
from fusion_advisor.fuse.plan.plan import make_plan
from tests.tiny import bench_of, patterns, profile_live

OPS = {
    "logsigmoid": functional.logsigmoid,
    "tanh": torch.tanh,
    "affine": lambda x: x * 2 + 1,
    "softmax": lambda x: torch.softmax(x, -1),
    "permute": lambda x: x.permute(*reversed(range(x.dim()))),
    "gelu": functional.gelu,
    "clone": torch.clone,
    "cumsum": lambda x: x.cumsum(0),
}


class Model(torch.nn.Module):
    def __init__(self, names):
        super().__init__()
        self.names = names

    def forward(self, x):
        for name in self.names:
            x = OPS[name](x)
        return x, x + 1


def fused(model, x):
    capture, live = profile_live(model, (x,))
    plan = make_plan(capture, patterns(), min_share=0.0)
    bench, built = bench_of(live, plan)
    return FusedModel(model, live.regions, bench.build(built, ()).modules, (x,), {})


def inputs(number):
    draw = random.Random(number)
    sizes = [draw.choice((1, 3, 4)) for _ in range(3)]
    x = torch.randn(sizes, generator=torch.Generator().manual_seed(number))
    kind = number % 3
    if kind == 0:
        return x.permute(*draw.sample(range(3), 3))
    if kind == 1:
        return x[:, :1].expand(sizes[0], 4, sizes[2])
    return torch.randn(4, 3, 5, 2, generator=torch.Generator().manual_seed(number)).to(memory_format=torch.channels_last)


def layouts(values):
    """Strides, without those of dims of one element, which say nothing about where an element lies."""
    return [[stride for size, stride in zip(v.shape, v.stride(), strict=True) if size != 1] for v in values]


def check(names, x):
    model = Model(names).eval()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        want = model(x)
        with fused(model, x) as one:
            got = model(x)
        assert not one.fallbacks, one.fallbacks
    assert layouts(got) == layouts(want), (names, x.shape, x.stride())
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_log_sigmoid_of_a_permuted_tensor():
    check(["logsigmoid", "affine", "cumsum", "affine", "tanh"], torch.randn(3, 4, 5).permute(2, 0, 1))


@pytest.mark.parametrize("number", range(8))
def test_random_ops_on_random_layouts(number):
    draw = random.Random(number)
    check(["affine", *draw.choices(list(OPS), k=4), "tanh"], inputs(number))
