from __future__ import annotations

import pytest
import torch
from transformers.initialization import no_init_weights

from fusion_advisor.workload.architecture import auto_class
from fusion_advisor.workload.preset import Preset, find_preset, load_presets, preset_ids
from fusion_advisor.workload.request import WorkloadRequest
from fusion_advisor.workload.resolve import resolve_source

PRESETS = load_presets()

# Published counts, in millions, written down apart from the shipped files.
PUBLISHED = {
    "gpt2": 124.4,
    "gpt2-xl": 1557.6,
    "distilgpt2": 81.9,
    "Qwen/Qwen2.5-0.5B": 494.0,
    "Qwen/Qwen2.5-7B": 7615.6,
    "Qwen/Qwen2.5-7B-Instruct": 7615.6,
    "Qwen/Qwen3-8B": 8190.7,
    "meta-llama/Llama-3.2-1B": 1235.8,
    "meta-llama/Llama-3.1-8B": 8030.3,
    "mistralai/Mistral-7B-v0.1": 7241.7,
    "mistralai/Mistral-7B-v0.3": 7248.0,
    "microsoft/Phi-3-mini-4k-instruct": 3821.1,
    "google/gemma-2-2b": 2614.3,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 1100.0,
    "bert-base-uncased": 109.5,
    "bert-large-uncased": 335.1,
    "roberta-base": 124.6,
    "distilbert-base-uncased": 66.4,
    "albert-base-v2": 11.7,
    "sentence-transformers/all-MiniLM-L6-v2": 22.7,
    "google/vit-base-patch16-224": 86.6,
    "facebook/dinov2-base": 86.6,
    "facebook/convnext-tiny-224": 28.6,
    "microsoft/resnet-50": 25.6,
    "openai/clip-vit-base-patch32": 151.3,
    "openai/whisper-tiny": 37.8,
    "openai/whisper-base": 72.6,
    "openai/whisper-small": 241.7,
    "t5-small": 60.5,
    "t5-base": 222.9,
}


def test_there_are_enough_and_no_id_is_listed_twice() -> None:
    ids = preset_ids()
    assert len(PRESETS) >= 24
    assert len(ids) == len(set(ids))
    assert find_preset("gpt2") == find_preset("openai-community/gpt2")
    assert find_preset("bert-base-uncased") == find_preset("google-bert/bert-base-uncased")
    assert find_preset("no/such") is None


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.ids[0])
def test_every_preset_resolves_offline_and_has_its_published_size(preset: Preset) -> None:
    model_id = preset.ids[-1]
    source = resolve_source(WorkloadRequest(model_id=model_id, offline=True))
    assert source.weights == "random"
    assert "random weights" in source.notes[0]
    assert "offline" in source.notes[0]
    chosen = auto_class(source.config, model_id=model_id, trust_remote_code=False)
    with torch.device("meta"), no_init_weights():
        model = chosen.from_config(source.config)
    model.tie_weights()
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == preset.parameters
    for known in {*preset.ids, *preset.same_shape} & PUBLISHED.keys():
        assert count / 1e6 == pytest.approx(PUBLISHED[known], rel=0.01)


def test_published_counts_are_all_of_shipped_ids() -> None:
    assert PUBLISHED.keys() <= set(preset_ids())
