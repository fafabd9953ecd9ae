"""A fused model holds the same memory after two hundred steps as after twenty, and no weight twice."""

from __future__ import annotations

import gc
import shutil
import weakref

import pytest
import torch

import fusion_advisor
from fusion_advisor.capture.graph.tracer import capture_regions
from fusion_advisor.fuse.cuda_graph.replay import Graphs
from fusion_advisor.fuse.decide.rebind import changed_bench
from fusion_advisor.fuse.decide.session import Bench
from fusion_advisor.fuse.live.fused_model import FusedModel
from fusion_advisor.fuse.passes.merge_gemms import merge_all
from fusion_advisor.fuse.passes.registry import PASSES
from fusion_advisor.fuse.rewrite.record import CopyRoom
from fusion_advisor.workload.weight_packing import lay_out_siblings
from tests.fuse.cuda_graph.fake_graph import FakeRecorder
from tests.tiny import cache_in, decode_step, qwen2

WEIGHT_BYTES = 64 * 64 * 4
"""Of the smallest linear that is merged or not; no activation of a decode step is as large."""


def decoding(*, is_laid_out=True, recorder=None):
    """A model of two layers with merged GEMMs and all passes, and the inputs of its step."""
    model, _ = qwen2()
    if is_laid_out:
        lay_out_siblings(model)
    kwargs = decode_step(model)
    live = capture_regions(model, (), kwargs)
    bench = Bench(live, on_cuda=False)
    merged = merge_all(bench.live.regions, CopyRoom(may_copy=not is_laid_out, free_bytes=1 << 40))[0]
    assert sum(one.changed for one in merged) == 4
    bench, _ = changed_bench(bench, merged)
    modules = bench.build((), tuple(PASSES)).modules
    live.written.restore()
    graphs = None if recorder is None else Graphs(recorder)
    return FusedModel(model, bench.live.regions, modules, (), kwargs, graphs=graphs, live=live), kwargs


def steps(fused, kwargs, count):
    """Run steps at one position, each on a tensor of its own; return how many results are still alive."""
    results = weakref.WeakSet()
    for _ in range(count):
        for layer in cache_in(kwargs).layers:
            layer.cumulative_length.fill_(16)
        results.add(fused.dispatch(**{**kwargs, "input_ids": kwargs["input_ids"].clone()}).logits)
    return len(results)


def live_storages():
    """Address and bytes of each storage that some tensor in the process holds."""
    gc.collect()
    kinds = (torch.Tensor, torch.nn.Parameter)
    found = [value for value in gc.get_objects() if type(value) in kinds and value.is_cpu]
    tensors = [value for value in found if value.layout is torch.strided]
    return {(one.data_ptr(), one.nbytes()) for one in (tensor.untyped_storage() for tensor in tensors)}


@pytest.mark.slow
@pytest.mark.parametrize("is_graphed", [True, False])
def test_two_hundred_steps_hold_what_twenty_did(is_graphed):
    recorder = FakeRecorder() if is_graphed else None
    fused, kwargs = decoding(recorder=recorder)
    if recorder is not None:
        recorder.protected = tuple(t for layer in cache_in(kwargs).layers for t in vars(layer).values() if is_tensor(t))
    with torch.no_grad():
        steps(fused, kwargs, 20)
        before, objects = live_storages(), len(gc.get_objects())
        assert steps(fused, kwargs, 180) == 0
    assert len(live_storages()) <= len(before)
    assert len(gc.get_objects()) < objects + 90  # not one for every other step
    assert fused.fallbacks == {}
    if recorder is not None:
        assert recorder.recorded == 1 and recorder.replayed >= 198 and len(fused.graphs.recordings) == 1


@pytest.mark.slow
def test_another_cache_in_every_call_is_freed_and_remembered_nowhere():
    fused, _ = decoding()
    with torch.no_grad():
        fused.dispatch(**decode_step(fused.model))
        before, seen = live_storages(), len(fused._objects)
        for _ in range(10):
            fused.dispatch(**decode_step(fused.model))
        gc.collect()
    assert len(live_storages()) <= len(before) and len(fused._objects) <= seen


def weights_held_beside(fused, kwargs, before):
    """Bytes as large as a weight that were not there before, and are neither the model's own nor its cache's."""
    caches = [value for layer in cache_in(kwargs).layers for value in vars(layer).values() if is_tensor(value)]
    own = {value.untyped_storage().data_ptr() for value in (*fused.model.parameters(), *fused.model.buffers(), *caches)}
    return sum(size for at, size in live_storages() - before if at not in own and size >= WEIGHT_BYTES)


@pytest.mark.slow
@pytest.mark.parametrize("is_laid_out", [True, False])
def test_no_weight_is_held_twice_but_a_merged_copy_that_was_asked_for(is_laid_out):
    before = live_storages()
    fused, kwargs = decoding(is_laid_out=is_laid_out)
    with torch.no_grad():
        fused.dispatch(**kwargs)
        fused.dispatch(**kwargs)
    merged = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    parts = [(name, part) for name, part in fused.model.named_parameters() if name.split(".")[-2] in merged]
    copied = sum(part.nbytes for name, part in parts if name.endswith("weight"))
    assert weights_held_beside(fused, kwargs, before) == (0 if is_laid_out else copied)


def is_tensor(value):
    return isinstance(value, torch.Tensor)


class Tiny(torch.nn.Module):
    """A linear layer between a norm and an activation."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = torch.nn.LayerNorm(32), torch.nn.Linear(32, 32)

    def forward(self, x):
        return torch.nn.functional.gelu(self.linear(self.norm(x))) + x


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler")
@pytest.mark.parametrize("is_reverted", [False, True])
@pytest.mark.parametrize("options", [{}, {"shapes": "batch=1..16"}, {"dynamic": "on_first_use"}])
def test_a_model_is_freed_with_the_last_who_uses_it(options, is_reverted):
    """Dynamo keeps every backend until it is reset, and code that it compiled keeps what it runs."""
    model = Tiny().eval()
    with torch.no_grad():
        fused = fusion_advisor.apply(model, torch.randn(8, 32), effort="quick", keep="verified", **options)
        assert [model(torch.randn(count, 32)).shape[0] for count in (8, 3, 30)] == [8, 3, 30]
    if is_reverted:
        fused.revert()
    left = [weakref.ref(model), weakref.ref(model.linear.weight), weakref.ref(fused)]
    del model, fused
    gc.collect()
    assert [one() for one in left] == [None] * 3
