"""Results have eager's strides, whatever the inputs' are and wherever a fake kernel's strides differ from the real one's."""

from __future__ import annotations

import functools
import random
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

import fusion_advisor as fa
from fusion_advisor.fuse.decide import session
from fusion_advisor.fuse.decide.choose import layout_refusals
from fusion_advisor.fuse.decide.step_runner import Candidate
from fusion_advisor.fuse.live.fused_model import FusedModel
from fusion_advisor.fuse.plan.plan import make_plan
from fusion_advisor.fuse.rewrite.graph_rewriter import LayoutChanged
from fusion_advisor.records import Status
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


@pytest.mark.slow
def test_log_sigmoid_of_a_permuted_tensor():
    check(["logsigmoid", "affine", "cumsum", "affine", "tanh"], torch.randn(3, 4, 5).permute(2, 0, 1))


@pytest.mark.parametrize("number", range(8))
def test_random_ops_on_random_layouts(number):
    draw = random.Random(number)
    check(["affine", *draw.choices(list(OPS), k=4), "tanh"], inputs(number))


def test_log_sigmoid_of_a_transposed_tensor_through_the_backend():
    x = torch.randn(7, 8, 17, 3)

    def model(x):
        return functional.logsigmoid(x.transpose(1, 2)), functional.gelu(x * x * 0.5)

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = torch.compile(model, backend="fusion_advisor", dynamic=False)(x)
        want = model(x)
    torch._dynamo.reset()
    assert layouts(got) == layouts(want)


class Refusing:
    """Makes kernels that refuse their tensors in the step, as they do where a graph pass changed a layout."""

    def __init__(self, refused):
        self.refused, self.made, self.number = refused, session.fused_call, 0

    def __call__(self, name, *args, **kwargs):
        self.number += 1
        call = self.made(name, *args, **kwargs)
        if self.number not in self.refused:
            return call

        def refuse(*tensors):
            raise LayoutChanged(f"{name}: planted")

        return functools.update_wrapper(refuse, call)


class Two(torch.nn.Module):
    def forward(self, x):
        return torch.softmax(x * 2 + 1, -1) @ x.transpose(-1, -2), (x - 1).tanh().sum(-1)


@pytest.mark.parametrize("refused", [(1,), (2,), (1, 2)])
def test_a_kernel_that_refuses_its_tensors_in_the_step_is_left_out_with_a_reason(refused, monkeypatch):
    monkeypatch.setattr(session, "fused_call", Refusing(refused))
    model, x = Two().eval(), torch.randn(5, 16, 16)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want = model(x)
        fused = fa.apply(model, (x,), keep="verified", graph=False, compile=False, warmup=1, runs=2, min_share=0.0)
        got = model(x)
        fused.revert()
    reasons = [one.reason for one in fused.report.fusions if one.status is Status.NOT_REPLACED]
    assert len(fused.report.fusions) == 2 and len(reasons) == len(refused)
    assert all("laid out differently" in reason and "planted" in reason for reason in reasons)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("apart", [("R1", "F1"), ("F1", "F2"), ("R1", "F2")])
def test_what_does_not_go_together_is_left_out_and_the_rest_stays(apart):
    class Bench:
        live = SimpleNamespace(written=SimpleNamespace(rewind=lambda: None))

        def build(self, fusions, passes):
            return {*passes, *fusions}

        def run(self, variant):
            if variant.issuperset(apart):
                raise LayoutChanged("planted")

    candidates = [Candidate(id="R1", graph_pass="R1"), *(Candidate(id=name, fusion=name) for name in ("F1", "F2"))]
    assert list(layout_refusals(Bench(), candidates)) == [apart[1]]
    assert layout_refusals(Bench(), candidates[:1]) == {}
