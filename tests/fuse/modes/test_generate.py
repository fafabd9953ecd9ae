"""``generate``: two regimes in one fused model, tokens that are eager's own, and where they part when they are not."""

from __future__ import annotations

import gc
import shutil
import warnings
import weakref
from dataclasses import replace

import pytest
import torch

from fusion_advisor.capture.graph.tracer import capture_regions
from fusion_advisor.fuse.cuda_graph.recording import CudaRecorder
from fusion_advisor.fuse.cuda_graph.replay import Graphs
from fusion_advisor.fuse.decide.session import Bench
from fusion_advisor.fuse.live.fused_model import FusedModel
from fusion_advisor.fuse.live.restore_plan import apply_plan
from fusion_advisor.fuse.live.saved_plan import load_plan
from fusion_advisor.fuse.modes import generate
from fusion_advisor.fuse.passes.registry import PASSES
from fusion_advisor.fuse.plan.options import ApplyOptions, ProfileOptions
from fusion_advisor.records import Status
from fusion_advisor.records.serialize import write_capture, write_report
from fusion_advisor.workload.generate import Generation
from fusion_advisor.workload.load import LoadedWorkload, describe_live
from tests.fuse.cuda_graph.fake_graph import FakeRecorder
from tests.fuse.cuda_graph.test_replay import graphed_model
from tests.fuse.start.saved import frames
from tests.tiny import cache_in, decode_step, fuse, gpt2, llama, qwen2

MODELS = {"llama": llama, "gpt2": gpt2, "qwen2": qwen2}
NEW = 6


def call_of(name):
    model, inputs = MODELS[name]()
    return Generation(model=model, input_ids=inputs["input_ids"], new_tokens=NEW)


def loaded_generation(name):
    call = call_of(name)
    described = describe_live(call.model, (), {"input_ids": call.input_ids})
    record = replace(described.record, phase="generate", new_tokens=NEW)
    return LoadedWorkload(
        model=call.model, args=(), kwargs=described.kwargs, record=record, request=described.request, generation=call
    )


def both(call, spoil=0.0):
    """A fused model that holds the prefill and the decode step of a generation."""
    prefill, decode = call.steps()
    fused = fuse(call.model, (), decode, spoil=spoil)
    fused.include(fuse(call.model, (), prefill, spoil=spoil))
    return fused


def test_the_steps_are_generates_own_each_with_its_cache():
    prefill, decode = call_of("qwen2").steps()
    assert prefill["input_ids"].shape == (2, 16) and decode["input_ids"].shape == (2, 1)
    assert cache_in(prefill) is not cache_in(decode)
    assert int(cache_in(prefill).get_seq_length()) == 0
    assert int(cache_in(decode).get_seq_length()) == 16


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_fused_tokens_are_eagers_and_every_step_was_fused(name):
    call = call_of(name)
    expected = call()
    with both(call) as fused, warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        found = call()
        again = call()
    assert torch.equal(found.sequences, expected.sequences) and torch.equal(again.sequences, expected.sequences)
    for ours, theirs in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert fused.fallbacks == {} and [call.is_in_place for call in fused._verified.values()] == [True, True]


def test_a_prompt_of_another_length_is_prefilled_by_the_original_and_decoded_fused():
    call = call_of("qwen2")
    other = replace(call, input_ids=call.input_ids[:, :15], new_tokens=NEW + 1)  # the same room in the cache
    expected = other().sequences
    with both(call) as fused:
        with pytest.warns(UserWarning, match="not verified"):
            assert torch.equal(other().sequences, expected)
        assert sum(fused.fallbacks.values()) == 1


def test_transformers_own_compile_still_runs_the_fused_graphs():
    """On a GPU generate compiles the decode step by itself; dynamo must not look through the fused call."""
    from transformers import CompileConfig

    call = call_of("qwen2")
    config = CompileConfig(backend="eager", mode=None, fullgraph=False)
    config._compile_all_devices = True
    options = {
        "attention_mask": torch.ones_like(call.input_ids),
        "max_new_tokens": NEW,
        "min_new_tokens": NEW,
        "do_sample": False,
    }
    with both(call, spoil=0.5) as fused:
        spoiled = call().sequences
        found = call.model.generate(
            call.input_ids, **options, cache_implementation="static", compile_config=config, pad_token_id=0
        )
    assert torch.equal(found, spoiled) and fused.fallbacks == {}
    assert not torch.equal(found, call().sequences)


def replayed(call, decode, monkeypatch):
    """A model that replays its decode step on a fake device, the recorder, and the caches that were passed."""
    seen = []

    class Recorder(FakeRecorder):
        def record(self, call):
            self.protected = tensors_of(seen[-1])
            return super().record(call)

    recorder = Recorder()
    fused = graphed_model(call.model, (), decode, recorder)
    fused.revert()
    dispatch = fused.dispatch

    def watched(**kwargs):
        seen.append(cache_in(kwargs))
        return dispatch(**kwargs)

    monkeypatch.setattr(fused, "dispatch", watched)
    return fused, recorder, seen


def tensors_of(cache):
    held = [(layer.keys, layer.values, layer.cumulative_length) for layer in cache.layers]
    return tuple(tensor for tensors in held for tensor in tensors if tensor is not None)


def test_a_decode_step_is_recorded_once_and_replayed_for_every_token(monkeypatch):
    call = call_of("qwen2")
    expected = call().sequences
    _, decode = call.steps()
    fused, recorder, seen = replayed(call, decode, monkeypatch)
    with fused, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the prefill is not verified here
        assert torch.equal(call().sequences, expected)
        # The first decode step runs launch by launch, the second is recorded; the prefill made the first token.
        assert (recorder.recorded, recorder.replayed) == (1, NEW - 2)
        (recording,) = fused.graphs.recordings
        # A finished call's cache is freed.
        assert {type(reference) for reference in (*recording.read, *recording.watched)} == {weakref.ref}
        held = [*(copy.static for copy in recording.copies), *(memory.tensor for memory in recording.memories)]
        assert not {*map(id, held)} & {*map(id, tensors_of(seen[-1]))}
        # Another call brings another cache: recorded once more, at its first step, and dynamo traces nothing anew.
        chosen = fused._rewritten.handed_over
        assert torch.equal(call().sequences, expected)
        assert (recorder.recorded, recorder.replayed, fused._rewritten.handed_over) == (2, 2 * NEW - 3, chosen)
        assert len(fused.graphs.recordings) == 1 and fused.graphs.refusals == {}


def test_calls_that_pass_one_cache_replay_one_recording(monkeypatch):
    """Where the addresses are the same, nothing is recorded again, whatever the position."""
    call = call_of("qwen2")
    _, decode = call.steps()
    fused, recorder, _ = replayed(call, decode, monkeypatch)
    given = {name: value for name, value in decode.items() if name != "input_ids"}
    cache = cache_in(given)
    filled = [tensor.clone() for tensor in tensors_of(cache)]

    def tokens(step):
        for tensor, value in zip(tensors_of(cache), filled, strict=True):
            tensor.copy_(value)
        given["position_ids"].fill_(16)
        found = []
        token = decode["input_ids"]
        for _ in range(4):
            token = step(input_ids=token, **given).logits[:, -1:].argmax(-1)
            given["position_ids"] += 1
            found.append(token)
        return torch.cat(found, 1)

    with torch.no_grad():
        expected = tokens(call.model)
        with fused:
            for _ in range(3):
                assert torch.equal(tokens(fused), expected)
    assert (recorder.recorded, recorder.replayed) == (1, 11)


def logits_of(*rows):
    return tuple(torch.tensor(row, dtype=torch.float32) for row in rows)


def test_first_divergence_and_its_gap():
    eager = torch.tensor([[9, 9, 1, 2, 0], [9, 9, 0, 1, 1]])
    fused = torch.tensor([[9, 9, 1, 0, 2], [9, 9, 0, 1, 2]])
    logits = logits_of([[0, 1, 0], [1, 0, 0]], [[2.5, 0, 3], [0, 4, 1]], [[1, 0, 0], [0, 1, 0]])
    assert generate.first_divergence(eager, fused, logits, 2) == (1, 0.5)
    assert generate.first_divergence(eager, eager, logits, 2) is None


def quick(**more):
    return ApplyOptions(runs=3, warmup=1, min_share=0.0, **more)


def kept_by(monkeypatch, spoil):
    """Let both regimes keep every chain, computed by the evaluator, off by ``spoil``; timing is not what is tested here."""

    def apply_workload(loaded, options, progress=None, on_report=lambda _: None, started=None):
        profiled, capture = generate.pipeline.profile_workload(loaded, ProfileOptions(runs=3, warmup=1, min_share=0.0))
        fused = fuse(loaded.model, (), loaded.kwargs, spoil=spoil)
        fused.apply()
        report = replace(profiled, status="applied", after=replace(profiled.before, label="fused"))
        return generate.AppliedRun(fused=fused, report=report, capture=capture)

    monkeypatch.setattr(generate.pipeline, "apply_workload", apply_workload)


@pytest.mark.slow
def test_apply_holds_both_regimes_and_reports_the_tokens(monkeypatch):
    loaded = loaded_generation("qwen2")
    kept_by(monkeypatch, 0.0)
    run = generate.apply_generate(loaded, quick())
    try:
        check = run.report.generation
        assert check.is_same and check.original_calls == 0 and check.logit_gap is None
        assert check.prefill_after_ns and check.decode_after_ns and check.after is not None
        assert run.fused.is_applied and len(run.fused._verified) == 2
        assert run.report.workload.phase == "generate" and run.report.workload.new_tokens == NEW
        name, part, _ = run.parts[0]
        assert (name, part.workload.phase, part.workload.new_tokens) == ("prefill", "prefill", 0)
    finally:
        run.revert()
    assert "_compiled_call_impl" not in loaded.model.__dict__


@pytest.mark.slow
def test_other_tokens_in_fp32_revert_everything(monkeypatch):
    loaded = loaded_generation("qwen2")
    kept_by(monkeypatch, 0.5)
    run = generate.apply_generate(loaded, quick())
    check = run.report.generation
    assert not check.is_same and check.first_divergence is not None and check.logit_gap > 0
    assert not run.fused.is_applied and "_compiled_call_impl" not in loaded.model.__dict__
    assert any("differs from eager's" in warning for warning in run.report.warnings)
    assert all(fusion.status is not Status.KEPT for fusion in run.report.fusions)


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler")
def test_the_whole_loop_on_a_real_backend(tmp_path):
    """Nothing stands in: kernels are built, timed and kept or not, and the tokens are eager's."""
    loaded = loaded_generation("llama")
    expected = loaded.generation().sequences
    run = generate.apply_generate(loaded, quick(run_dir=tmp_path))
    try:
        assert torch.equal(loaded.generation().sequences, expected)
        assert run.report.generation.is_same
    finally:
        run.revert()
    assert (tmp_path / "prefill").is_dir()


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler")
def test_saved_steps_start_without_a_trace(tmp_path):
    run = generate.apply_generate(loaded_generation("gpt2"), quick(keep="verified"))
    (tmp_path / "prefill").mkdir()
    for name, report, capture in (("", run.report, run.capture), *run.parts):
        write_capture(capture, tmp_path / name / "capture.json.gz")
        write_report(report, tmp_path / name / "report.json")
    assert run.write_start(tmp_path) == ""
    run.revert()
    loaded, before = loaded_generation("gpt2"), frames()
    prefill, decode = generate._regimes(loaded, loaded.generation)
    # The prefill's call makes the tensors of the cache that it is given.
    for step, folder in ((prefill, tmp_path / "prefill"), (decode, tmp_path)):
        with torch.no_grad(), apply_plan(step, load_plan(folder)) as fused:
            fused(**step.kwargs)
            assert fused.traced_because == "" and frames() == before and fused.fallbacks == {} and fused.launches > 0


def test_profile_measures_both_steps_and_the_whole_call():
    (report, _), (prefill, _) = generate.profile_generate(loaded_generation("gpt2"), ProfileOptions(runs=3, warmup=1))
    check = report.generation
    assert check.before.median_ns > check.prefill_before_ns > 0 and check.decode_before_ns > 0 and check.after is None
    assert report.workload.phase == "generate" and prefill.workload.phase == "prefill"


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_generate_on_a_gpu_in_fp32_gives_eagers_tokens(name):
    model, inputs = MODELS[name]()
    call = Generation(model=model.cuda(), input_ids=inputs["input_ids"].cuda(), new_tokens=NEW)
    expected = call().sequences
    described = describe_live(call.model, (), {"input_ids": call.input_ids})
    loaded = replace(described, record=replace(described.record, phase="generate", new_tokens=NEW), generation=call)
    run = generate.apply_generate(
        loaded, ApplyOptions(runs=5, warmup=2, min_share=0.0, min_gain=0.0, confidence=0.51, compile=False)
    )
    try:
        assert run.report.generation.is_same and torch.equal(call().sequences, expected)
    finally:
        run.revert()


@pytest.mark.gpu
def test_the_cache_of_a_finished_call_is_freed_on_a_gpu():
    """And where the allocator then gives the next call the same addresses, nothing is recorded again."""
    model, inputs = qwen2()
    call = Generation(model=model.cuda(), input_ids=inputs["input_ids"].cuda(), new_tokens=NEW)
    expected = call().sequences
    _, decode = call.steps()
    live = capture_regions(call.model, (), decode)
    graphs = Graphs(CudaRecorder())
    variant = Bench(live, on_cuda=True).build((), tuple(PASSES))
    live.written.restore()
    with FusedModel(call.model, live.regions, variant.modules, (), decode, graphs=graphs), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(4):
            result = call()
            assert torch.equal(result.sequences, expected)
            keys = weakref.ref(cache_in(result).layers[0].keys)
            (recording,) = graphs.recordings
            assert recording.replays >= NEW - 2
            del result
            gc.collect()
            assert keys() is None
    assert graphs.refusals == {}


def test_a_forward_that_names_no_use_cache_has_a_cache_too():
    from transformers import GraniteMoeConfig, GraniteMoeForCausalLM

    config = GraniteMoeConfig(
        num_hidden_layers=1, hidden_size=32, intermediate_size=32, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=2, num_experts_per_tok=1, vocab_size=200, max_position_embeddings=64, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GraniteMoeForCausalLM(config).eval()
    _, decode = Generation(model=model, input_ids=torch.randint(1, 200, (1, 8)), new_tokens=3).steps()
    assert int(cache_in(decode).get_seq_length()) == 8
    assert int(cache_in(decode_step(model)).get_seq_length()) == 16
