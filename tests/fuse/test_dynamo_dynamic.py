"""``torch.compile(model, backend="fusion_advisor")`` with sizes left open: one trace, right numbers, and no build per shape."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.utils

from fusion_advisor.codegen.cpp.backend import find_compiler
from fusion_advisor.fuse.dynamo_backend import fuse_graph
from fusion_advisor.fuse.dynamo_dynamic import _for_these_numbers
from fusion_advisor.fuse.plan.options import ApplyOptions
from tests import tiny

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="kernels of a CPU need a C++ compiler: apt-get install g++")


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def verified(graph, inputs):
    """The backend, keeping every kernel whose numbers are right: what pays is measured elsewhere."""
    return fuse_graph(graph, inputs, ApplyOptions(keep="verified", compile=False))


def rewritten(compiled, *args):
    """Whether a call runs fewer ops of torch's own than the model does: GELU is one of them nowhere."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        compiled(*args)
    return not any("gelu" in event.key for event in profile.key_averages())


def traces():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("name", ["gpt2", "qwen2"])
def test_one_trace_serves_every_length(name):
    model, kwargs = getattr(tiny, name)()
    compiled = torch.compile(model, backend=verified, dynamic=True)
    with torch.no_grad():
        for count, (batch, seq) in enumerate([(3, 11), (2, 7), (4, 33), (16, 64)]):
            call = {**kwargs, "input_ids": torch.randint(1, 200, (batch, seq))}
            found, expected = compiled(**call).logits, model(**call).logits
            assert float((found - expected).norm() / expected.norm()) < 2e-6
            if count == 0:
                traced = traces()
    assert traces() == traced


class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)

    def forward(self, x):
        return self.down(torch.nn.functional.gelu(self.up(x) * 1.5, approximate="tanh")) + x


def test_a_size_that_changed_is_traced_once_more_and_never_again():
    model = Mlp().eval()
    compiled = torch.compile(model, backend=verified)  # dynamic=None: open from the second size on
    with torch.no_grad():
        assert not rewritten(model, torch.randn(5, 64))
        counts = []
        for rows in (5, 9, 17, 64, 33):
            x = torch.randn(rows, 64)
            torch.testing.assert_close(compiled(x), model(x))
            assert rewritten(compiled, x)
            counts.append(traces())
    assert counts[1] == counts[0] + 1
    assert counts[1:] == [counts[1]] * 4


@pytest.mark.parametrize("mark", [torch._dynamo.mark_dynamic, torch._dynamo.decorators.mark_unbacked])
def test_marked_sizes_are_served(mark):
    model = Mlp().eval()
    compiled = torch.compile(model, backend=verified)
    with torch.no_grad():
        x = torch.randn(5, 64)
        mark(x, 0)
        torch.testing.assert_close(compiled(x), model(x))
        traced = traces()
        for rows in (9, 17, 3):
            x = torch.randn(rows, 64)
            torch.testing.assert_close(compiled(x), model(x))
            assert rewritten(compiled, x)
    assert traces() == traced


def test_a_graph_that_writes_to_its_input_runs_its_own_ops():
    def step(cache, x):
        cache.add_(x)
        return torch.nn.functional.gelu(cache * 2)

    compiled = torch.compile(step, backend=verified, dynamic=True)
    with torch.no_grad(), pytest.warns(UserWarning, match="writes to its input"):
        for rows in (5, 7):
            cache, x = torch.zeros(rows, 8), torch.ones(rows, 8)
            torch.testing.assert_close(compiled(cache, x), torch.nn.functional.gelu(torch.full((rows, 8), 2.0)))
            assert cache.sum() == rows * 8


def test_a_float_of_the_caller_that_changes_runs_the_original_ops():
    ours, original = (lambda x, scale: "ours"), (lambda x, scale: "original")
    call = _for_these_numbers(ours, original, {1: 2.0})
    x = torch.zeros(3)
    assert call(x, torch.tensor(2.0)) == "ours"
    assert call(x, torch.tensor(2.5)) == "original"
    assert _for_these_numbers(ours, original, {}) is ours
