"""A decode step with a static cache: captured, fused, equal to eager in logits and cache, at every position; and its guards."""

from __future__ import annotations

import functools
import shutil
import warnings

import pytest
import torch

import fusion_advisor
from fusion_advisor.capture.graph.fx_nodes import storages, written_storages
from fusion_advisor.capture.graph.tracer import writes_to_inputs
from fusion_advisor.errors import HalfWritten
from fusion_advisor.fuse.cuda_graph.capturable import saved_inputs
from fusion_advisor.fuse.decide import trial
from fusion_advisor.fuse.live.fused_model import FusedModel
from fusion_advisor.fuse.live.model_check import check_whole_model
from fusion_advisor.fuse.passes.registry import PASSES
from fusion_advisor.fuse.plan.plan import make_plan
from fusion_advisor.fuse.rewrite.graph_rewriter import LayoutChanged
from fusion_advisor.records import Match, Status
from fusion_advisor.runtime.call_tensors import copied
from fusion_advisor.workload.load import describe_live
from fusion_advisor.workload.static_cache import cache_name
from tests.tiny import LAYERS, bench_of, cache_in, decode_step, evaluated, gpt2, llama, patterns, profile_live, qwen2

MODELS = {"llama": llama, "gpt2": gpt2, "qwen2": qwen2}


@functools.cache
def prepared(name):
    """(model, kwargs, live, fused model with every chain and pass in place, plan)."""
    model, _ = MODELS[name]()
    kwargs = decode_step(model)
    capture, live = profile_live(model, (), kwargs)
    plan = make_plan(capture, patterns(), min_share=0.0)
    bench, built = bench_of(live, plan)
    variant = bench.build(built, tuple(PASSES))
    return model, kwargs, live, FusedModel(model, live.regions, variant.modules, (), kwargs), plan


def spoiled(name, spoil=0.5):
    model, kwargs, live, _, plan = prepared(name)
    bench, _ = bench_of(live, plan)
    modules = bench.build([evaluated(bench, fusion, spoil) for fusion in plan.fusions], ()).modules
    return model, kwargs, live, FusedModel(model, live.regions, modules, (), kwargs)


def contents(cache):
    return [tensor.clone() for layer in cache.layers for tensor in (layer.keys, layer.values, layer.cumulative_length)]


@pytest.fixture(params=MODELS)
def decode(request):
    return prepared(request.param)


def test_the_step_is_one_graph_that_writes_to_its_cache(decode):
    model, _, live, _, plan = decode
    assert len(live.regions) == 1 and not live.breaks
    assert writes_to_inputs(live.regions[0])
    cache = cache_name(model)
    names = [name for name in live.regions[0].names if name.startswith(f"{cache}.")]
    assert len(names) == 6 and f"{cache}.layers.1.keys" in names
    kernels = {answer.kernel for answer in plan.answers if isinstance(answer, Match) and answer.is_library}
    assert kernels & {"add_rmsnorm", "add_layernorm"}


@pytest.mark.parametrize("is_fused", [False, True])
def test_only_the_counts_are_saved_for_a_graph_that_is_launched_ahead(decode, is_fused):
    _, _, live, fused, _ = decode
    names = live.regions[0].names
    modules = fused._rewritten.modules if is_fused else [live.regions[0].graph]
    for module in modules:
        saved = [names[slot] for slot in saved_inputs(module)]
        assert saved == [name for name in names if name.endswith("cumulative_length")]
        assert len(saved) == 2


def test_profiling_leaves_the_cache_where_it_was(decode):
    _, kwargs, live, _, _ = decode
    live.written.rewind()
    assert int(cache_in(kwargs).get_seq_length()) == 16
    assert all("cumulative_length" in name for name in live.written.moving) and len(live.written.tensors) == 6


def test_a_repeated_step_is_the_same_step(decode):
    model, kwargs, live, _, _ = decode
    live.written.restore()
    with torch.no_grad():
        first = model(**kwargs).logits
        after = contents(cache_in(kwargs))
        live.written.rewind()
        assert torch.equal(model(**kwargs).logits, first)
    assert all(map(torch.equal, contents(cache_in(kwargs)), after))
    live.written.restore()


def test_logits_and_cache_are_eagers(decode):
    model, kwargs, live, fused, _ = decode
    loaded = describe_live(model, (), kwargs)
    with torch.no_grad():
        check = check_whole_model(loaded, lambda: model(**kwargs), lambda: fused.dispatch(**kwargs), live.written)
    assert check.is_passed and check.oracle == "float64 copy" and fused.fallbacks == {}
    assert {"logits", f"{cache_name(model)}.layers.0.keys", "written values", "written counts"} <= set(check.outputs)
    live.written.restore()


def test_wrong_values_in_the_cache_fail_the_check(decode):
    model, kwargs, live, _, _ = decode

    def meddles():
        result = model(**kwargs)
        cache_in(kwargs).layers[0].values[0, 0, 16, 0] += 0.1
        return result

    def skips():
        result = model(**kwargs)
        cache_in(kwargs).layers[1].cumulative_length.add_(1)
        return result

    loaded = describe_live(model, (), kwargs)
    with torch.no_grad():
        for wrong in (meddles, skips):
            assert not check_whole_model(loaded, lambda: model(**kwargs), wrong, live.written).is_passed
    live.written.restore()


@pytest.mark.parametrize("tokens", [1, 5, 16, 40])
def test_the_position_is_a_value_and_needs_no_graph_of_its_own(decode, tokens):
    """Another cache object, another number of cached tokens, several steps on: the graph that was verified serves them all."""
    model, _, _, fused, _ = decode
    ours, theirs = decode_step(model, tokens), decode_step(model, tokens)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        # Dynamo guards the length of transformers' table of model classes: when another test has made a model it compiles anew.
        fused.dispatch(**decode_step(model))
        chosen = fused._rewritten.handed_over
        for step in range(3):
            got, expected = fused.dispatch(**ours).logits, model(**theirs).logits
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
            ours["input_ids"], theirs["input_ids"] = expected.argmax(-1), expected.argmax(-1)
            assert int(cache_in(ours).get_seq_length()) == tokens + step + 1
    for one, other in zip(contents(cache_in(ours)), contents(cache_in(theirs)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert fused.fallbacks == {} and fused._rewritten.handed_over == chosen


def other_class(model):
    from transformers import StaticCache

    class Mine(StaticCache):
        """The same cache under another name: it may override anything."""

    kwargs = decode_step(model)
    cache_in(kwargs).__class__ = Mine
    return kwargs


def dynamic_cache(model):
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    ids = torch.randint(1, 200, (2, 17), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        model(ids[:, :-1], **{cache_name(model): cache}, use_cache=True)
    return {"input_ids": ids[:, -1:].clone(), cache_name(model): cache, "use_cache": True}


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_rope_and_the_writes_to_the_cache_are_one_launch_in_every_layer(name):
    _, _, live, _, plan = prepared(name)
    (fusion,) = [fusion for fusion in plan.fusions if fusion.match.kernel == "rope_qk_cache"]
    assert len(fusion.sites) == LAYERS
    assert all(len(site.written) == 2 for site in fusion.sites)
    bench, built = bench_of(live, plan)
    module = bench.build(built, tuple(PASSES)).modules[0]
    assert "index_copy_" in live.regions[0].graph.code and "index_copy_" not in module.code
    written = {key for node in module.graph.nodes for key in written_storages(node)}
    caches = [node for node, name in zip(live.regions[0].graph.graph.nodes, live.regions[0].names, strict=False)
              if name.endswith((".keys", ".values"))]  # fmt: skip
    assert len(caches) == 2 * LAYERS and all(written.issuperset(storages(node)) for node in caches)


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler")
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_tokens_and_the_cache_s_bytes_are_eagers_at_every_position(name, tmp_path):
    model, kwargs, live, _, plan = prepared(name)
    bench, _ = bench_of(live, plan)
    planned = [fusion for fusion in plan.fusions if fusion.match.kernel == "rope_qk_cache"]
    built = [
        trial.try_fusion(bench, fusion, backend="cpp", fast_math=False, kernel_dir=tmp_path, seed=1, is_timed=False).built
        for fusion in planned
    ]
    fused, plain = (FusedModel(model, live.regions, bench.build(some, ()).modules, (), kwargs) for some in (built, []))
    ours, captured, eager = (decode_step(model, 1) for _ in range(3))
    with torch.no_grad():
        for _ in range(63):  # to the cache's last position
            got, same, expected = fused.dispatch(**ours).logits, plain.dispatch(**captured).logits, model(**eager).logits
            assert torch.equal(got, same) and torch.equal(got.argmax(-1), expected.argmax(-1))
            for step in (ours, captured, eager):
                step["input_ids"] = expected.argmax(-1)
    assert fused.fallbacks == {} and int(cache_in(ours).get_seq_length()) == 64
    assert all(map(torch.equal, contents(cache_in(ours)), contents(cache_in(captured))))
    # Behind the first layer the captured step itself is a last bit away from eager.
    assert all(map(torch.equal, contents(cache_in(ours))[:3], contents(cache_in(eager))[:3]))
    live.written.restore()


OTHER = {
    "class": other_class,
    "dynamic": dynamic_cache,
    "room": lambda model: decode_step(model, room=48),
    "batch": lambda model: decode_step(model, batch=1),
    "two tokens": lambda model: {**decode_step(model), "input_ids": torch.tensor([[5, 6], [7, 8]])},
}


@pytest.mark.parametrize("other", OTHER)
def test_another_cache_runs_the_original_ops(other):
    model, _, _, fused = spoiled("qwen2")
    ours, theirs = OTHER[other](model), OTHER[other](model)
    with torch.no_grad(), pytest.warns(UserWarning, match="not verified"):
        assert torch.equal(fused.dispatch(**ours).logits, model(**theirs).logits)


def test_the_verified_cache_runs_the_fused_ops():
    model, _, _, fused = spoiled("qwen2")
    with torch.no_grad():
        got, expected = fused.dispatch(**decode_step(model)).logits, model(**decode_step(model)).logits
    assert not torch.allclose(got, expected, atol=0.01) and fused.fallbacks == {}


def test_a_layout_that_changes_after_the_cache_was_written_is_an_error_and_then_the_original_runs():
    model, kwargs, live, fused = spoiled("gpt2")
    assert [call.sharing is not None for call in fused._verified.values()] == [True]

    def surprised(**_):
        raise LayoutChanged("fa_k: expected (2, 1, 64)")

    fused._compiled = surprised
    with torch.no_grad(), pytest.raises(HalfWritten, match="reset the cache"):
        fused.dispatch(**kwargs)
    live.written.restore()
    with torch.no_grad(), pytest.warns(UserWarning, match="laid out differently"):
        got = fused.dispatch(**kwargs).logits
    live.written.restore()
    with torch.no_grad():
        assert torch.equal(got, model(**kwargs).logits)
    live.written.restore()


def test_a_count_in_python_is_part_of_what_was_verified():
    """A sliding window decides in Python whether it is full: the verified position is one call, every other another."""
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(
        num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=200, max_position_embeddings=64, sliding_window=8, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = MistralForCausalLM(config).eval()
    for tokens in (4, 20):  # before and after the window is full: written in place, and rolled
        kwargs = decode_step(model, tokens)
        capture, live = profile_live(model, (), kwargs)
        assert live.written.attributes
        bench, built = bench_of(live, make_plan(capture, patterns(), min_share=0.0))
        fused = FusedModel(model, live.regions, bench.build(built, ()).modules, (), kwargs)
        loaded = describe_live(model, (), kwargs)
        with torch.no_grad():
            check = check_whole_model(loaded, lambda: model(**kwargs), lambda: fused.dispatch(**kwargs), live.written)  # noqa: B023
        assert check.is_passed and fused.fallbacks == {}
        ours, theirs = decode_step(model, tokens + 1), decode_step(model, tokens + 1)
        with torch.no_grad(), pytest.warns(UserWarning, match="not verified"):
            assert torch.equal(fused.dispatch(**ours).logits, model(**theirs).logits)


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler")
def test_apply_puts_the_cache_back_as_it_was_and_a_saved_plan_goes_in_again(tmp_path):
    model, _ = qwen2()
    kwargs = decode_step(model)
    before = contents(cache_in(kwargs))
    with torch.no_grad():
        expected = model(**decode_step(model)).logits
    later, latest = decode_step(model), decode_step(model)
    fused = fusion_advisor.apply(model, kwargs, run_dir=tmp_path, runs=3, warmup=1, min_share=0.0, compile=False, keep="verified")
    assert fused.is_applied
    assert all(map(torch.equal, contents(cache_in(kwargs)), before))
    assert "rope_qk_cache" in {fusion.kernel for fusion in fused.report.fusions if fusion.status is Status.KEPT}
    assert fused.report.model_check.is_passed and "written values" in fused.report.model_check.outputs
    assert any("put back" in note for note in fused.report.notes)
    with torch.no_grad(), fused:
        torch.testing.assert_close(model(**later).logits, expected, rtol=1e-5, atol=1e-5)
    again = fusion_advisor.apply(model, kwargs, plan=fusion_advisor.load_plan(tmp_path))
    assert all(map(torch.equal, contents(cache_in(kwargs)), before))
    with torch.no_grad(), again:
        torch.testing.assert_close(model(**latest).logits, expected, rtol=1e-5, atol=1e-5)
    assert again.fallbacks == {}
    profiled = fusion_advisor.profile(model, kwargs, runs=3, warmup=1)
    assert profiled.chains and all(map(torch.equal, contents(cache_in(kwargs)), before))


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_decode_on_a_gpu_keeps_logits_and_cache(name):
    """Recorded into CUDA graphs, replayed hundreds of times: the position must not have moved past the cache's end."""
    model, _ = MODELS[name]()
    kwargs, later, latest = (copied(decode_step(model), _on_gpu) for _ in range(3))
    model = model.cuda()
    before = contents(cache_in(kwargs))
    with torch.no_grad():
        expected = model(**later).logits
    options = {"runs": 5, "warmup": 2, "min_share": 0.0, "min_gain": 0.0, "confidence": 0.51, "compile": False}
    fused = fusion_advisor.apply(model, kwargs, **options)
    assert all(map(torch.equal, contents(cache_in(kwargs)), before))
    assert fused.report.model_check is None or fused.report.model_check.is_passed
    with torch.no_grad(), fused:
        torch.testing.assert_close(model(**latest).logits, expected, rtol=1e-4, atol=1e-4)


def _on_gpu(leaf):
    if isinstance(leaf, torch.Tensor):
        return leaf.cuda()
    return torch.device("cuda") if isinstance(leaf, torch.device) else leaf
