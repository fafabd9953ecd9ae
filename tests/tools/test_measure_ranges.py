"""Random calls of a range have the lengths that they say, each stage has its limit, and the rows are summed up as they are."""

from __future__ import annotations

import contextlib
import importlib
import json
import types

import pytest
import torch

from fusion_advisor.fuse.shapes.ranged_calls import RangedCall
from fusion_advisor.records import SizeRange
from tools import encoders, measure_ranges, ranges_table


def ranged(name="", **kwargs):
    ranges = (SizeRange(name="batch", least=1, most=16), SizeRange(name="seq", least=1, most=4096))
    dims = {path: ("batch", "seq") for path in ("input_ids", "attention_mask") if path in kwargs}
    return RangedCall(name=name, kwargs=kwargs, dims=dims, ranges=ranges)


def padded():
    return {"input_ids": torch.zeros(2, 8, dtype=torch.long), "attention_mask": torch.ones(2, 8, dtype=torch.long)}


def test_random_calls_stay_within_the_ranges_and_the_tokens():
    calls = measure_ranges.random_calls([ranged(**padded())], 50)
    assert all(1 <= call.sizes["batch"] <= 16 and 1 <= call.sizes["seq"] <= 4096 for call in calls)
    assert max(call.sizes["batch"] * call.sizes["seq"] for call in calls) <= measure_ranges.MOST_TOKENS
    assert len({tuple(call.sizes.items()) for call in calls}) > 40


def test_rows_of_an_encoders_call_have_random_lengths():
    call = measure_ranges.Call(name="", sizes={"batch": 9, "seq": 40}, ranged=ranged(**padded()))
    made = call.make(seed=3)
    lengths = made["attention_mask"].sum(1)
    assert made["input_ids"].shape == (9, 40) and len(set(made["input_ids"].flatten().tolist())) > 50
    assert lengths[0] == 40 and lengths.min() >= 1 and len(set(lengths.tolist())) > 3
    assert (made["attention_mask"] == (torch.arange(40) < lengths[:, None])).all()  # padded at the end
    assert torch.equal(call.make(seed=3)["attention_mask"], made["attention_mask"])


def test_the_mask_of_a_step_of_generate_stays_as_generate_made_it():
    kwargs = padded()
    kwargs["attention_mask"][0, 0] = 0
    call = measure_ranges.Call(name="padded prefill", sizes={"batch": 2, "seq": 8}, ranged=ranged("padded prefill", **kwargs))
    assert torch.equal(call.make(seed=0)["attention_mask"], kwargs["attention_mask"])


class Cache:
    """Holds what a call grows, and what it writes in place."""

    def __init__(self):
        self.keys, self.static, self.is_initialized = torch.arange(6.0).view(2, 3), torch.zeros(2), True


def test_a_grown_cache_comes_back_in_memory_of_its_own_and_a_static_one_where_it_lies():
    cache = Cache()
    put_back = measure_ranges.rewinding({"past_key_values": cache})
    first, static, addresses = cache.keys, cache.static, set()
    put_back()
    assert cache.keys is first  # nothing has run
    for number in range(4):
        addresses.add(cache.keys.data_ptr())
        assert torch.equal(cache.keys, first) and cache.static is static
        cache.keys, cache.is_initialized = torch.cat([cache.keys, torch.ones(2, 1)], 1), False
        cache.static += number
        put_back()
        assert cache.is_initialized
    assert len(addresses) == 4 and torch.equal(cache.keys, first)


def test_each_stage_has_its_seconds():
    assert measure_ranges.limits_of(["serve", "compile"], [5.0]) == {"serve": 5.0, "compile": 5.0}
    assert measure_ranges.limits_of(["serve", "exact"], [5.0, 7.0]) == {"serve": 5.0, "exact": 7.0}
    with pytest.raises(ValueError, match="2 stages and 3 limits"):
        measure_ranges.limits_of(["serve", "exact"], [1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="the stages are"):
        measure_ranges.limits_of(["save"], [1.0])


def test_all_stages_together_end_in_time():
    assert measure_ranges.seconds_left(60.0, None, 500.0) == 60.0
    assert measure_ranges.seconds_left(60.0, 250.0, 100.0) == 60.0
    assert measure_ranges.seconds_left(60.0, 250.0, 230.0) == 20.0
    assert measure_ranges.seconds_left(60.0, 250.0, 300.0) == 0.0


@pytest.mark.parametrize(("last_s", "times"), [(0.01, 5), (0.1, 3), (1.0, 1)])
def test_a_long_call_is_timed_less_often(last_s, times):
    assert measure_ranges._times([9.0, last_s]) == times


def served(sizes, ours_s, eager_s, **more):
    usual = {"is_ours_first": False, "rel_l2": 1e-3, "is_replayed": False, "fallbacks": 0, "traces": 0, "kernels_compiled": 0}
    times = {"ours_s": [9.0, 9.0, ours_s], "eager_s": [9.0, 9.0, eager_s]}
    return {"stage": "serve", "what": "call", "call": "", "sizes": sizes, **times, **usual} | more


def test_rows_are_summed_up_and_a_line_that_was_cut_is_left_out(tmp_path):
    rows = [
        {"what": "loaded", "seconds": 12.0},
        served({"batch": 1}, 1.0, 2.0),
        served({"batch": 2}, 2.0, 1.0, fallbacks=3),
        served({"batch": 4}, 1.0, 4.0, is_replayed=True, is_in_segments=False),
        served({"batch": 4}, 1.0, 1.0, call="decode", is_in_segments=True),
        served({"batch": 8}, 1.0, 2.0, call="decode", is_in_segments=False),
        served({"batch": 1}, 3.0, 0.0, stage="exact", exact_s=[9.0, 9.0, 2.0]),
        {"stage": "compile", "what": "call", "call": "", "sizes": {"batch": 2}, "compile default_s": [9.0, 9.0, 8.0]},
        {"stage": "generate", "what": "failed", "error": "RuntimeError: no"},
    ]  # fmt: skip
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + '\n{"stage": "compile", "wh')
    text = ranges_table.table("run", ranges_table.rows_in(path))
    assert "| forward, ours | eager | 3 | 0.63 | 0.25 to 2.00 |" in text  # (0.5 * 2 * 0.25) ** (1 / 3)
    assert "| forward, ours in a CUDA graph | eager | 1 | 0.25 | 0.25 to 0.25 |" in text
    assert "| decode, ours with parts in CUDA graphs | eager | 1 | 1.00 | 1.00 to 1.00 |" in text
    assert "decode, ours in a CUDA graph" not in text
    assert "| forward, ours | torch.compile, dynamic | 1 | 0.25 | 0.25 to 0.25 |" in text
    assert "| ours | a plan of exactly these sizes | 1 | 1.50 | 1.50 to 1.50 |" in text
    assert "- loaded: 12.0 s" in text and "1 calls ran the original ops" in text and "- generate failed: RuntimeError: no" in text


@pytest.mark.parametrize("name", ["bert", "vit", "whisper"])
def test_each_encoder_takes_its_inputs(name, monkeypatch):
    monkeypatch.setenv("FA_TINY", "1")
    model, inputs = getattr(importlib.reload(encoders), name)()
    assert not model.training
    with torch.no_grad():
        assert torch.isfinite(measure_ranges.first_tensor(model(**inputs))).all()
    if name == "bert":
        assert inputs["attention_mask"].sum(1).tolist() == [64, 40]


def test_kernels_from_the_cache_on_disk_are_not_compiled_ones():
    counted = measure_ranges.Compiles()
    counted._seen(src=types.SimpleNamespace(name="gelu"), cache_hit=False, metadata={})
    counted._seen(src=types.SimpleNamespace(name="norm"), cache_hit=True, metadata={})
    assert (counted.kernels, counted.names, counted.loaded) == (1, ["gelu"], ["norm"])


def test_two_plans_of_one_call_are_timed_in_turns_each_with_its_graph():
    log = []

    class Way(contextlib.AbstractContextManager):
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            log.append(self.name)

        def __exit__(self, *_):
            log.append("out")

    turns = measure_ranges.in_turns({"a": Way("a"), "b": Way("b")}, lambda: log.append("call"), lambda: None)
    assert [word for word in log if word != "call"] == ["a", "out", "b", "out"] * 3
    assert {name: len(taken) for name, taken in turns.items()} == {"a": 3, "b": 3}
    assert log.count("call") == 6 * (measure_ranges._UNTIL_RECORDED + measure_ranges._BEFORE + measure_ranges._TIMED)
    assert measure_ranges.middle([(9, 9, 3), (1, 1, 1), (5, 5, 2)]) == (5, 5, 2)
