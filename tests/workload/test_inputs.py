from __future__ import annotations

import pytest
import torch

from fusion_advisor.errors import NoExampleInputs, NoStaticCache, SequenceTooLong, UsageError
from fusion_advisor.workload.inputs import move
from fusion_advisor.workload.load import LoadedWorkload, load_workload
from fusion_advisor.workload.request import WorkloadRequest
from fusion_advisor.workload.static_cache import cache_name
from tests.tiny import cache_in


def load(model_id: str, **changes: object) -> LoadedWorkload:
    return load_workload(WorkloadRequest(**{"model_id": model_id, "layers": 1, "offline": True, "device": "cpu", **changes}))


def run(workload: LoadedWorkload) -> torch.Tensor:
    with torch.no_grad():
        return workload.model(*workload.args, **workload.kwargs)[0]


@pytest.mark.parametrize(
    ("model_id", "seq_len", "shapes", "recorded"),
    [
        ("HuggingFaceTB/SmolLM2-135M", 16, {"input_ids": (2, 16)}, 16),
        ("distilgpt2", 16, {"input_ids": (2, 16)}, 16),
        ("sentence-transformers/all-MiniLM-L6-v2", None, {"input_ids": (2, 128)}, 128),
        ("google/vit-base-patch16-224", None, {"pixel_values": (2, 3, 224, 224)}, 224),
        ("facebook/convnext-tiny-224", None, {"pixel_values": (2, 3, 224, 224)}, 224),
        ("openai/clip-vit-base-patch32", None, {"pixel_values": (2, 3, 224, 224), "input_ids": (2, 77)}, 77),
        ("openai/whisper-tiny", 8, {"input_features": (2, 80, 3000), "decoder_input_ids": (2, 8)}, 8),
        ("t5-small", 16, {"input_ids": (2, 16), "decoder_input_ids": (2, 16)}, 16),
    ],
)
def test_one_layer_of_each_kind_runs_and_stays_finite(
    model_id: str, seq_len: int | None, shapes: dict[str, tuple[int, ...]], recorded: int
) -> None:
    workload = load(model_id, seq_len=seq_len, batch=2)
    assert {name: meta.shape for name, meta in workload.record.inputs} == shapes
    assert workload.record.seq_len == recorded
    assert (workload.record.layers, workload.record.batch) == (1, 2)
    assert not workload.model.training
    output = run(workload)
    assert output.isfinite().all()
    assert output.float().abs().max() > 0


def test_the_default_length_on_a_cpu_is_128_tokens() -> None:
    assert load("distilgpt2").record.seq_len == 128
    assert load("openai/whisper-tiny").record.seq_len == 128


def test_prefill_computes_the_last_logits_only() -> None:
    forward, prefill = load("distilgpt2", seq_len=8), load("distilgpt2", seq_len=8, phase="prefill")
    assert forward.kwargs["use_cache"] is False
    assert prefill.record.phase == "prefill"
    assert run(forward).shape == (1, 8, 50257)
    assert run(prefill).shape == (1, 1, 50257)
    torch.testing.assert_close(run(prefill), run(forward)[:, -1:])


def test_prefill_of_an_encoder_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="--phase prefill needs a causal language model"):
        load("sentence-transformers/all-MiniLM-L6-v2", phase="prefill")


@pytest.mark.parametrize(("model_id", "room"), [("HuggingFaceTB/SmolLM2-135M", 64), ("distilgpt2", 64)])
def test_decode_is_one_token_on_a_cache_that_a_prefill_has_filled(model_id: str, room: int) -> None:
    workload = load(model_id, phase="decode", context=9, batch=2)
    assert (workload.record.phase, workload.record.context, workload.record.seq_len) == ("decode", 9, 1)
    assert {name: meta.shape for name, meta in workload.record.inputs}["input_ids"] == (2, 1)
    cache = cache_in(workload.kwargs)
    assert int(cache.get_seq_length()) == 9 and cache.layers[0].keys.shape[2] == room
    assert f"{cache_name(workload.model)}.layers.0.keys" in dict(workload.record.inputs)
    logits = run(workload)
    assert logits.shape[:2] == (2, 1)
    # the same tokens in one pass without a cache: the last logits are those of the decode step
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(workload.model.config.vocab_size, (2, 10), generator=generator)
    with torch.no_grad():
        whole = workload.model(input_ids=ids, use_cache=False).logits[:, -1:]
    torch.testing.assert_close(logits, whole, rtol=1e-4, atol=1e-4)


def test_a_causal_model_is_trained_on_its_own_tokens() -> None:
    workload = load("distilgpt2", phase="train", seq_len=6)
    assert torch.equal(workload.kwargs["labels"], workload.kwargs["input_ids"])
    assert workload.model(**workload.kwargs).loss.requires_grad
    assert "labels" not in load("distilgpt2", seq_len=6).kwargs


def test_masked_models_are_trained_on_a_share_of_their_tokens_and_image_models_on_classes() -> None:
    masked = load("roberta-base", phase="train", seq_len=64, batch=2)
    labels, ids = masked.kwargs["labels"], masked.kwargs["input_ids"]
    asked = labels != -100
    assert asked[:, 0].all() and 2 <= asked.sum() < asked.numel() / 2 and torch.equal(labels[asked], ids[asked])
    assert torch.equal(ids, load("roberta-base", seq_len=64, batch=2).kwargs["input_ids"])
    assert masked.model(**masked.kwargs).loss.requires_grad
    seen = load("google/vit-base-patch16-224", phase="train", batch=3)
    assert seen.kwargs["labels"].shape == (3,) and seen.kwargs["labels"].max() < seen.model.config.num_labels
    assert seen.model(**seen.kwargs).loss.requires_grad


def test_decode_on_a_cpu_holds_512_tokens_by_default_or_what_fits() -> None:
    assert load("distilgpt2", phase="decode").record.context == 512
    assert cache_in(load("distilgpt2", phase="decode", context=1023).kwargs).layers[0].keys.shape[2] == 1024
    with pytest.raises(SequenceTooLong, match="--context 1024 is over the 1024 positions") as caught:
        load("distilgpt2", phase="decode", context=1024)
    assert caught.value.hint_text == "pass --context 1023 or less"


def test_generate_leaves_room_for_its_tokens() -> None:
    workload = load("distilgpt2", phase="generate", seq_len=8, new_tokens=3)
    assert (workload.record.phase, workload.record.seq_len, workload.record.new_tokens) == ("generate", 8, 3)
    assert workload.generation is not None and workload.generation().sequences.shape == (1, 11)
    assert load("distilgpt2", phase="generate", new_tokens=1000).record.seq_len == 24
    with pytest.raises(SequenceTooLong, match="--seq-len 1020"):
        load("distilgpt2", phase="generate", seq_len=1020, new_tokens=8)


@pytest.mark.parametrize("phase", ["decode", "generate"])
def test_a_model_with_another_kind_of_state_has_no_static_cache(tmp_path, phase: str) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "mamba", "architectures": ["MambaForCausalLM"], "hidden_size": 16, "num_hidden_layers": 1,'
        ' "state_size": 4, "vocab_size": 50, "expand": 2, "conv_kernel": 4, "time_step_rank": 2}'
    )
    with pytest.raises(NoStaticCache, match=rf"--phase {phase} needs a static KV cache") as caught:
        workload = load(str(tmp_path), layers=None, phase=phase)
        assert workload.generation is not None
        workload.generation.steps()
    assert (caught.value.code, caught.value.exit_code) == ("FA309", 4)


def test_decode_of_an_encoder_decoder_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="--phase decode needs a causal language model"):
        load("t5-small", phase="decode")


def test_too_many_tokens_name_the_maximum() -> None:
    with pytest.raises(SequenceTooLong, match=r"--seq-len 1025 is over the 1024 positions of `distilgpt2`") as caught:
        load("distilgpt2", seq_len=1025)
    assert (caught.value.code, caught.value.exit_code) == ("FA304", 2)
    assert caught.value.hint_text == "pass --seq-len 1024 or less"
    with pytest.raises(SequenceTooLong, match="512 positions"):
        load("roberta-base", seq_len=513)
    assert run(load("roberta-base", seq_len=512)).isfinite().all()


def test_an_image_model_takes_no_sequence_length() -> None:
    with pytest.raises(UsageError, match="takes images"):
        load("google/vit-base-patch16-224", seq_len=16)


def test_an_unknown_kind_of_input_is_named(tmp_path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "wav2vec2", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,'
        ' "architectures": ["Wav2Vec2Model"]}'
    )
    with pytest.raises(NoExampleInputs, match=r"Wav2Vec2Model wants `input_values`") as caught:
        load(str(tmp_path), layers=None)
    assert (caught.value.code, caught.value.exit_code) == ("FA107", 4)


def test_tokens_are_seeded_and_avoid_the_padding_id() -> None:
    first, again, other = (load("roberta-base", seed=seed, seq_len=512).kwargs["input_ids"] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not (first == 1).any()


def test_moving_keeps_the_structure() -> None:
    value = {"a": [torch.zeros(2), (torch.zeros(2, dtype=torch.int64), 3)]}
    moved = move(value, torch.device("cpu"), torch.bfloat16)
    assert moved["a"][0].dtype == torch.bfloat16
    assert moved["a"][1][0].dtype == torch.int64
    assert moved["a"][1][1] == 3
