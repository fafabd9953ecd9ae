"""Ranges of calls on a KV cache start without a trace: what a call sets in the cache is stored with the graph."""

from __future__ import annotations

import copy
import gc
import gzip
import importlib
import json
import shutil
import warnings
from types import SimpleNamespace

import pytest
import torch

import fusion_advisor as fa
from fusion_advisor.capture.graph.side_effects import Written
from fusion_advisor.capture.graph.tracer import Route
from fusion_advisor.fuse.cuda_graph.replay import Graphs
from fusion_advisor.fuse.live.restore_plan import apply_plan
from fusion_advisor.fuse.live.saved_plan import load_plan
from fusion_advisor.fuse.plan.size_ranges import read_shapes
from fusion_advisor.fuse.restore_shapes import restore_shapes
from fusion_advisor.fuse.shapes.ranged_calls import ranged_calls
from fusion_advisor.fuse.start.call_tensors import given_by
from fusion_advisor.fuse.start.described import CannotDescribe
from fusion_advisor.fuse.start.object_changes import ObjectState, untold_change
from fusion_advisor.workload.load import describe_live
from tests.fuse import test_pipeline
from tests.fuse.cuda_graph.fake_graph import FakeRecorder
from tests.fuse.start.saved import edit, frames, traced, untraced_calls
from tests.fuse.start.test_ranges import put_in
from tests.tiny import cache_in, gpt2, qwen2

pytestmark = test_pipeline.pytestmark

RANGES = "batch=2..4,seq=2..16,cached=2..24"


def saved(made, folder):
    """A plan of ranges, with every rewrite that passes."""
    model, kwargs = made
    fa.apply(model, kwargs, shapes=RANGES, keep="verified", compile=False, run_dir=folder).revert()
    return folder


@pytest.fixture(scope="module", params=[qwen2, gpt2])
def folder(request, tmp_path_factory):
    return saved(request.param(), tmp_path_factory.mktemp("caches") / "run"), request.param


def calls_of(made):
    model, kwargs = made
    return {one.name: one for one in ranged_calls(describe_live(model, (), kwargs), read_shapes(RANGES))}


def step_on(kwargs, cached, step):
    """The next token of a growing cache."""
    ids = torch.full_like(kwargs["input_ids"], 3 + step)
    given = {**kwargs, "input_ids": ids}
    if given.get("position_ids") is not None:
        given["position_ids"] = torch.full_like(given["position_ids"], cached)
    if given.get("attention_mask") is not None:
        given["attention_mask"] = ids.new_ones((len(ids), cached + 1))
    return given


def everything_of(call, calls):
    """What calls return and leave in their caches: prefills, a cache that grows, a static one."""
    found = []
    for batch, seq in ((2, 2), (3, 7), (4, 16)):
        torch.manual_seed(seq)
        _, kwargs = calls["prefill"].at({"batch": batch, "seq": seq})
        found += [call(**kwargs).logits, *layers_of(kwargs)]
    for name in ("decode", "padded decode"):
        torch.manual_seed(5)
        _, kwargs = calls[name].at({"batch": 3, "cached": 4}) if name in calls else (None, None)
        for step in range(5 if kwargs else 0):
            found.append(call(**step_on(kwargs, 4 + step, step)).logits)
        found += layers_of(kwargs or {})
    torch.manual_seed(6)
    _, kwargs = calls["static decode"].at({"batch": 2, "room": 12})
    return [*found, call(**kwargs).logits, *layers_of(kwargs)]


def layers_of(kwargs):
    layers = cache_in(kwargs).layers if kwargs and any(hasattr(value, "layers") for value in kwargs.values()) else []
    return [tensor for layer in layers for tensor in (layer.keys, layer.values) if tensor is not None]


def test_caches_are_filled_and_grow_without_a_trace_and_hold_the_same_bits(folder):
    run, maker = folder
    plan, before = load_plan(run), frames()
    assert [row.get("why") for row in plan.start["pieces"]] == [None] * len(plan.start["pieces"])
    assert any(row["sets"] for row in plan.start["pieces"])
    made = maker()
    calls = calls_of(made)
    with torch.no_grad(), put_in(describe_live(made[0], (), made[1]), plan) as fused:
        found = everything_of(fused, calls)
        assert fused.traced_because == "" and fused.fallbacks == {} and frames() == before
    expected = everything_of(made[0], calls)
    for ours, own in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, own, rtol=1e-4, atol=1e-5)
    with torch.no_grad(), put_in(describe_live(made[0], (), made[1]), traced(plan)) as fused:
        again = everything_of(fused, calls)
        assert frames() != before
    assert all(torch.equal(left, right) for left, right in zip(found, again, strict=True))


def growing(maker, run):
    """A fused model that has made three steps on a cache, the call of a step, and its cache."""
    made = maker()
    calls = calls_of(made)
    fused = put_in(describe_live(made[0], (), made[1]), run)
    torch.manual_seed(5)
    _, kwargs = calls["decode" if "decode" in calls else "padded decode"].at({"batch": 3, "cached": 4})
    for step in range(3):
        fused(**step_on(kwargs, 4 + step, step))
    return fused, kwargs, cache_in(kwargs)


def compare_a_step(fused, kwargs, step):
    """Compare the next step with one of the model's own ops, and what both leave in their caches."""
    own = {name: copy.deepcopy(value) if value is cache_in(kwargs) else value for name, value in kwargs.items()}
    found = fused(**step_on(kwargs, 4 + step, step)).logits
    torch.testing.assert_close(found, fused.model._call_impl(**step_on(own, 4 + step, step)).logits, rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(layers_of(kwargs), layers_of(own), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def registry():
    """Which outputs transformers can record of each class of models: of the model's own class a trace reads it."""
    return importlib.import_module("transformers.utils.output_capturing")._CAN_RECORD_REGISTRY


def recorded(model):
    return next(value for name, value in dict.items(registry()) if f"{type(model.model).__name__}'" in name)


def strided(buffer):
    """Give a tensor other memory with the same numbers and other strides."""
    buffer.data = torch.stack([buffer, buffer], 1)[:, 0]


IN_A_STEP = {
    "a cache's layer": lambda _, cache: cache.layers.__setitem__(1, copy.copy(cache.layers[1])),
    "a layer's keys": lambda _, cache: setattr(cache.layers[0], "keys", cache.layers[0].keys + 1),
    "all layers": lambda _, cache: setattr(cache, "layers", [copy.copy(layer) for layer in cache.layers]),
    "another model's item": lambda _, __: registry().update(other={}),
}
READ_IN_A_STEP = {
    "keys that are the values": (lambda _, cache: setattr(cache.layers[0], "keys", cache.layers[0].values), "share memory"),
    "a buffer's strides": (lambda model, _: strided(model.model.rotary_emb.inv_freq), "inv_freq"),
    "an item more": (lambda model, _: recorded(model).update(cross_attentions=torch.nn.Linear), "RECORD_REGISTRY"),
    "another item": (lambda model, _: recorded(model).update(hidden_states=torch.nn.Linear), "RECORD_REGISTRY"),
    "an equal dict": (lambda model, _: dict.update(registry(), {str(type(model.model)): {**recorded(model)}}), ""),
}


@pytest.mark.parametrize("name", IN_A_STEP)
@pytest.mark.parametrize("folder", [qwen2], indirect=True)
def test_a_step_goes_on_with_what_is_in_the_cache_now(name, folder):
    run, maker = folder
    before = frames()
    with torch.no_grad():
        fused, kwargs, cache = growing(maker, run)
        with fused:
            IN_A_STEP[name](fused.model, cache)
            try:
                for step in (3, 4):
                    compare_a_step(fused, kwargs, step)
            finally:
                dict.pop(registry(), "other", None)
            assert fused.traced_because == "" and fused.fallbacks == {} and frames() == before
            assert not any(one.left for one in untraced_calls(fused))


@pytest.mark.parametrize("name", READ_IN_A_STEP)
@pytest.mark.parametrize("folder", [qwen2], indirect=True)
def test_what_a_step_had_read_is_noticed_at_the_next_one(name, folder):
    run, maker = folder
    change, word = READ_IN_A_STEP[name]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fused, kwargs, cache = growing(maker, run)
        items, before = recorded(fused.model), dict(recorded(fused.model))
        try:
            with fused:
                change(fused.model, cache)
                compare_a_step(fused, kwargs, 3)
                assert word in fused.traced_because and bool(word) is bool(fused.traced_because)
        finally:
            items.clear()
            items.update(before)


def live_routes():
    return [one for one in gc.get_objects() if type(one) is Route]


def test_results_at_the_largest_sizes_are_let_go(folder):
    run, maker = folder
    made, others = maker(), live_routes()
    with torch.no_grad(), put_in(describe_live(made[0], (), made[1]), run) as fused:
        routes = [one for one in live_routes() if not any(one is other for other in others)]
        assert len(routes) >= len(fused.report.shapes.pieces)
        assert all(route.results is None and route.seen is None for route in routes)


@pytest.mark.parametrize("folder", [qwen2], indirect=True)  # of a GPT-2 of two layers torch 2.11's masks are half of all launches
def test_segments_of_a_growing_cache_are_replayed_without_a_trace(folder):
    run, maker = folder
    made, recorder, plan = maker(), FakeRecorder(), load_plan(run)
    loaded, calls = describe_live(made[0], (), made[1]), calls_of(made)
    fused = apply_plan(loaded, plan)
    fused.graphs = Graphs(recorder)
    restore_shapes(fused, loaded, plan)
    name = "decode" if "decode" in calls else "padded decode"
    results = []
    with torch.no_grad(), fused:
        before = frames()
        for run_again in (False, True):
            fused.graphs.is_on = not run_again
            torch.manual_seed(1)
            _, kwargs = calls[name].at({"batch": 3, "cached": 4})
            logits = [fused(**step_on(kwargs, 4 + step, step)).logits for step in range(6)]
            results.append([*logits, *layers_of(kwargs)])
        assert recorder.recorded > 1 and recorder.replayed > 4 * recorder.recorded - recorder.recorded - 1
        assert fused.traced_because == "" and fused.fallbacks == {} and frames() == before
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_tokens_are_generated_on_a_pool_without_a_trace(folder):
    run, maker = folder
    made, plan = maker(), load_plan(run)
    prompt, given = made[1]["input_ids"][:, :5], {"max_new_tokens": 6, "do_sample": False}
    expected = made[0].generate(prompt, **given)
    with torch.no_grad(), put_in(describe_live(made[0], (), made[1]), plan) as fused:
        before = frames()
        assert torch.equal(fused.generate(prompt, **given), expected)
        assert frames() == before and fused.traced_because == ""


@pytest.mark.parametrize("is_traced", [False, True])
@pytest.mark.parametrize("folder", [qwen2], indirect=True)
def test_a_model_whose_weights_were_laid_out_since_takes_the_plan(folder, is_traced):
    run, maker = folder
    made, plan = maker(), load_plan(run)
    assert fa.lay_out_weights(made[0]) > 0
    calls = calls_of(made)
    with torch.no_grad(), put_in(describe_live(made[0], (), made[1]), traced(plan) if is_traced else plan) as fused:
        found = everything_of(fused, calls)
        assert bool(fused.traced_because) is is_traced and fused.fallbacks == {}
    for ours, own in zip(found, everything_of(made[0], calls), strict=True):
        torch.testing.assert_close(ours, own, rtol=1e-4, atol=1e-5)


def swapped(row):
    """Keys get what values should, and the other way round."""
    keys, values = (next(one for one in row["sets"] if one[1] == name) for name in ("keys", "values"))
    keys[2], values[2] = values[2], keys[2]


DAMAGES = {
    "keys and values in turn": swapped,
    "an attribute less": lambda row: row["sets"].pop(),
    "one that no call sets": lambda row: row["sets"].append(["past_key_values", "__class__", None]),
    "a path that leads nowhere": lambda row: row["sets"][0].__setitem__(0, "past_key_values.layers.9"),
    "a constant for keys": lambda row: row["sets"][0].__setitem__(2, 3),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_a_file_says_of_sets_is_compared_with_the_models_own_ops(name, folder, tmp_path):
    run, maker = folder
    shutil.copytree(run, tmp_path / "run")

    def change(start):
        for row in start["pieces"]:
            if row.get("sets"):
                DAMAGES[name](row)

    edit(tmp_path / "run", change)
    made = maker()
    calls, before = calls_of(made), frames()
    with torch.no_grad(), put_in(describe_live(made[0], (), made[1]), tmp_path / "run") as fused:
        assert fused.traced_because and frames() != before
        for ours, own in zip(everything_of(fused, calls), everything_of(made[0]._call_impl, calls), strict=True):
            torch.testing.assert_close(ours, own, rtol=1e-4, atol=1e-5)


# -- objects of another kind ---------------------------------------------------------------------------------------------------


class State:
    """What a recurrent model remembers."""

    def __init__(self, batch, seen=0):
        self.hidden, self.seen, self._is_new, self.counts = torch.zeros(batch, 8), seen, True, [0]


class Recurrent(torch.nn.Module):
    """Sets a tensor of its state; ``asks`` says which number of it decides what is computed."""

    def __init__(self, asks=""):
        super().__init__()
        torch.manual_seed(2)
        self.step, self.asks = torch.nn.Linear(16, 8), asks

    def forward(self, x, state):
        """Run it."""
        number = getattr(state, self.asks) if self.asks else 0
        if number[0] if isinstance(number, list) else number:
            x = x * 2
        state.hidden = torch.tanh(self.step(torch.cat([x, state.hidden], 1)))
        return torch.nn.functional.gelu(state.hidden) + 1


@pytest.mark.parametrize(
    ("asks", "numbers"), [("", []), ("seen", [["state", "seen", 0]]), ("_is_new", [["state", "_is_new", True]]), ("counts", None)]
)
def test_numbers_of_objects_that_the_trace_had_asked_for_are_compared_at_each_call(asks, numbers, tmp_path):
    dims = {"x": ("batch=2..9", None), "state.hidden": ("batch=2..9", None)}
    given = {"x": torch.randn(5, 8), "state": State(5)}
    fa.apply(Recurrent(asks).eval(), given, shapes=dims, keep="verified", compile=False, run_dir=tmp_path).revert()
    rows = json.loads(gzip.decompress((tmp_path / "start.json.gz").read_bytes()))["pieces"]
    assert rows and all(row.get("numbers") == numbers for row in rows)
    assert all(bool(row.get("why")) is (numbers is None) for row in rows), [row.get("why") for row in rows]
    with torch.no_grad(), put_in(describe_live(Recurrent(asks).eval(), (), given), tmp_path) as fused:
        started = fused.traced_because
        assert bool(started) is (numbers is None) and (not started or asks in started)
        for batch, seen in ((2, 0), (7, 3), (9, 0)):
            x, state, own = torch.randn(batch, 8), State(batch, seen), State(batch, seen)
            for _ in range(3):
                found, expected = fused(x=x, state=state), Recurrent(asks)(x, own)
                torch.testing.assert_close((found, state.hidden), (expected, own.hidden), rtol=1e-4, atol=1e-5)
            state.seen = own.seen = 3  # of an object that has been passed before
            torch.testing.assert_close(fused(x=x, state=state), Recurrent(asks)(x, own), rtol=1e-4, atol=1e-5)
        changed = "`state.seen` is 3, and was 0" if asks == "seen" else started
        assert fused.traced_because == changed


def test_changes_of_objects_are_seen_and_put_back():
    held = SimpleNamespace(layers=[SimpleNamespace(keys=None, size=3)], name="cache")
    kwargs = {"cache": held}
    state = ObjectState.of((), kwargs, given_by((), kwargs))
    held.layers[0].keys, held.layers[0].more = torch.ones(2), 1
    assert {place: value for place, value in state.changes().items() if place[1] == "more"} == {("cache.layers.0", "more"): 1}
    assert [*state.changes()] == [("cache.layers.0", "keys"), ("cache.layers.0", "more")]
    state.restore()
    assert vars(held.layers[0]) == {"keys": None, "size": 3}
    del held.layers[0].size
    with pytest.raises(CannotDescribe, match="deletes an attribute"):
        state.changes()


def test_a_tensor_in_a_list_is_none_that_is_set():
    written = Written(made=("cache.layers.0.keys", "cache.all.3"))
    assert untold_change(written, [("cache.layers.0", "keys")]) == "the call puts another tensor in place of `cache.all.3`"
    assert untold_change(written, [("cache.layers.0", "keys"), ("cache", "all")]) == ""
