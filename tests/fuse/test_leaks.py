"""A fused model holds the same memory after two hundred steps as after twenty, and no weight twice."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from fusion_advisor.capture.graph import capture_regions
from fusion_advisor.fuse.bench import PASSES, Bench
from fusion_advisor.fuse.graphed import Graphs
from fusion_advisor.fuse.merging import merge_all
from fusion_advisor.fuse.model import FusedModel
from fusion_advisor.fuse.relocate import merged_bench
from fusion_advisor.workload.adjacent import lay_out_siblings
from tests.fuse.fake_graph import FakeRecorder
from tests.tiny import decode_step, qwen2

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
    merged = merge_all(bench, may_copy=not is_laid_out, free_bytes=1 << 40)
    assert sum(one.merged for one in merged) == 4
    bench, _ = merged_bench(bench, merged)
    modules = bench.build((), tuple(PASSES)).modules
    live.written.restore()
    graphs = None if recorder is None else Graphs(recorder)
    return FusedModel(model, bench.live.regions, modules, (), kwargs, graphs=graphs, live=live), kwargs


def steps(fused, kwargs, count):
    """Run steps at one position, each on a tensor of its own; return how many results are still alive."""
    results = weakref.WeakSet()
    for _ in range(count):
        for layer in kwargs["past_key_values"].layers:
            layer.cumulative_length.fill_(16)
        results.add(fused.dispatch(**{**kwargs, "input_ids": kwargs["input_ids"].clone()}).logits)
    return len(results)


def live_bytes():
    """Bytes of each storage that some tensor in the process holds, largest first."""
    gc.collect()
    found = {}
    for value in gc.get_objects():
        if type(value) in (torch.Tensor, torch.nn.Parameter) and value.device.type == "cpu":
            storage = value.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sorted(found.values(), reverse=True)


@pytest.mark.parametrize("is_graphed", [True, False])
def test_two_hundred_steps_hold_what_twenty_did(is_graphed):
    recorder = FakeRecorder() if is_graphed else None
    fused, kwargs = decoding(recorder=recorder)
    if recorder is not None:
        recorder.protected = tuple(t for layer in kwargs["past_key_values"].layers for t in vars(layer).values() if is_tensor(t))
    with torch.no_grad():
        steps(fused, kwargs, 20)
        before, objects = live_bytes(), len(gc.get_objects())
        assert steps(fused, kwargs, 180) == 0
    assert live_bytes() == before
    assert len(gc.get_objects()) < objects + 90  # not one for every other step
    assert fused.fallbacks == {}
    if recorder is not None:
        assert recorder.recorded == 1 and recorder.replayed >= 198 and len(fused.graphs.recordings) == 1


def test_another_cache_in_every_call_is_freed_and_remembered_nowhere():
    fused, _ = decoding()
    with torch.no_grad():
        fused.dispatch(**decode_step(fused.model))
        before, seen = live_bytes(), len(fused._objects)
        for _ in range(10):
            fused.dispatch(**decode_step(fused.model))
        gc.collect()
    assert len(live_bytes()) <= len(before) and len(fused._objects) <= seen


def test_merged_weights_that_lie_together_are_held_once():
    model, _ = qwen2()
    lay_out_siblings(model)
    alone = sum(size for size in live_bytes() if size >= WEIGHT_BYTES)
    del model
    fused, kwargs = decoding()
    with torch.no_grad():
        fused.dispatch(**kwargs)
        fused.dispatch(**kwargs)
    assert sum(size for size in live_bytes() if size >= WEIGHT_BYTES) - cache_bytes(kwargs) == alone


def test_a_merged_copy_is_gone_with_the_fused_model():
    fused, kwargs = decoding(is_laid_out=False)
    with torch.no_grad():
        fused.dispatch(**kwargs)
    held = sum(live_bytes())
    merged = sum(
        parameter.nbytes
        for name, parameter in fused.model.named_parameters()
        if name.split(".")[-2] in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    )
    model = fused.model
    del fused
    torch._dynamo.reset()
    assert sum(live_bytes()) <= held - merged and model is not None


def cache_bytes(kwargs):
    held = [value for layer in kwargs["past_key_values"].layers for value in vars(layer).values() if is_tensor(value)]
    return sum(value.nbytes for value in held if value.nbytes >= WEIGHT_BYTES)


def is_tensor(value):
    return isinstance(value, torch.Tensor)
