"""Decode steps: a cache comes in as an argument of the call, is written as the model's own forward writes it, and goes out."""

from __future__ import annotations

import copy
import importlib
import os
import subprocess
import sys

import pytest
import torch
from transformers import DynamicCache, StaticCache

from fusion_advisor.errors import CannotExport
from fusion_advisor.export.copied.call_objects import Unknown, at, is_like, made_of, spec_of, tensors_in
from fusion_advisor.workload.static_cache import cache_name
from tests.export import models


def decode(make, kind):
    """A model and the call of a decode step after a prompt."""
    model, inputs = make()
    ids = inputs["input_ids"]
    cache = StaticCache(config=model.config, max_cache_len=32) if kind == "static" else DynamicCache(config=model.config)
    return model, models.decode_step(model, ids, cache)


def own_tests(folder):
    """Run a package's tests in a process of their own."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", "--rootdir", str(folder), "tests"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


def bench(folder, name):
    """Run a package's benchmark in a process of its own, for more steps than a cache has room for."""
    command = [sys.executable, "-m", f"{name}.bench", "--runs", "40"]
    environment = {variable: value for variable, value in os.environ.items() if variable != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def held(cache):
    return [value for layer in cache.layers for value in vars(layer).values() if isinstance(value, torch.Tensor)]


@torch.no_grad()
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_a_decode_step_gives_the_fused_models_bits_and_cache(kind, tmp_path, monkeypatch):
    model, inputs, fused = models.fused(lambda: decode(models.llama, kind))
    cache = cache_name(model)
    name = f"decode_{kind}"
    with pytest.raises(CannotExport, match=f"`{cache}` is a cache, and a compiled model takes tensors alone"):
        fused.export(tmp_path / name, format="pt2")
    assert fused.export(tmp_path / name) == ()
    first, second, third = (copy.deepcopy(inputs) for _ in range(3))
    right = fused(**first).logits
    assert not fused.fallbacks
    fused.revert()
    assert [line.split()[0] for line in bench(tmp_path / name, name)] == ["eager", "fused"]
    monkeypatch.syspath_prepend(tmp_path / name)
    package = importlib.import_module(name)
    package.apply(model)
    found = model(**second)
    assert package.fallbacks(model) == {}
    assert torch.equal(found.logits, right)
    assert found[cache] is second[cache]
    assert all(map(torch.equal, held(first[cache]), held(second[cache])))
    refusals = [third | {cache: DynamicCache(config=model.config) if kind == "static" else None}]
    if kind == "static":
        shared = copy.deepcopy(third)
        shared[cache].layers[1].keys = shared[cache].layers[0].keys
        refusals.append(shared)
        own_tests(tmp_path / name)
    for number, call in enumerate(refusals, start=1):
        model(**call)
        assert len(package.fallbacks(model)) == number
    assert any("share memory" in reason for reason in package.fallbacks(model)) is (kind == "static")
    package.revert(model)
    check_graphs(package, model, inputs)


class Snapshots:
    """Records on a CPU: what recording writes into a cache is put back, and a replay makes the call again."""

    def __init__(self, cache):
        self.cache, self.replays = cache, 0

    def is_recording(self):
        return False

    def record(self, run):
        before = [value.clone() for value in held(self.cache)]
        output = run()
        for value, earlier in zip(held(self.cache), before, strict=True):
            value.copy_(earlier)

        def replay():
            self.replays += 1
            output.logits.copy_(run().logits)

        return output, replay


def check_graphs(package, model, inputs):
    """Fail where a replayed graph gives other numbers than launches, or leaves another cache."""
    if package.forward.SETS:
        with pytest.raises(ValueError, match="grows its cache"):
            package.apply(model, cuda_graph=True)
        return
    with pytest.raises(ValueError, match="need a GPU"):
        package.apply(model, cuda_graph=True)
    launched, replayed, cache = copy.deepcopy(inputs), copy.deepcopy(inputs), cache_name(model)
    package.apply(model)
    logits = [model(**launched | {"input_ids": launched["input_ids"] + number}).logits for number in range(4)]
    package.revert(model)
    recorder = Snapshots(replayed[cache])
    package.apply(model, cuda_graph=True, recorder=recorder)
    found = [model(**replayed | {"input_ids": replayed["input_ids"] + number}).logits for number in range(4)]
    assert package.fallbacks(model) == {}
    assert recorder.replays == 3
    assert all(map(torch.equal, found, logits))
    assert all(map(torch.equal, held(launched[cache]), held(replayed[cache])))
    check_a_change(package, model, launched, replayed, recorder)
    package.revert(model)


def check_a_change(package, model, launched, replayed, recorder):
    """Fail where a change of the model that is seen behind the launch leaves another cache than the model's own forward."""
    assert package.forward.SAVED is not None and all("cumulative" in one for one in package.forward.SAVED)
    hook = model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output + 1)
    replays, cache = recorder.replays, cache_name(model)
    found = model(**replayed)
    assert recorder.replays == replays + 1 and len(package.fallbacks(model)) == 1
    assert torch.equal(found.logits, type(model).forward(model, **launched).logits)
    assert all(map(torch.equal, held(launched[cache]), held(replayed[cache])))
    hook.remove()


class Counted:
    """A cache of a user's own, which counts its calls."""

    def __init__(self):
        self.total, self.calls = torch.zeros(4, 8), 0


class Counting(torch.nn.Module):
    """Sets a number of its argument."""

    def forward(self, x, state):
        """Compute something worth a kernel."""
        state.calls += 1
        state.total.add_(x)
        return torch.nn.functional.gelu(x + 1).softmax(-1) * state.total


def test_a_number_that_a_call_sets_is_not_exported_as_a_constant(tmp_path):
    fused = fused_of(Counting())
    with pytest.raises(CannotExport, match=r"sets `state\.calls`"):
        fused.export(tmp_path / "out")
    fused.revert()


def fused_of(model):
    return models.fused(lambda: (model.eval(), {"x": torch.randn(4, 8), "state": Counted()}))[2]


def test_an_object_is_made_again_as_it_was():
    model, inputs = decode(models.llama, "static")
    cache = inputs[cache_name(model)]
    spec = spec_of("cache", cache)
    tensors = {path: at(path, {"cache": cache}) for path in tensors_in(spec)}
    assert "cache.layers.2.cumulative_length" in tensors
    twin = made_of(spec, tensors.__getitem__, torch.device("cpu"))
    assert type(twin) is type(cache)
    assert spec_of("cache", twin) == spec
    assert is_like(spec, twin)
    twin.layers[1].max_batch_size = 7
    assert not is_like(spec, twin)
    with pytest.raises(Unknown, match=r"`cache\.extra` is a function"):
        cache.extra = lambda: None
        spec_of("cache", cache)
