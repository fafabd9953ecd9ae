from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from fusion_advisor.errors import (
    AdvisorError,
    BadFactory,
    BrokenModelDirectory,
    GatedModel,
    MissingWeights,
    NoCudaDevice,
    OutOfMemory,
    RemoteCodeRefused,
    UnknownArchitecture,
    UnknownModel,
    UsageError,
)
from fusion_advisor.workload import device as device_module
from fusion_advisor.workload import load as load_module
from fusion_advisor.workload.architecture import cut_layers
from fusion_advisor.workload.device import Cuda, resolve_device
from fusion_advisor.workload.load import LoadedWorkload, describe_live, load_workload
from fusion_advisor.workload.preset import find_preset
from fusion_advisor.workload.request import WorkloadRequest
from tests.workload.hub_server import SHA, FakeHub, write_config


def load(model_id: object, **changes: object) -> LoadedWorkload:
    return load_workload(
        WorkloadRequest(**{"model_id": str(model_id), "seq_len": 8, "offline": True, "device": "cpu", **changes})
    )


def fails(kind: type[AdvisorError], code: str, exit_code: int, model_id: object, **changes: object) -> AdvisorError:
    with pytest.raises(kind) as caught:
        load(model_id, **changes)
    assert (caught.value.code, caught.value.exit_code) == (code, exit_code)
    return caught.value


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    config = transformers.AutoConfig.from_pretrained(write_config(tmp_path / "made"))
    folder = tmp_path / "checkpoint"
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


# random weights


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "m")
    first, again, other = (load(folder, seed=seed).model.state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_globals_are_as_before(tmp_path: Path) -> None:
    before = torch.get_rng_state(), torch.get_default_dtype(), torch.get_default_device()
    verbosity = transformers.utils.logging.get_verbosity()
    load(write_config(tmp_path / "m"), dtype="bf16")
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (torch.get_default_dtype(), torch.get_default_device()) == before[1:]
    assert transformers.utils.logging.get_verbosity() == verbosity


def test_vectors_keep_their_centre_and_no_value_is_idle() -> None:
    model = load("distilgpt2", layers=1).model
    block = model.transformer.h[0]
    assert block.ln_1.weight.mean().item() == pytest.approx(1, abs=0.01)
    assert block.ln_1.weight.std().item() == pytest.approx(0.02, rel=0.2)
    assert block.ln_1.bias.mean().item() == pytest.approx(0, abs=0.01)
    assert block.mlp.c_fc.bias.std().item() == pytest.approx(0.02, rel=0.2)
    assert block.mlp.c_fc.weight.std().item() == pytest.approx(0.02, rel=0.02)


def test_norms_that_add_one_are_centred_on_zero(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "m", model_type="gemma2", architectures=["Gemma2ForCausalLM"], head_dim=8, hidden_size=256)
    weight = load(folder).model.model.norm.weight
    assert weight.mean().item() == pytest.approx(0, abs=0.01)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_rotary_frequencies_are_computed_in_fp32(tmp_path: Path, dtype: str) -> None:
    rotary = load(write_config(tmp_path / "m", head_dim=8, rope_theta=10000.0), dtype=dtype).model.model.rotary_emb
    expected = 10000.0 ** (-torch.arange(0, 8, 2).float() / 8)
    torch.testing.assert_close(rotary.inv_freq, expected)
    assert rotary.inv_freq.dtype == torch.float32


def test_llama3_scaling_reaches_the_frequencies() -> None:
    preset = find_preset("meta-llama/Llama-3.2-1B")
    assert preset is not None
    values = {**preset.config, "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 1}
    values.update(num_key_value_heads=1, num_hidden_layers=1)
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    model = load_module.build_random(
        transformers.AutoModelForCausalLM, config, device=torch.device("cpu"), dtype=torch.float32, seed=0
    )
    plain = 500000.0 ** (-torch.arange(0, 64, 2).float() / 64)
    found = model.model.rotary_emb.inv_freq
    torch.testing.assert_close(found[0], plain[0])
    torch.testing.assert_close(found[-1], plain[-1] / 32)


def test_tied_weights_are_tied_and_counted_once(tmp_path: Path) -> None:
    tied = load(write_config(tmp_path / "tied"))
    untied = load(write_config(tmp_path / "untied", tie_word_embeddings=False))
    assert tied.model.lm_head.weight is tied.model.model.embed_tokens.weight
    assert untied.model.lm_head.weight is not untied.model.model.embed_tokens.weight
    assert untied.record.parameter_count - tied.record.parameter_count == 64 * 16
    assert tied.record.parameter_bytes == 4 * tied.record.parameter_count


def test_t5_and_whisper_stay_tied() -> None:
    t5 = load("t5-small", layers=1).model
    assert t5.lm_head.weight is t5.shared.weight is t5.encoder.embed_tokens.weight
    whisper = load("openai/whisper-tiny", layers=1).model
    assert whisper.proj_out.weight is whisper.model.decoder.embed_tokens.weight


def test_dtypes_of_weights_and_inputs(tmp_path: Path) -> None:
    auto, half = load(write_config(tmp_path / "m")), load(tmp_path / "m", dtype="bf16")
    assert (auto.record.dtype, auto.model.dtype) == ("fp32", torch.float32)
    assert (half.record.dtype, half.model.dtype) == ("bf16", torch.bfloat16)
    assert dict(half.record.inputs)["input_ids"].dtype == "int64"
    assert device_module.resolve_dtype("auto", torch.device("cuda", 0), torch.bfloat16) == torch.bfloat16
    assert device_module.resolve_dtype("auto", torch.device("cuda", 0), torch.float64) == torch.float32


# layers


def test_layers_are_cut_and_both_counts_recorded(tmp_path: Path) -> None:
    cut, whole = load(write_config(tmp_path / "m"), layers=2), load(tmp_path / "m")
    assert (cut.record.layers, cut.record.total_layers, len(cut.model.model.layers)) == (2, 3, 2)
    assert (whole.record.layers, whole.record.total_layers) == (None, 3)
    assert load(tmp_path / "m", layers=3).record.layers is None


def test_per_layer_lists_are_cut_with_the_layers() -> None:
    preset = find_preset("google/gemma-2-2b")
    assert preset is not None
    values = dict(preset.config)
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    cut = cut_layers(config, 3, model_id="g")
    assert (cut.num_hidden_layers, len(cut.layer_types)) == (3, 3)
    assert (config.num_hidden_layers, len(config.layer_types)) == (26, 26)


def test_both_towers_and_both_sides_are_cut() -> None:
    clip = load("openai/clip-vit-base-patch32", layers=1).model
    assert len(clip.text_model.encoder.layers) == len(clip.vision_model.encoder.layers) == 1
    t5 = load("t5-small", layers=2).model
    assert len(t5.encoder.block) == len(t5.decoder.block) == 2


def test_more_layers_than_there_are_is_a_usage_error() -> None:
    error = fails(UsageError, "FA001", 2, "distilgpt2", layers=7)
    assert str(error) == "--layers 7: `distilgpt2` has 6"


# directories


def test_local_weights_are_loaded(checkpoint: Path) -> None:
    workload = load(checkpoint)
    expected = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    assert workload.record.weights == "local"
    assert workload.notes == ()
    assert torch.equal(workload.model.lm_head.weight, expected.lm_head.weight.float())


def test_local_weights_can_be_cut_and_replaced(checkpoint: Path) -> None:
    assert len(load(checkpoint, layers=1).model.model.layers) == 1
    assert load(checkpoint, weights="random").record.weights == "random"
    fails(MissingWeights, "FA105", 4, checkpoint, weights="hub")


def test_a_directory_without_weights_says_so(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "m")
    workload = load(folder)
    assert workload.record.weights == "random"
    assert workload.notes == ("random weights: m/ holds no safetensors or bin file",)
    assert "m/ holds no" in str(fails(MissingWeights, "FA105", 4, folder, weights="local"))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    assert load(folder).notes == ("random weights: m/ lacks model-1.safetensors",)


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        (None, "it has no config.json"),
        ("{", "config.json is unreadable"),
        ("[1]", "names no model_type"),
        ("{}", "names no model_type"),
        ('{"model_type": "llama", "num_hidden_layers": "many"}', "config.json is refused by transformers"),
    ],
)
def test_broken_directories(tmp_path: Path, text: str | None, detail: str) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    if text is not None:
        (folder / "config.json").write_text(text)
    error = fails(BrokenModelDirectory, "FA104", 4, folder)
    assert detail in str(error)
    assert "save_pretrained" in error.hint_text


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    assert "it is a file" in str(fails(BrokenModelDirectory, "FA104", 4, tmp_path / "model.safetensors"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("raise SystemExit\ndef make(): ...\ndef _own(): ...\ndef helper(x): ...", "no function is named; it has `make`"),
        ("x = 1", "it has none that takes no arguments"),
        ("def (", "no function is named"),
    ],
    ids=["with functions", "without", "not Python"],
)
def test_a_python_file_without_a_function_is_answered_with_those_that_it_has(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "model.py").write_text(text)
    assert words in str(fails(BadFactory, "FA305", 2, tmp_path / "model.py"))


def test_corrupt_weights_are_named(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_bytes(b"no tensors")
    fails(MissingWeights, "FA105", 4, checkpoint)


def test_an_architecture_that_transformers_lacks(tmp_path: Path) -> None:
    error = fails(UnknownArchitecture, "FA106", 4, write_config(tmp_path / "m", model_type="brandnew"))
    assert f"transformers {transformers.__version__} has no model class" in str(error)


# remote code


REMOTE = """
from pathlib import Path
Path(r"{marker}").touch()
from transformers import PretrainedConfig
class OddConfig(PretrainedConfig):
    model_type = "odd"
"""


def remote_directory(tmp_path: Path, **changes: object) -> tuple[Path, Path]:
    marker = tmp_path / "executed"
    auto_map = {"AutoConfig": "configuration_odd.OddConfig", "AutoModelForCausalLM": "configuration_odd.OddModel"}
    folder = write_config(tmp_path / "odd", auto_map=auto_map, **changes)
    (folder / "configuration_odd.py").write_text(REMOTE.format(marker=marker))
    return folder, marker


def test_remote_code_is_refused_and_never_run(tmp_path: Path) -> None:
    folder, marker = remote_directory(tmp_path, model_type="odd")
    error = fails(RemoteCodeRefused, "FA103", 4, folder)
    assert str(error) == f"`{folder}` ships its own Python code; it was not run"
    assert "configuration_odd.OddModel" in error.note_text
    assert error.hint_text == "read it, then pass --trust-remote-code"
    assert not marker.exists()


def test_a_native_class_is_preferred_to_untrusted_code(tmp_path: Path) -> None:
    folder, marker = remote_directory(tmp_path)
    assert type(load(folder).model).__name__ == "LlamaForCausalLM"
    assert not marker.exists()


def test_trusted_code_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder, marker = remote_directory(tmp_path, model_type="odd")
    # The directory ships a configuration only, so the model class is still missing: what matters is that its code ran.
    with pytest.raises((AdvisorError, AttributeError, OSError, ValueError)):
        load(folder, trust_remote_code=True)
    assert marker.exists()


# the Hub


def test_an_unknown_id_offline_suggests_the_nearest_and_says_why() -> None:
    error = fails(UnknownModel, "FA101", 4, "bert-base-uncasd")
    assert "no model `bert-base-uncasd` in the local cache or among the shipped configurations" in str(error)
    assert error.note_text == "the Hub was not asked: offline"
    assert error.hint_text == "did you mean `bert-base-uncased`?   (its configuration is shipped)"
    assert "huggingface.co/models" in fails(UnknownModel, "FA101", 4, "zzz/qqq").hint_text
    fails(UnknownModel, "FA101", 4, "a/b/c")


def test_a_forgotten_organisation_is_found() -> None:
    assert "`Qwen/Qwen2.5-7B`" in fails(UnknownModel, "FA101", 4, "qwen2.5-7B").hint_text


def test_an_unknown_id_online_mentions_private_models(fake_hub: type[FakeHub], monkeypatch: pytest.MonkeyPatch) -> None:
    error = fails(UnknownModel, "FA101", 4, "org/none", offline=False)
    assert str(error) == "no model `org/none` on the Hugging Face Hub, and no such local directory"
    assert error.note_text == "a private model looks the same without a token (HF_TOKEN is not set)"
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    error = fails(UnknownModel, "FA101", 4, "org/none", offline=False)
    assert error.note_text == "a private model looks the same when this token may not read it"


def test_a_gated_model_is_not_an_unknown_one(fake_hub: type[FakeHub]) -> None:
    fake_hub.files["org/gated"] = {}
    fake_hub.gated.add("org/gated")
    error = fails(GatedModel, "FA102", 4, "org/gated", offline=False)
    assert str(error) == "`org/gated` is gated and this token may not read it"
    assert "https://huggingface.co/org/gated" in error.hint_text


def test_a_repository_without_a_configuration_or_revision(fake_hub: type[FakeHub]) -> None:
    fake_hub.files["org/empty"] = {}
    assert "its repository has no config.json" in str(fails(BrokenModelDirectory, "FA104", 4, "org/empty", offline=False))
    error = fails(UsageError, "FA001", 2, "org/empty", offline=False, revision="nope")
    assert "has no such branch" in str(error)


def test_hub_weights_are_fetched_once_and_then_come_from_the_cache(fake_hub: type[FakeHub], checkpoint: Path) -> None:
    names = ("config.json", "model.safetensors")
    fake_hub.files["org/tiny"] = {name: (checkpoint / name).read_bytes() for name in names}
    fetched = load("org/tiny", offline=False)
    assert (fetched.record.weights, fetched.record.revision, fetched.notes) == ("hub", SHA, ())
    fake_hub.asked.clear()
    cached = load("org/tiny", offline=False)
    assert fake_hub.asked == []
    assert (cached.record.weights, cached.record.revision) == ("hub", SHA)
    assert torch.equal(fetched.model.lm_head.weight, cached.model.lm_head.weight)
    assert "`org/tiny`?   (from your local cache)" in fails(UnknownModel, "FA101", 4, "org/tinny").hint_text


def test_an_unreachable_hub_falls_back_to_the_preset(monkeypatch: pytest.MonkeyPatch, fake_hub: type[FakeHub]) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    workload = load("distilgpt2", layers=1, offline=False)
    assert workload.record.weights == "random"
    assert "the Hub was not asked (" in workload.notes[0]
    fails(UnknownModel, "FA101", 4, "org/none", offline=False)


def test_insisting_on_weights_that_are_not_there() -> None:
    assert "the Hub was not asked: offline" in str(fails(MissingWeights, "FA105", 4, "gpt2", weights="hub"))
    error = fails(MissingWeights, "FA105", 4, "gpt2", weights="local")
    assert "the local cache does not hold them" in str(error)
    assert "--weights random" in error.hint_text


# devices and memory


def no_device(name: str, cuda: Cuda) -> NoCudaDevice:
    with pytest.raises(NoCudaDevice) as caught:
        resolve_device(name, cuda)
    return caught.value


def test_no_cuda_device_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_old() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040). Please update.")

    absent = Cuda(built_for=None, is_available=lambda: False, init=too_old)
    error = no_device("cuda", absent)
    assert str(error) == "no CUDA device is visible to PyTorch"
    assert "is a CPU build" in error.note_text
    assert "works without a GPU" in error.hint_text
    absent = replace(absent, built_for="12.8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert 'CUDA_VISIBLE_DEVICES=""' in no_device("cuda:0", absent).note_text
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    note = no_device("cuda", absent).note_text
    assert note == "The NVIDIA driver on your system is too old (found version 11040) (torch is built for CUDA 12.8)"
    assert resolve_device("auto", absent) == resolve_device("cpu", absent) == torch.device("cpu")


def test_a_device_index_that_is_not_there() -> None:
    error = no_device("cuda:5", Cuda(is_available=lambda: True, device_count=lambda: 2))
    assert str(error) == "no CUDA device 5 is visible to PyTorch"
    assert error.note_text == "PyTorch sees 2: cuda:0 to cuda:1"
    fails(NoCudaDevice, "FA201", 3, "gpt2", device="cuda:999")  # on this machine


def test_weights_that_do_not_fit_are_refused_before_they_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "memory_bytes", lambda device: (2**30, 2**31))
    monkeypatch.setattr(device_module, "memory_bytes", lambda device: (2**30, 2**31))
    error = fails(OutOfMemory, "FA301", 5, "Qwen/Qwen2.5-7B")
    assert str(error) == "out of host memory while loading the weights (wanted 28.4 GiB, 1.0 GiB of 2.0 GiB free)"
    assert error.hint_text == "try --dtype bf16 or --layers N for a part of the model"


def test_an_allocation_failure_advises_half(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.10 GiB. GPU 0 has …")

    monkeypatch.setattr(load_module, "make_inputs", fail)
    error = fails(OutOfMemory, "FA301", 5, "distilgpt2", layers=1, batch=8, seq_len=512)
    assert "wanted 2.10 GiB" in str(error)
    assert error.hint_text == "try --batch 4 or --seq-len 256"


# live models


def test_a_live_model_is_described_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.Dropout()).to(torch.bfloat16)
    workload = describe_live(model, (torch.zeros(3, 4, dtype=torch.bfloat16),))
    assert workload.model is model
    assert model.training
    assert "training mode" in workload.notes[0]
    record = workload.record
    assert (record.model_id, record.weights, record.dtype, record.device) == ("Sequential", "user", "bf16", "cpu")
    assert (record.batch, record.seq_len, record.parameter_count) == (3, 0, 10)
    assert [(name, meta.shape) for name, meta in record.inputs] == [("input", (3, 4))]


def test_a_live_language_model_by_keywords(tmp_path: Path) -> None:
    model = load(write_config(tmp_path / "m")).model
    workload = describe_live(model, kwargs={"input_ids": torch.zeros(2, 5, dtype=torch.int64), "use_cache": False})
    assert (workload.record.batch, workload.record.seq_len) == (2, 5)
    assert workload.kwargs["use_cache"] is False
