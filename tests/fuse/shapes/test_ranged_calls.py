"""The calls that ranges are asked for: the example's, or each step of ``generate`` as transformers makes it."""

from __future__ import annotations

import pytest
import torch

from fusion_advisor.capture.sizes.open_capture import capture_open, dim_size, sizes_of
from fusion_advisor.errors import UsageError
from fusion_advisor.fuse.plan.size_ranges import read_shapes
from fusion_advisor.fuse.shapes.call_sizes import resized
from fusion_advisor.fuse.shapes.ranged_calls import ranged_calls, with_room
from fusion_advisor.fuse.shapes.serve import ShapeTable
from fusion_advisor.workload.load import describe_live
from fusion_advisor.workload.static_cache import cache_name
from tests import tiny

ASKED = "batch=1..8,seq=1..32,cached=1..60"


def calls_of(model, kwargs, shapes=ASKED):
    return {call.name: call for call in ranged_calls(describe_live(model, (), kwargs), read_shapes(shapes))}


@pytest.fixture(scope="module")
def qwen2():
    model, kwargs = tiny.qwen2()
    return model, kwargs, calls_of(model, kwargs)


def test_without_cached_the_call_is_the_examples():
    model, kwargs = tiny.gpt2()
    (call,) = calls_of(model, kwargs, "batch=1..4,seq=1..8").values()
    assert (call.name == "" and call.kwargs is kwargs) or call.kwargs == kwargs
    assert call.dims == {"input_ids": ("batch", "seq")}
    assert call.may_record


def test_the_steps_of_generate_have_the_dims_that_grow(qwen2):
    model, _, calls = qwen2
    cache = cache_name(model)
    prefill, decode = calls["prefill"], calls["decode"]
    assert prefill.dims["input_ids"] == ("batch", "seq")
    assert not any(path.startswith(cache) for path in prefill.dims)
    assert decode.dims["input_ids"] == ("batch", "")
    for layer in range(2):
        for name in ("keys", "values"):
            assert decode.dims[f"{cache}.layers.{layer}.{name}"] == ("batch", "", "cached", "")
    assert [one.name for one in prefill.ranges] == ["batch", "seq"]
    assert [one.name for one in decode.ranges] == ["batch", "cached"]
    assert not decode.may_record
    shown = [path for path, _ in decode.shown_dims]
    assert f"decode {cache}.layers.0.keys" in shown and not any("layers.1" in path for path in shown)


def test_prompts_of_different_lengths_are_calls_with_a_mask(qwen2):
    _, _, calls = qwen2
    # Older transformers pass a mask that hides nothing; then the two are one call.
    masked = calls.get("padded decode", calls["decode"])
    assert masked.dims["attention_mask"] == ("batch", "cached+1")
    if "padded prefill" in calls:
        assert "attention_mask" not in calls["prefill"].kwargs
        assert {one.text for one in calls["padded prefill"].ranges} == {"batch=1..8", "seq=2..32"}


def test_a_decode_step_on_a_static_cache_varies_its_room(qwen2):
    model, _, calls = qwen2
    static, cache = calls["static decode"], cache_name(model)
    assert [one.text for one in static.ranges] == ["batch=1..8", "room=2..64"]
    assert static.dims[f"{cache}.layers.1.values"] == ("batch", "", "room", "")
    assert static.may_record and not calls["decode"].may_record
    _, kwargs = static.at({"batch": 3, "room": 50})
    layer = kwargs[cache].layers[0]
    assert layer.keys.shape[:3] == (3, 2, 50) and layer.max_cache_len == 50 and layer.batch_size == 3
    assert int(layer.cumulative_length) == 25
    with torch.no_grad():
        assert model(**kwargs).logits.shape[:2] == (3, 1)
    assert int(layer.cumulative_length) == 26
    assert static.kwargs[cache].layers[0].max_cache_len == 64


def test_a_dim_is_counted_from_another(qwen2):
    model, _, calls = qwen2
    assert dim_size("cached+1", {"cached": 7}) == 8
    assert sizes_of({"m": torch.zeros(2, 8), "k": torch.zeros(2, 7)}, {"m": ("b", "n+1"), "k": ("b", "n")}) == {"b": 2, "n": 7}
    assert sizes_of({"m": torch.zeros(2, 9), "k": torch.zeros(2, 7)}, {"m": ("b", "n+1"), "k": ("b", "n")}) is None
    masked = calls.get("padded decode", calls["decode"])
    _, kwargs = resized(masked.args, masked.kwargs, masked.dims, {"batch": 5, "cached": 11})
    assert kwargs["attention_mask"].shape == (5, 12)
    assert kwargs[cache_name(model)].get_seq_length() == 11
    assert masked.kwargs[cache_name(model)].get_seq_length() != 11


def test_one_graph_serves_caches_of_any_length(qwen2):
    model, _, calls = qwen2
    masked = calls.get("padded decode", calls["decode"])
    args, kwargs = resized(masked.args, masked.kwargs, masked.dims, {"batch": 3, "cached": 11})
    opened = capture_open(model, args, kwargs, masked.dims)
    assert opened.sizes == {"batch": 3, "cached": 11}
    assert set(opened.names.values()) == {"batch", "cached", "cached+1"}
    assert all(opened.holds({"batch": batch, "cached": cached}) for batch, cached in ((2, 2), (8, 60), (5, 7)))
    assert set(opened.places()) == {"batch", "cached"}


def test_a_call_is_looked_up_by_what_its_cache_holds(qwen2):
    model, _, calls = qwen2
    decode = calls["decode"]
    table = ShapeTable(decode.ranges, decode.dims, (), (decode.args, decode.kwargs), may_record=False)

    def found(**other):
        args, again = resized(decode.args, decode.kwargs, decode.dims, {"batch": 2, "cached": 5})
        return table.find(args, {**again, **other})

    assert found() == "its sizes are in no piece of the ranges"  # its pattern is the example's
    assert found(use_cache=False) == ""
    _, again = resized(decode.args, decode.kwargs, decode.dims, {"batch": 2, "cached": 5})
    cache = again[cache_name(model)]
    cache.layers[1].values = cache.layers[1].values[:, :, :4]
    assert table.find((), again) == ""
    _, again = resized(decode.args, decode.kwargs, decode.dims, {"batch": 2, "cached": 5})
    again[cache_name(model)].layers[0].is_initialized = 1
    assert table.find((), again) == ""


def test_a_model_that_cannot_generate_is_refused_in_words():
    with pytest.raises(UsageError, match="no `generate`"):
        calls_of(tiny.Toy().eval(), {"x": torch.randn(2, 32)})
    with pytest.raises(UsageError, match="found by themselves"):
        model, kwargs = tiny.gpt2()
        ranged_calls(describe_live(model, (), kwargs), read_shapes({"input_ids": ("batch=1..2", "cached=1..4")}))


def test_a_model_whose_static_cache_does_not_fit_its_masks_has_no_static_step():
    from transformers import FalconConfig, FalconForCausalLM

    torch.manual_seed(0)
    config = FalconConfig(
        num_hidden_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=200, alibi=True, multi_query=False,
        parallel_attn=False, new_decoder_architecture=False, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    calls = calls_of(FalconForCausalLM(config).eval(), {"input_ids": torch.randint(1, 200, (2, 7))})
    assert "decode" in calls and "static decode" not in calls


def test_a_model_that_computes_something_else_with_a_static_cache_has_no_static_step():
    from transformers import GPTNeoConfig, GPTNeoForCausalLM

    torch.manual_seed(0)
    config = GPTNeoConfig(
        num_layers=2, hidden_size=32, num_heads=4, vocab_size=200, max_position_embeddings=64, window_size=8,
        attention_types=[[["global", "local"], 1]], bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    calls = calls_of(GPTNeoForCausalLM(config).eval(), {"input_ids": torch.randint(1, 200, (2, 7))})
    assert "decode" in calls and "static decode" not in calls


def test_a_window_that_is_counted_in_python_is_another_graph_at_each_step():
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(
        num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=200, max_position_embeddings=64, sliding_window=32, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = MistralForCausalLM(config).eval()
    calls = calls_of(model, {"input_ids": torch.randint(1, 200, (2, 7))})
    assert "counts in Python" in calls["decode"].refusal
    (piece,) = calls["decode"].pieces(lambda _: pytest.fail("it is not captured"))
    assert piece.refusal == calls["decode"].refusal and piece.box == calls["decode"].ranges
    assert not calls["prefill"].refusal


@pytest.mark.parametrize(("cached", "room"), [(1, 64), (63, 64), (64, 128), (200, 256)])
def test_a_point_says_the_room_of_a_static_cache_too(cached, room):
    assert with_room({"batch": 2, "cached": cached}) == {"batch": 2, "cached": cached, "room": room}
    assert with_room({"batch": 2, "seq": 5}) == {"batch": 2, "seq": 5}
