"""The original ops of one site: run alone they give what the model computed, in fp64 they are the oracle."""

from __future__ import annotations

import pytest
import torch

from fusion_advisor.fuse.decide.session import Bench
from fusion_advisor.verify.subgraph_oracle import Observer, to_float64
from tests.tiny import planned, profiled


@pytest.mark.parametrize("name", ["toy", "gpt2", "qwen2"])
def test_a_chain_alone_gives_what_the_model_computed(name):
    _, _, live = profiled(name)
    bench = Bench(live, on_cuda=False)
    plan = planned(name)
    bench.observe(plan.fusions)
    for fusion in plan.fusions:
        chain, roots = bench.first_site(fusion)
        region = live.regions[0]
        outputs = set(fusion.sites[0].outputs)
        seen = Observer(region, bench.index_of[0], bench.ops, keep=outputs, check=set())
        with torch.no_grad():
            seen.run(*region.example_args)
        for index, got in zip(fusion.sites[0].outputs, chain.run(roots), strict=True):
            assert torch.equal(got, seen.values[index])
        for got, exact in zip(chain.run(roots), chain.run(roots, as_float64=True), strict=True):
            assert exact.dtype == torch.float64
            torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=1e-5)


def test_the_oracle_ignores_casts_between_floats():
    from tests.verify.test_check_chain import chain_of

    x = torch.tensor([1.0 + 2**-20])
    chain = chain_of(lambda x: x.to(torch.bfloat16).to(torch.float32) - 1.0, x)
    assert float(chain.run([x])[0]) == 0.0
    assert float(chain.run([x], as_float64=True)[0]) == 2**-20


def test_widening_keeps_strides_and_leaves_integers():
    wide = to_float64(torch.randn(3, 4).t())
    assert (wide.dtype, wide.stride()) == (torch.float64, (1, 4))
    ids = torch.arange(3)
    assert to_float64(ids) is ids


def test_a_layout_other_than_traced_is_a_surprise():
    _, _, live = profiled("toy")
    bench = Bench(live, on_cuda=False)
    region = live.regions[0]
    place = next(op.index for op in bench.ops if op.target == "args.0")
    observer = Observer(region, bench.index_of[0], bench.ops, keep={place}, check={place})
    args = [value.t().contiguous().t() if tuple(value.shape) == (6, 32) else value for value in region.example_args]
    with torch.no_grad():
        observer.run(*args)
    assert list(observer.surprises) == [place]
    assert "traced (32, 1)" in observer.surprises[place]
    assert place in observer.values


MADE_OF_INTEGERS = {
    "clamp_max": lambda n, b: torch.clamp_max(n, 0.5) * 0.1,
    "mul": lambda n, b: n * 0.1,
    "div": lambda n, b: n / 3,
    "exp": lambda n, b: (n * 1e-3).exp(),
    "exp_of_integers": lambda n, b: torch.exp(n.clamp(0, 3)),
    "of_a_mask": lambda n, b: b * 0.1 + n,
    "where": lambda n, b: torch.where(b, n, 0.5),
    "where_of_numbers": lambda n, b: torch.where(b, 0.1, 0.25) * n,
    "full": lambda n, b: torch.full_like(n, 0.5, dtype=torch.float32) + n,
}


@pytest.mark.parametrize("name", MADE_OF_INTEGERS)
def test_floats_made_of_integers_are_wide(name):
    from tests.verify.test_check_chain import chain_of

    function = MADE_OF_INTEGERS[name]
    numbers, mask = torch.tensor([1, 7, 2**24 + 1, -3, 10]), torch.tensor([True, False, True, False, True])
    chain = chain_of(function, numbers, mask)
    (eager,) = chain.run([numbers, mask])
    (exact,) = chain.run([numbers, mask], as_float64=True)
    assert (eager.dtype, exact.dtype) == (torch.float32, torch.float64)
    torch.testing.assert_close(exact, eager.double(), rtol=2e-7, atol=0.0)
    if name in ("mul", "div", "exp_of_integers"):
        assert not torch.equal(exact, eager.double())  # the oracle has digits that eager lacks
    assert torch.get_default_dtype() == torch.float32


def test_integers_meet_fp64_parameters():
    """Batch norm wants its input and its statistics in one dtype."""
    from tests.verify.test_check_chain import chain_of

    def function(n, mean, var):
        return torch.nn.functional.batch_norm(torch.clamp_max(n, 0.5), mean, var, None, None, training=False)

    inputs = [torch.arange(-10, 10).view(2, 5, 2), torch.randn(5), torch.rand(5) + 0.5]
    (exact,) = chain_of(function, *inputs).run(inputs, as_float64=True)
    torch.testing.assert_close(exact, function(*inputs).double(), rtol=1e-5, atol=1e-6)
