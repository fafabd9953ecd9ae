"""What goes through the pool of static caches, and what is the model's own ``generate``."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from fusion_advisor.workload.pooled_generate import MOST_CACHES, PooledGenerate
from fusion_advisor.workload.static_cache import in_steps
from tests import tiny

IDS = torch.arange(1, 13).reshape(2, 6)


class Own:
    """Counts the calls of a model's own ``generate`` by the kind of their cache."""

    def __init__(self, model):
        self.model, self.seen = model, []
        self.own = model.generate

    def generate(self, *args, **kwargs):
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        self.seen.append(type(cache).__name__)
        return self.own(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(self.model, name)


@pytest.fixture
def own():
    return Own(tiny.gpt2()[0])


def pooled(own, most_tokens=64):
    found = PooledGenerate(own.model, most_tokens=most_tokens)
    found._model = own
    return found


def test_a_prompt_goes_through_a_growing_cache_and_on_with_a_static_one(own):
    expected = own.own(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=5, pad_token_id=0)
    assert torch.equal(pooled(own)(IDS, max_new_tokens=5, pad_token_id=0), expected)
    assert own.seen == ["DynamicCache", "StaticCache"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"num_beams": 2}, "beams change rows of the cache"),
        ({"do_sample": True, "num_return_sequences": 2}, "several sequences come of one prompt"),
        ({"return_dict_in_generate": True}, "the caller gets the cache"),
        ({"cache_implementation": "static", "disable_compile": True}, "a kind of cache was chosen"),
        ({"max_new_tokens": 30}, "more than the 32 tokens"),
        ({"input_ids": IDS[:, :1]}, "the prompt is one token"),
        ({"input_ids": IDS[:1], "prompt_lookup_num_tokens": 2}, "tokens of the prompt are drafts"),
        ({"use_cache": False}, "use_cache is off"),
        ({"token_type_ids": torch.ones_like(IDS)}, "the prompts come with other tensors"),
        ({"input_ids": torch.where(IDS < 3, 0, IDS), "eos_token_id": 50}, "the prompts hold the padding token"),
        ({"generation_config": GenerationConfig(return_dict_in_generate=True, pad_token_id=0)}, "the caller gets the cache"),
    ],
)
def test_what_the_pool_cannot_serve_is_the_models_own_and_says_why(own, arguments, reason):
    asked = {"input_ids": IDS, "max_new_tokens": 3, "pad_token_id": 0, **arguments}
    expected = tokens_of(seeded(own.own, **asked))
    generate = pooled(own, most_tokens=32)
    with pytest.warns(UserWarning, match="fusion-advisor generates on a growing cache, without CUDA graphs: "):
        found = seeded(generate, **asked)
    seeded(generate, **asked)
    assert torch.equal(tokens_of(found), expected) and own.seen == ["NoneType"] * 2
    ((said, count),) = generate.refusals.items()
    assert reason in said and count == 2


def test_a_draft_models_tokens_are_eagers(own):
    asked = {"input_ids": IDS[:1], "max_new_tokens": 6, "pad_token_id": 0, "assistant_model": tiny.gpt2()[0]}
    expected = own.own(**asked)
    generate = pooled(own)
    assert torch.equal(generate(**asked), expected)
    assert list(generate.refusals) == ["another model drafts tokens, and a step checks several of them"]


def seeded(call, **arguments):
    torch.manual_seed(1)
    return call(**arguments)


def tokens_of(found):
    return found if isinstance(found, torch.Tensor) else found.sequences


class At(StoppingCriteria):
    """Stops at a length, and notes when it was asked."""

    def __init__(self, tokens):
        self.tokens, self.asked = tokens, []

    def __call__(self, ids, scores, **_):
        self.asked.append(ids.shape[1])
        return torch.full((len(ids),), ids.shape[1] >= self.tokens)


class Stream:
    def __init__(self):
        self.got = []

    def put(self, value):
        self.got.append(value.flatten().tolist())

    def end(self):
        self.got.append("end")


MASK = torch.tensor([[1] * 6, [0, 0, 0, 1, 1, 1]])
PADDED = torch.where(MASK > 0, IDS, 0)


@pytest.mark.parametrize("maker", ["gpt2", "llama", "qwen2"])
@pytest.mark.parametrize(
    "arguments",
    [
        {"input_ids": PADDED, "attention_mask": MASK},
        {"input_ids": PADDED, "attention_mask": MASK.bool()},
        {"do_sample": True},
        {"input_ids": PADDED, "attention_mask": MASK, "do_sample": True, "top_k": 5, "top_p": 0.9, "temperature": 0.7},
        {"max_new_tokens": 1},
        {"max_new_tokens": 40},
        {"eos_token_id": list(range(10, 60))},
        {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "min_new_tokens": 4},
        {"guidance_scale": 1.5},
        {"generation_config": GenerationConfig(max_new_tokens=7, pad_token_id=0)},
    ],
    ids=", ".join,
)
def test_tokens_and_random_numbers_are_eagers(maker, arguments):
    own = Own(causal(maker))
    asked = {"input_ids": IDS, "max_new_tokens": 9, "pad_token_id": 0, **arguments}
    expected, after = seeded(own.own, **asked), torch.get_rng_state()
    generate = pooled(own, most_tokens=64)
    assert torch.equal(seeded(generate, **asked), expected) and torch.equal(torch.get_rng_state(), after)
    assert own.seen == ["DynamicCache", "StaticCache"] and generate.refusals == {}


def causal(kind):
    """A tiny model with weights that are far enough apart for no tie among its scores."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    own = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    if kind == "gpt2":
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=128, **sizes))
    elif kind == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **own, max_position_embeddings=128))
    elif kind == "qwen2":
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes, **own, max_position_embeddings=128))
    else:
        config = transformers.MistralConfig(**sizes, **own, max_position_embeddings=128, sliding_window=4)
        model = transformers.MistralForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return model.eval()


def test_a_streamer_and_stopping_criteria_hear_what_they_hear_of_eager(own):
    heard = []
    for call in (own.own, pooled(own)):
        stream, stop = Stream(), At(9)
        call(IDS[:1], max_new_tokens=20, pad_token_id=0, streamer=stream, stopping_criteria=StoppingCriteriaList([stop]))
        heard.append((stream.got, stop.asked))
    assert heard[0] == heard[1] and heard[0][1][-1] == 9


def test_a_sliding_window_is_left_to_the_models_own_generate():
    own = Own(causal("mistral"))
    expected = own.own(IDS, max_new_tokens=9)
    generate = pooled(own)
    assert torch.equal(generate(IDS, max_new_tokens=9), expected)
    assert list(generate.refusals) == ["layers have a sliding window, and their cache ends with it"]


def test_inference_mode_may_come_and_go(own):
    expected, generate = own.own(IDS, max_new_tokens=4, pad_token_id=0), pooled(own)
    with torch.inference_mode():
        assert torch.equal(generate(IDS, max_new_tokens=4, pad_token_id=0), expected)
    assert torch.equal(generate(IDS, max_new_tokens=4, pad_token_id=0), expected)
    with torch.inference_mode():
        assert torch.equal(generate(IDS, max_new_tokens=4, pad_token_id=0), expected)


def test_the_length_may_be_said_as_a_whole(own):
    assert pooled(own)(input_ids=IDS, max_length=9, pad_token_id=0, eos_token_id=None).shape == (2, 9)
    assert own.seen == ["DynamicCache", "StaticCache"]


def test_few_caches_are_kept_those_used_last():
    model, _ = tiny.gpt2()
    generate = PooledGenerate(model, most_tokens=64)
    for rows in (1, 2, 3, 2):
        generate(IDS[:1].repeat(rows, 1), max_new_tokens=2, pad_token_id=0)
    assert list(generate._caches) == [(3, 64), (2, 64)] and MOST_CACHES == 2


class Asks(StoppingCriteria):
    """Generates from another prompt in the middle of a call, as a judge of what was said so far does."""

    def __init__(self, generate):
        self.generate, self.answers = generate, []

    def __call__(self, input_ids, scores, **_):
        self.answers.append(self.generate(IDS + 50, max_new_tokens=4, pad_token_id=0))
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_a_call_in_the_middle_of_another_has_a_cache_of_its_own():
    own = Own(causal("llama"))
    expected, answer = (own.own(ids, max_new_tokens=4, pad_token_id=0) for ids in (IDS, IDS + 50))
    generate = pooled(own)
    asks = Asks(generate)
    found = generate(IDS, max_new_tokens=4, pad_token_id=0, stopping_criteria=StoppingCriteriaList([asks]))
    assert torch.equal(found, expected) and len(asks.answers) == 4
    assert all(torch.equal(one, answer) for one in asks.answers)
    assert list(generate._caches) == [(2, 64)]


def test_a_nan_of_an_earlier_prompt_is_gone():
    model, _ = tiny.gpt2()
    generate = PooledGenerate(model, most_tokens=64)
    expected = generate(IDS, max_new_tokens=4, pad_token_id=0)
    for layer in generate._caches[2, 64].layers:
        layer.values.fill_(float("nan"))
        layer.keys.fill_(float("nan"))
    assert torch.equal(generate(IDS, max_new_tokens=4, pad_token_id=0), expected)


@pytest.mark.parametrize(("tokens", "room"), [(1, 64), (64, 64), (65, 128), (129, 256), (257, 512), (8193, 16384)])
def test_rooms_are_few(tokens, room):
    assert in_steps(tokens) == room
