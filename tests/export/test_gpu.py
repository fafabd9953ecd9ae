"""Packages with Triton and with CUDA C++ kernels, on a GPU, where fusion_advisor cannot be imported."""

from __future__ import annotations

import copy
import importlib

import pytest
import torch
from transformers import StaticCache

from fusion_advisor.workload.static_cache import cache_name
from tests.export import models
from tests.export.fresh import check_shown, in_a_fresh_environment


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_a_decode_step_is_replayed_as_a_cuda_graph(backend, tmp_path, monkeypatch):
    def on_gpu():
        model, inputs = models.llama()
        model, ids = model.cuda().half(), inputs["input_ids"].cuda()
        return model, models.decode_step(model, ids, StaticCache(config=model.config, max_cache_len=32))

    model, inputs, fused = models.fused(on_gpu, backend=backend, graph=False, skip=("cuda-graph",))
    name = f"decode_{backend}"
    assert fused.export(tmp_path / name, with_cache=True) == ()
    fused.revert()
    monkeypatch.syspath_prepend(tmp_path / name)
    package, cache = importlib.import_module(name), cache_name(model)
    launched, replayed = copy.deepcopy(inputs), copy.deepcopy(inputs)
    package.apply(model)
    logits = [model(**launched | {"input_ids": launched["input_ids"] + number}).logits for number in range(4)]
    package.revert(model)
    package.apply(model, cuda_graph=True)
    found = [model(**replayed | {"input_ids": replayed["input_ids"] + number}).logits for number in range(4)]
    assert package.fallbacks(model) == {}
    assert all(map(torch.equal, found, logits))
    for own, other in zip(launched[cache].layers, replayed[cache].layers, strict=True):
        assert torch.equal(own.keys, other.keys)
        assert torch.equal(own.cumulative_length, other.cumulative_length)
    package.revert(model)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize("make", [models.gpt2, models.llama, models.bert])
def test_a_package_on_a_gpu_gives_the_fused_models_bits(make, backend, tmp_path):
    def on_gpu():
        model, inputs = make()
        moved = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
        return model.cuda().half() if backend == "cuda" else model.cuda(), moved

    # what a package cannot hold is skipped, so that both sides compute the same
    model, inputs, fused = models.fused(on_gpu, backend=backend, graph=False, skip=("cuda-graph",))
    name = f"{make.__name__}_{backend}"
    left_out = fused.export(tmp_path / name)
    assert left_out == ()
    shown = in_a_fresh_environment(tmp_path, {name: (model, inputs, fused)})
    check_shown(shown[name])
    suffix = ".py" if backend == "triton" else ".cu"
    kernels = [path for path in (tmp_path / name / name / "kernels").iterdir() if path.name.startswith("fa_")]
    assert {path.suffix for path in kernels} == {suffix}
