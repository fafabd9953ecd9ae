"""A package's call with a CUDA graph makes the launches of the fused model in place, and does the long looks behind them."""

from __future__ import annotations

import copy
import importlib
import threading
from collections import Counter

import pytest
import torch
from transformers import StaticCache

from fusion_advisor.capture.graph.tracer import capture_regions
from fusion_advisor.fuse.cuda_graph.replay import Graphs
from fusion_advisor.fuse.decide.session import Bench
from fusion_advisor.fuse.live.fused_model import FusedModel
from tests.export import models
from tools import package_overhead

VIEWS = {"aten::as_strided", "aten::detach", "aten::lift_fresh", "aten::alias"}
"""Ops that launch nothing."""


class Ordered:
    """Notes when it replays."""

    def __init__(self, order):
        super().__init__()
        self.order = order

    def replay(self):
        """Note it."""
        self.order.append("replay")


class OfPackage(Ordered, package_overhead.OfPackage):
    """Stands for CUDA graphs in a package."""


class InPlace(Ordered, package_overhead.InPlace):
    """Stands for them in the fused model."""


def llama_decode():
    model, inputs = models.llama()
    ids = inputs["input_ids"]
    return model, models.decode_step(model, ids, StaticCache(config=model.config, max_cache_len=32))


def launched(call, order):
    """Return the ops of a call's thread that launch something, and how often it replays."""
    order.clear()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    names = [event.name for event in profile.events() if event.cpu_parent is None and event.name.startswith("aten::")]
    return Counter(name for name in names if name not in VIEWS), order.count("replay")


class Overtaken:
    """Records on a CPU; once it is on, a replay waits until another one has begun, or half a second."""

    def __init__(self):
        self.is_on, self.replays, self.has_begun = False, 0, (threading.Event(), threading.Event())

    def is_recording(self):
        """Nobody records around a call."""
        return False

    def record(self, run):
        """Run a call; a replay makes it again."""
        output = run()

        def replay():
            if self.is_on:
                self.replays += 1
                self.has_begun[self.replays - 1].set()
                if self.replays == 1:
                    self.has_begun[1].wait(0.5)
            output.logits.copy_(run().logits)

        return output, replay


@torch.no_grad()
def test_a_call_of_another_thread_does_not_overtake_a_replay(tmp_path, monkeypatch):
    model, inputs, fused = models.fused(models.gpt2)
    fused.export(tmp_path / "threads_gpt2")
    fused.revert()
    monkeypatch.syspath_prepend(tmp_path / "threads_gpt2")
    package, recorder, found = importlib.import_module("threads_gpt2"), Overtaken(), {}
    calls = [inputs | {"input_ids": inputs["input_ids"] + number} for number in range(2)]
    expected = [model(**call).logits for call in calls]
    package.apply(model, cuda_graph=True, recorder=recorder)
    for _ in range(3):
        model(**inputs)
    recorder.is_on = True

    @torch.no_grad()
    def run(number):
        if number:
            recorder.has_begun[0].wait(60)
        found[number] = model(**calls[number]).logits

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert recorder.replays == 2 and package.fallbacks(model) == {}
    for number in range(2):
        torch.testing.assert_close(found[number], expected[number])
    package.revert(model)


class Noting:
    """Stands for an object and notes which of its functions are called."""

    def __init__(self, of, order):
        self._of, self._order = of, order

    def __getattr__(self, name):
        found = getattr(self._of, name)
        if not callable(found):
            return found

        def noted(*args, **kwargs):
            self._order.append(name)
            return found(*args, **kwargs)

        return noted


@torch.no_grad()
@pytest.mark.parametrize("make", [models.gpt2, models.bert, llama_decode])
def test_a_replayed_call_launches_what_the_model_in_place_does(make, tmp_path, monkeypatch):
    model, inputs, fused = models.fused(make)
    name = f"launches_{make.__name__}"
    fused.export(tmp_path / name)
    fused.revert()
    monkeypatch.syspath_prepend(tmp_path / name)
    package, order = importlib.import_module(name), list[str]()
    first, second = copy.deepcopy(inputs), copy.deepcopy(inputs)

    package.apply(model, cuda_graph=True, recorder=OfPackage(order))
    for _ in range(4):
        model(**first)
    own, replays = launched(lambda: model(**first), order)
    assert package.fallbacks(model) == {} and replays == 1
    adapter = model.forward.__self__
    adapter.guard, adapter.seen = Noting(adapter.guard, order), Noting(adapter.seen, order)
    order.clear()
    model(**first)
    looks = ["is_unchanged"] * (make is llama_decode)
    assert [one for one in order if one != "holds_the_same"] == ["replay", *looks, "change"]
    package.revert(model)

    live = capture_regions(model, (), second)
    modules = Bench(live, on_cuda=False).build((), ()).modules
    in_place = FusedModel(model, live.regions, modules, (), second, graphs=Graphs(InPlace(order)), live=live)
    with in_place:
        for _ in range(10):
            live.written.rewind()
            in_place(**second)
        live.written.rewind()
        its, replays = launched(lambda: in_place(**second), order)
    assert not in_place.fallbacks and replays == 1
    assert own == its and sum(own.values()) in (2, 3)
