"""``fa.apply(model, inputs, phase="train")``: the live module trains as before, and what was not verified runs its own ops."""

from __future__ import annotations

import contextlib
import copy
import gc
import re
import warnings
import weakref

import pytest
import torch
import transformers
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import CausalLMOutput

import fusion_advisor as fa
from fusion_advisor.errors import CannotCopy
from fusion_advisor.fuse.plan.options import Budgets
from fusion_advisor.fuse.slot.in_place import TRANSFORMED
from fusion_advisor.fuse.train import trained_model
from fusion_advisor.runtime.torch_internals import dynamo
from tests.fuse.live.test_leaks import live_storages
from tests.fuse.train.test_models import MODELS, batch
from tests.fuse.train.test_trained_graph import WIDTH, Block, Repeated, gradients, step
from tests.tiny import BANDWIDTH

OPTIONS = {
    "phase": "train", "keep": "verified", "compile": False, "min_share": 0.0, "bandwidth": BANDWIDTH, "warmup": 1, "runs": 3,
    "steps": 1, "budgets": Budgets(wall_s=0.05),
}  # fmt: skip


def applied(model, inputs, **more):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="fusion-advisor runs the original ops")
        return fa.apply(model, inputs, **{**OPTIONS, **more})


def compare(ours, theirs, *, rtol=2e-5, atol=2e-6):
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=rtol, atol=atol, msg=lambda said, name=name: f"{name}: {said}")


@pytest.fixture(scope="module")
def x():
    return torch.randn(8, 5, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def shared(x):
    """A fused block, and its twin with its own ops."""
    torch.manual_seed(0)
    model = Block().train()
    plain = copy.deepcopy(model)
    yield applied(model, (x,)), plain
    torch.compiler.reset()


@pytest.fixture
def pair(shared):
    fused, plain = shared
    for one in (fused.model, plain):
        one.train()
        one.zero_grad(set_to_none=True)
    fused.fallbacks.clear()
    fused.revert()
    return fused.apply(), plain


def test_kernels_of_both_passes_run_and_are_counted(pair, x):
    fused, plain = pair
    assert torch.allclose(step(fused.model, x), step(plain, x))
    compare(gradients(fused.model), gradients(plain))
    kept = [fusion for fusion in fused.report.fusions if fusion.status.value == "kept"]
    by_pass = {
        name: sum(one.receipt.launches_after for one in kept if one.training_pass == name) for name in ("forward", "backward")
    }
    assert by_pass["forward"] > 0 and by_pass["backward"] > 0
    assert fused.launches == sum(by_pass.values()) and not fused.fallbacks
    step(fused.model, x)
    assert fused.launches == 2 * sum(by_pass.values())


def test_gradients_add_up_and_a_backward_pass_may_run_twice(pair, x):
    fused, plain = pair
    for one in (fused.model, plain):
        step(one, x)
        loss = one(2 * x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
    compare(gradients(fused.model), gradients(plain))


def doubled(weight):
    weight.grad.mul_(2)


def test_hooks_on_gradients_and_a_scaled_loss(pair, x):
    fused, plain = pair
    seen, handles = {}, []
    for name, one in (("ours", fused.model), ("theirs", plain)):
        handles.append(one.gain.register_hook(lambda gradient, name=name: seen.setdefault(name, gradient.clone()) * 0.5))
        handles.append(one.down.weight.register_post_accumulate_grad_hook(doubled))
        scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD(one.parameters(), lr=0.0)
        scaler.scale(one(x).square().mean()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(one.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
    for handle in handles:
        handle.remove()
    torch.testing.assert_close(seen["ours"], seen["theirs"], rtol=2e-5, atol=2e-2)  # scaled by 65,536
    compare(gradients(fused.model), gradients(plain))
    assert not fused.fallbacks


def test_a_checkpoint_around_the_model_runs_it_again(pair, x):
    fused, plain = pair
    before = fused.launches
    for one in (fused.model, plain):
        checkpoint(one, x, use_reentrant=False).square().mean().backward()
    compare(gradients(fused.model), gradients(plain))
    assert fused.launches > before and not fused.fallbacks


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("eval", trained_model.EVALUATED), ("no gradients", trained_model.NO_GRADIENTS), ("shape", trained_model.UNSEEN),
        ("autocast", trained_model.AUTOCAST),
    ],
)  # fmt: skip
def test_other_calls_run_the_original_ops_and_say_so_once(pair, x, change, reason):
    fused, plain = pair
    if change == "eval":
        fused.model.eval()
        plain.eval()
    given = x[:3] if change == "shape" else x
    with torch.set_grad_enabled(change != "no gradients"), torch.autocast("cpu", enabled=change == "autocast"):
        with pytest.warns(UserWarning, match="fusion-advisor runs the original ops") as said:
            assert torch.equal(fused.model(given), plain(given))
        assert reason in str(said[0].message)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fused.model(given)
    assert fused.fallbacks == {reason: 2} and fused.launches == 0
    if change == "shape":
        assert "input 0 is [3, 5, 48] float32, and [8, 5, 48] float32 was verified" in str(said[0].message)
    fused.model.train()
    step(fused.model, x)
    assert fused.launches > 0


def _tangent(model, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x)))).tangent.clone()


def _gradient(model, x):
    return torch.func.grad(lambda given: model(given).sum())(x)


@pytest.mark.parametrize("derivative", [_tangent, _gradient])
def test_derivatives_of_other_kinds_are_the_original_ops(pair, x, derivative):
    fused, plain = pair
    with pytest.warns(UserWarning, match=re.escape(TRANSFORMED)):
        assert torch.equal(derivative(fused.model, x), derivative(plain, x))
    assert list(fused.fallbacks) == [TRANSFORMED]
    step(fused.model, x)
    assert fused.launches > 0


def test_a_weight_that_is_frozen_later_gets_no_gradient(pair, x):
    """Dynamo compiles another graph, which runs the model's own ops; before torch 2.12 it does not look at weights of modules."""
    fused, plain = pair
    for one in (fused.model, plain):
        one.gate.requires_grad_(False)
    try:
        said = f"{trained_model.OTHER_GRAPH}: its guard failed, `tensor 'self.gate."
        is_seen = pytest.warns(UserWarning, match=re.escape(said))
        with is_seen if dynamo.isolates() else contextlib.nullcontext():
            step(fused.model, x)
        step(fused.model, x)
        for _ in range(2):
            step(plain, x)
        assert fused.fallbacks == ({trained_model.OTHER_GRAPH: 2} if dynamo.isolates() else {})
        assert (fused.launches == 0) == dynamo.isolates() and fused.model.gate.weight.grad is None
        compare(gradients(fused.model), gradients(plain))
    finally:
        for one in (fused.model, plain):
            one.gate.requires_grad_(True)


def tripled(gradients):
    return tuple(None if one is None else 3 * one for one in gradients)


HOOKS = {
    "forward": lambda part: part.register_forward_hook(lambda _part, _given, output: 3 * output),
    "ahead": lambda part: part.register_forward_pre_hook(lambda _part, given: (3 * given[0],)),
    "backward": lambda part: part.register_full_backward_hook(lambda _part, mine, _given: tripled(mine)),
    "ahead of backward": lambda part: part.register_full_backward_pre_hook(lambda _part, given: tripled(given)),
    "of all modules": lambda _: torch.nn.modules.module.register_module_full_backward_hook(
        lambda _part, mine, _given: tripled(mine)
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_on_a_module_that_is_added_later_is_seen(pair, x, kind):
    fused, plain = pair
    handles = [HOOKS[kind](one.down) for one in (fused.model, plain)]
    try:
        with pytest.warns(UserWarning, match="a hook was added or removed"):
            step(fused.model, x)
        step(plain, x)
    finally:
        for handle in handles:
            handle.remove()
    compare(gradients(fused.model), gradients(plain))
    assert fused.launches == 0
    step(fused.model, x)
    assert fused.launches > 0


def test_a_graph_that_was_not_verified_drops_the_same_in_both_passes_under_a_checkpoint(x):
    """Run as dynamo captured it, it would draw a dropout's numbers again in the backward pass, other ones."""
    torch.manual_seed(0)
    model = Repeated(is_checkpointed=True, dropout=0.4).train()
    plain = copy.deepcopy(model)
    fused = applied(model, (x,))
    for one in (model, plain):
        one.block.down = nn.Sequential(one.block.down, nn.Tanh())
    warned = False
    for seed in (1, 2):
        for one in (model, plain):
            torch.manual_seed(seed)
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                step(one, x)
            warned |= any("original ops" in str(one.message) for one in said)
    assert warned and fused.fallbacks and fused.launches == 0
    compare(gradients(model), gradients(plain))
    torch.compiler.reset()


def test_revert_puts_back_the_call_exactly_and_a_copy_is_refused(x):
    torch.manual_seed(0)
    model = Block()
    model.gain.grad = gradient = torch.ones(WIDTH)
    before, state, random = dict(model.__dict__), {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    model.eval()
    model.down.train()
    with applied(model, (x,)) as fused:
        assert "_compiled_call_impl" in model.__dict__ and fused.is_applied
        with pytest.raises(CannotCopy):
            copy.deepcopy(fused)
        twin = copy.deepcopy(model)
    assert "_compiled_call_impl" not in twin.__dict__
    model.training = before["training"]
    assert model.__dict__.keys() == before.keys() and all(model.__dict__[key] is before[key] for key in before)
    assert model.down.training and not model.gate.training and model.gain.grad is gradient
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert model.gate.weight.grad is None


def test_steps_keep_no_memory_and_a_reverted_model_is_freed(x):
    torch.manual_seed(0)
    model = Block().train()
    fused, sizes = applied(model, (x,)), []
    for count in (3, 10):
        for _ in range(count):
            step(model, x.clone())
        sizes.append(live_storages())
    assert sizes[0] == sizes[1]
    fused.revert()
    weight = weakref.ref(model.gate.weight)
    del fused, model
    torch.compiler.reset()
    gc.collect()
    assert weight() is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_around_apply_is_what_is_verified(dtype, x):
    torch.manual_seed(0)
    model = Block().train()
    plain = copy.deepcopy(model)
    with torch.autocast("cpu", dtype=dtype):
        fused = applied(model, (x,))
        ours, theirs = model(x).square().mean(), plain(x).square().mean()
    ours.backward()
    theirs.backward()
    assert fused.launches > 0 and not fused.fallbacks
    compare(gradients(model), gradients(plain), rtol=0.05, atol=2e-3)


def test_a_second_apply_takes_out_the_first(x):
    torch.manual_seed(0)
    model = Block().train()
    first = applied(model, (x,))
    second = applied(model, (x[:4],))
    assert second.is_applied and not first.is_applied
    step(model, x[:4])
    assert second.launches > 0 and first.launches == 0
    second.revert()
    assert "_compiled_call_impl" not in model.__dict__


class Lora(nn.Module):
    """A frozen linear and two small matrices that are trained."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Parameter(0.1 * torch.randn(4, base.in_features)), nn.Parameter(torch.zeros(base.out_features, 4))

    def forward(self, x):
        return self.base(x) + 2 * (x @ self.a.T) @ self.b.T


def trained_beside_eager(model, inputs, plain, steps=4):
    """Losses of some steps of both, and the largest difference of a gradient in the last."""
    fused, losses = applied(model, inputs[0]), []
    for one in (model, plain):
        optimizer = torch.optim.AdamW([p for p in one.parameters() if p.requires_grad], lr=1e-3)
        for number in range(steps):
            optimizer.zero_grad(set_to_none=True)
            loss = one(**inputs[number % len(inputs)]).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    assert fused.launches > 0 and not fused.fallbacks
    torch.testing.assert_close(torch.stack(losses[:steps]), torch.stack(losses[steps:]), rtol=1e-5, atol=1e-6)
    compare(gradients(model), gradients(plain), rtol=1e-3, atol=1e-3)
    return fused


class WithZLoss(nn.Module):
    """A causal language model of transformers, with the z-loss of its logits added by the caller."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, labels, use_cache):
        result = self.model(input_ids=input_ids, labels=labels, use_cache=use_cache)
        z_loss = torch.logsumexp(result.logits.float(), dim=-1).square().mean()
        return CausalLMOutput(loss=result.loss + 1e-2 * z_loss)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_z_loss_of_the_logits_of_transformers_is_served_in_chunks(name):
    torch.manual_seed(0)
    model = WithZLoss(MODELS[name]()).train()
    fused = trained_beside_eager(model, [batch(name, number, range(4)) for number in range(3)], copy.deepcopy(model))
    (row,) = (row for row in fused.report.rewrites if row.id == "linear-cross-entropy")
    assert row.status.value == "kept" and row.saved_bytes > 0
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_tiny_transformers_train_beside_eager(name):
    torch.manual_seed(0)
    model = MODELS[name]().train()
    fused = trained_beside_eager(model, [batch(name, number, range(4)) for number in range(3)], copy.deepcopy(model))
    check = fused.report.model_check
    assert check.is_passed and check.oracle == "float64" and check.gradients == len(gradients(model))
    assert {chain.training_pass for chain in fused.report.chains} == {"forward", "backward"}
    assert not fused.report.quality.graph_breaks
    torch.compiler.reset()


@pytest.mark.slow
def test_a_model_with_checkpoints_in_it_and_adapters_on_a_frozen_base():
    torch.manual_seed(0)
    model = MODELS["llama"]().train().requires_grad_(False)
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    for layer in model.model.layers:
        layer.self_attn.q_proj, layer.self_attn.v_proj = Lora(layer.self_attn.q_proj), Lora(layer.self_attn.v_proj)
    trained_beside_eager(model, [batch("llama", 0, range(4))], copy.deepcopy(model))
    assert len(gradients(model)) == 8
    torch.compiler.reset()


@pytest.mark.slow
def test_tied_embeddings_get_the_gradient_of_both_uses():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        num_hidden_layers=1, hidden_size=48, intermediate_size=96, num_attention_heads=2, vocab_size=256, bos_token_id=0,
        eos_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).train()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    trained_beside_eager(model, [batch("llama", 0, range(4))], copy.deepcopy(model))
    torch.compiler.reset()
