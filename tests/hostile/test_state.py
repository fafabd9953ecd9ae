"""A call that moves the model's own state: after apply, after a failed one and after revert all is as it was."""

from __future__ import annotations

import copy
import random
import warnings

import numpy as np
import pytest
import torch

import fusion_advisor as fa
from fusion_advisor.capture.graph.side_effects import Numbers, kept_as_it_is, written_by
from tests.tiny import fuse, toy


class Stateful(torch.nn.Module):
    """Reassigns a tensor and a buffer, counts, appends, writes in place, caches, draws random numbers."""

    def __init__(self):
        super().__init__()
        self.lin = torch.nn.Linear(16, 16)
        self.register_buffer("mean", torch.zeros(16))
        self.calls = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
        self.state = torch.zeros(16)
        self.plain = torch.zeros(16)
        self.count = 0
        self.history = []
        self.table = None
        self.nested = {"seen": [1]}

    def forward(self, x):
        y = torch.sigmoid(torch.tanh(self.lin(x)) * 2 + 1)
        self.state = 0.5 * self.state + y.mean(0)
        self.mean = self.mean * 0.5 + y.mean(0)
        self.plain.add_(1)
        self.calls.add_(1)
        self.count += 1
        self.history.append(self.count)
        self.nested["seen"].append(self.count)
        if self.table is None:
            self.table = torch.ones(16)
        random.random()
        np.random.rand()
        return y * self.table + self.state + torch.rand(16) * 0


def picture(model):
    random_now = (torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state()))
    tensors = [(id(value), value.tolist()) for value in (model.state, model.mean, model.plain, model.calls)]
    return tensors, model.count, list(model.history), model.table, list(model.nested["seen"]), random_now, sorted(vars(model))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Stateful().eval()


QUICK = {"warmup": 1, "runs": 3, "min_share": 0.0}


@pytest.mark.parametrize("what", ["profile", "apply"])
def test_all_is_as_it_was_afterwards(what, model):
    x = torch.randn(8, 16)
    before, history = picture(model), model.history
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = getattr(fa, what)(model, (x,), **QUICK)
        assert picture(model) == before and model.history is history
        if what == "apply":
            made.revert()
            assert picture(model) == before


def test_all_is_as_it_was_after_a_failure(model, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("stopped")

    monkeypatch.setattr("fusion_advisor.fuse.pipeline.make_plan", fail)
    before = picture(model)
    with pytest.raises(RuntimeError, match="stopped"):
        fa.apply(model, (torch.randn(8, 16, generator=torch.Generator().manual_seed(1)),), **QUICK)
    assert picture(model) == before


def test_a_generator_that_is_passed_goes_on_where_it_was(model):
    generator = torch.Generator().manual_seed(3)
    model.own = torch.Generator().manual_seed(4)
    before = generator.get_state(), model.own.get_state()
    with kept_as_it_is(model, (generator,)):
        torch.rand(3, generator=generator), torch.rand(3, generator=model.own)
        assert not torch.equal(generator.get_state(), before[0])
    assert torch.equal(generator.get_state(), before[0]) and torch.equal(model.own.get_state(), before[1])


def test_the_first_call_inside_torch_compile_draws_what_eager_draws():
    from fusion_advisor.fuse.dynamo_backend import fuse_graph
    from fusion_advisor.fuse.plan.options import ApplyOptions

    def optimise(region, _options):
        torch.rand(5), random.random()  # what timing draws
        return region.original.forward

    def backend(graph_module, example_inputs):
        return fuse_graph(graph_module, example_inputs, ApplyOptions(), optimise)

    x = torch.randn(4)
    torch.manual_seed(0)
    want = torch.rand(4) + x
    torch.manual_seed(0)
    with torch.no_grad():
        got = torch.compile(lambda x: torch.rand(4) + x, backend=backend, dynamic=False)(x)
    assert torch.equal(got, want)


def test_numbers_are_put_back():
    numbers = Numbers.now()
    want = torch.rand(2), random.random(), np.random.rand()
    numbers.restore()
    assert torch.equal(torch.rand(2), want[0]) and (random.random(), np.random.rand()) == want[1:]
    numbers.restore()


def test_parameters_can_be_swapped_after_revert():
    model, args = toy()
    fused = fuse(model, args)
    with torch.no_grad(), fused:
        model(*args)
        fused.model(args[0].clone())
    for parameter in model.parameters():
        torch.utils.swap_tensors(parameter, torch.nn.Parameter(torch.zeros_like(parameter)))
    with torch.no_grad():
        assert model(*args).abs().sum() == 0


class Into(torch.nn.Module):
    """Writes to its input."""

    def __init__(self, write):
        super().__init__()
        self.write = write

    def forward(self, x):
        self.write(x)
        return torch.softmax(torch.tanh(x) * 2 + 1, -1)


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.index_put_((torch.tensor([0, 0]),), torch.full((), 1.5)),
        lambda x: x[:1].add_(1),
        lambda x: x[0].mul_(2),
    ],
    ids=["index_put_", "slice", "select"],
)
def test_an_expanded_input_that_is_written_to_is_put_back(write):
    model, x = Into(write).eval(), torch.full((1, 31), 0.25).expand(2, 31)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fused = fa.apply(model, (x,), keep="verified", graph=False, compile=False, **QUICK)
        assert x.tolist() == [[0.25] * 31] * 2
        got, other = model(x), torch.full((1, 31), 0.25).expand(2, 31)
        fused.revert()
        torch.testing.assert_close(got, model(other))
    assert torch.equal(x, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_an_input_that_holds_nan_was_not_written_to(dtype):
    x = torch.tensor([1.0, float("nan"), 2.0]).to(dtype)
    model = Into(lambda _: None)
    assert written_by(lambda: x + 1, model, (x,), {}).tensors == {}
    assert list(written_by(lambda: x[1:].fill_(3), model, (x,), {}).tensors.values()) == [x]


class LazyCache(torch.nn.Module):
    """Makes the tensors of its cache in its first call, and fills them from then on."""

    def __init__(self):
        super().__init__()
        self.key, self.value, self.norm = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32), torch.nn.LayerNorm(32)
        self.keys = self.values = None

    def forward(self, x, at):
        if self.keys is None:
            self.keys, self.values = torch.zeros(x.shape[0], 16, 32), torch.zeros(x.shape[0], 16, 32)
        h = self.norm(x)
        self.keys.index_copy_(1, at, self.key(h))
        self.values.index_copy_(1, at, self.value(h))
        scores = (h @ self.keys.transpose(1, 2) * 0.25).masked_fill(torch.arange(16) > at, float("-inf"))
        return torch.nn.functional.gelu(torch.softmax(scores, -1) @ self.values + x)


@pytest.mark.parametrize("is_filled_before", [False, True])
def test_a_cache_that_the_first_call_makes_is_filled_after_apply(is_filled_before):
    torch.manual_seed(0)
    model, steps = LazyCache().eval(), [(torch.randn(2, 1, 32), torch.tensor([place])) for place in range(4)]
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for one in (model, twin) if is_filled_before else ():
            one(*steps[0])
        fused = fa.apply(model, steps[0], keep="verified", graph=False, compile=False, warmup=1, runs=2, steps=1)
        if is_filled_before:
            assert torch.equal(model.keys, twin.keys)  # no call of apply's is left in it
        else:
            assert model.keys is None and model.values is None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the call that makes the cache is another graph: its own ops run
            results = [(model(*step), twin(*step)) for step in steps]
    assert fused.launches >= 2 * (len(steps) - 1)
    for got, want in (*results, (model.keys, twin.keys), (model.values, twin.values)):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
