"""What no guard of dynamo's says in words: the length of what was walked through, torch's state between a start and a call."""

from __future__ import annotations

import warnings
from contextlib import contextmanager, nullcontext

import pytest
import torch

from fusion_advisor.fuse.live.restore_plan import apply_plan
from fusion_advisor.fuse.live.saved_plan import load_plan
from fusion_advisor.workload.load import describe_live
from tests.fuse import test_pipeline
from tests.fuse.start.saved import put_in, run_of, traced, untraced_calls
from tests.fuse.start.test_untraced_start import options_in, own

pytestmark = test_pipeline.pytestmark

FACTORS = {"one": 1.5, "two": 0.5}


class Walks(torch.nn.Module):
    """Goes through containers to their ends, and makes a tensor of torch's default dtype."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU())
        self.named = torch.nn.ModuleDict({"a": torch.nn.Linear(64, 64)})
        self.gains = {"a": 1.5, "b": 0.5}

    def forward(self, x):
        u = self.layers(x)
        for layer in self.named.values():
            u = layer(u).tanh() + u
        for name, gain in self.gains.items():
            u = u * gain + (x if name == "a" else 0.25)
        for factor in FACTORS.values():
            u = u * factor + x
        return torch.nn.functional.gelu(u) * torch.linspace(0.5, 1.5, 64) + x


def walks(seed=1):
    torch.manual_seed(seed)
    return describe_live(Walks().eval(), (torch.randn(2, 48, 64),))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("walks") / "run"
    assert run_of(walks(seed=0), options_in(found)) == ""
    return found


def again(model):
    """The same items in another order."""
    model.gains["a"] = model.gains.pop("a")


GROWN = {
    "a layer more": lambda model: model.layers.append(torch.nn.Tanh()),
    "a named layer more": lambda model: model.named.update({"b": torch.nn.Tanh()}),
    "a value more": lambda model: model.gains.update(c=3.0),
    "another order": again,
    "a global's value more": lambda _: FACTORS.update(three=3.0),
}


@pytest.mark.parametrize("name", GROWN)
@pytest.mark.parametrize("has_run", [True, False])
def test_a_container_that_grew_is_walked_to_its_end(name, has_run, folder):
    loaded, before = walks(), dict(FACTORS)
    try:
        with torch.no_grad(), put_in(loaded, folder) as fused, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if has_run:
                torch.testing.assert_close(loaded.model(*loaded.args), own(loaded), rtol=1e-4, atol=1e-4)
            assert fused.traced_because == ""
            GROWN[name](loaded.model)
            for _ in range(2):
                torch.testing.assert_close(loaded.model(*loaded.args), own(loaded), rtol=1e-4, atol=1e-4)
            assert fused.traced_because and fused.fallbacks
    finally:
        FACTORS.clear()
        FACTORS.update(before)


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("calls", [0, 2])
@pytest.mark.parametrize("is_traced", [True, False])
def test_another_default_dtype_makes_other_tensors(calls, is_traced, folder):
    plan = load_plan(folder)
    loaded = walks()
    with torch.no_grad(), apply_plan(loaded, traced(plan) if is_traced else plan) as fused:
        for _ in range(calls):
            loaded.model(*loaded.args)
        with default_dtype(torch.float64), pytest.warns(match="default dtype"):
            assert loaded.model(*loaded.args).dtype == own(loaded).dtype == torch.float64
        assert loaded.model(*loaded.args).dtype == torch.float32
        assert list(fused.fallbacks.values()) == [1] and fused.launches > 0


def test_a_state_that_is_set_between_the_start_and_a_call_is_seen(folder):
    loaded, before = walks(), torch.are_deterministic_algorithms_enabled()
    with torch.no_grad(), put_in(loaded, folder) as fused:
        torch.use_deterministic_algorithms(mode=True)
        try:
            torch.testing.assert_close(loaded.model(*loaded.args), own(loaded), rtol=1e-4, atol=1e-4)
        finally:
            torch.use_deterministic_algorithms(before)
        assert fused.traced_because == "torch's global state is another one"


class Chosen(torch.nn.Module):
    """Counts and compares with built-in functions."""

    def __init__(self):
        super().__init__()
        self.linear, self.gains = torch.nn.Linear(64, 64), [1.5, 0.25]

    def forward(self, x):
        u = torch.nn.functional.gelu(self.linear(x))
        for place in range(len(self.gains)):
            u = torch.tanh(u * max(self.gains[place], 0.5)) + x
        return u


def chosen(seed=1):
    torch.manual_seed(seed)
    return describe_live(Chosen().eval(), (torch.randn(2, 48, 64),))


@pytest.mark.parametrize("has_run", [True, False])
def test_a_global_that_hides_a_built_in_later_is_seen(has_run, tmp_path):
    assert run_of(chosen(seed=0), options_in(tmp_path / "run")) == ""
    hiding = {"range": lambda _: [0], "len": lambda _: 1, "max": lambda *_: 3.0}
    for name, function in hiding.items():
        torch.compiler.reset()
        loaded = chosen()
        with torch.no_grad(), put_in(loaded, tmp_path / "run") as fused, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if has_run:
                torch.testing.assert_close(loaded.model(*loaded.args), own(loaded), rtol=1e-4, atol=1e-4)
            globals()[name] = function
            try:
                torch.testing.assert_close(loaded.model(*loaded.args), own(loaded), rtol=1e-4, atol=1e-4)
            finally:
                del globals()[name]
            assert "hides a built-in" in fused.traced_because
            torch.testing.assert_close(loaded.model(*loaded.args), own(loaded), rtol=1e-4, atol=1e-4)


class Buffers(torch.nn.Module):
    """Reads buffers of which no two may be one."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(64, 64)
        self.register_buffer("gain", torch.rand(64))
        self.register_buffer("shift", torch.rand(64))

    def forward(self, x):
        return torch.nn.functional.gelu(self.linear(x) * self.gain + self.shift) + x


def buffers(seed=1):
    torch.manual_seed(seed)
    return describe_live(Buffers().eval(), (torch.randn(2, 48, 64),))


@pytest.fixture(scope="module")
def with_buffers(tmp_path_factory):
    found = tmp_path_factory.mktemp("buffers") / "run"
    assert run_of(buffers(seed=0), options_in(found)) == ""
    return found


def laid_out(model):
    """Give a buffer's memory other strides, and nothing else."""
    model.gain.data = torch.rand(128)[::2]


def joined(model):
    model.shift = model.gain


OF_BUFFERS = {
    "another tensor": (lambda model: setattr(model, "gain", torch.rand(64)), ""),
    "its size": (lambda model: model.gain.resize_(1), "gain"),
    "its strides": (laid_out, "gain"),
    "that it asks for gradients": (lambda model: model.gain.requires_grad_(True), "gain"),
    "that it is another buffer": (joined, "one and the same"),
}


@pytest.mark.parametrize("name", OF_BUFFERS)
def test_what_the_trace_had_read_of_buffers_is_noticed_at_the_next_call(name, with_buffers):
    loaded, (change, word) = buffers(), OF_BUFFERS[name]
    with torch.no_grad(), put_in(loaded, with_buffers) as fused, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            loaded.model(*loaded.args)
        assert fused.traced_because == "" and [one.left for one in untraced_calls(fused)] == [[]]
        change(loaded.model)
        torch.testing.assert_close(loaded.model(*loaded.args), own(loaded), rtol=1e-4, atol=1e-4)
        assert word in fused.traced_because and bool(word) is bool(fused.traced_because)


def test_inference_mode_and_none_take_turns(with_buffers):
    loaded = buffers()
    with torch.no_grad(), put_in(loaded, with_buffers) as fused:
        for number in range(24):
            with torch.inference_mode() if number % 2 == 0 else nullcontext():
                torch.testing.assert_close(loaded.model(*loaded.args), own(loaded), rtol=1e-4, atol=1e-4)
        assert fused.traced_because == "" and fused.fallbacks == {}
