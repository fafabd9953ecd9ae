"""Merged GEMMs: the model's own numbers, its own parameters, and everything that must be left alone."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from fusion_advisor.capture.graph.op_records import describe
from fusion_advisor.capture.graph.tracer import capture_regions
from fusion_advisor.fuse.decide.rebind import CannotMove, on_changed
from fusion_advisor.fuse.decide.session import Bench
from fusion_advisor.fuse.live.fused_model import FusedModel
from fusion_advisor.fuse.passes.merge_gemms import merge_all, merge_linears
from fusion_advisor.fuse.passes.registry import PASSES
from fusion_advisor.fuse.plan.plan import make_plan
from fusion_advisor.fuse.rewrite.record import CopyRoom
from fusion_advisor.workload.weight_packing import lay_out_siblings
from tests.tiny import bench_of, evaluated, patterns, profile_live, qwen2

X = torch.randn(2, 6, 32)


class Heads(nn.Module):
    """Three linears of one input, as attention has them, and what becomes of their outputs."""

    def __init__(self, bias=True):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = nn.Linear(32, 48, bias), nn.Linear(32, 16, bias), nn.Linear(32, 16, bias)

    def forward(self, x):
        return torch.tanh(self.q(x)).view(2, 6, 3, 16), self.k(x).view(2, 6, 2, 8).transpose(1, 2), self.v(x) * 2


def regions_of(model, *inputs, is_laid_out=True):
    if is_laid_out:
        lay_out_siblings(model)
    with torch.no_grad():
        live = capture_regions(model.eval(), inputs, {})
    return live.regions


def merged(model, *inputs, is_laid_out=True, may_copy=False):
    """Merge a model's one region; return the result after comparing it with the model."""
    (region,) = regions_of(model, *inputs, is_laid_out=is_laid_out)
    result = merge_linears(region, may_copy=may_copy)
    with torch.no_grad():
        ours, theirs = result.region.graph(*region.example_args), region.graph(*region.example_args)
    torch.testing.assert_close(ours, theirs)
    return result


def linears(result):
    return [node for node in result.region.graph.graph.nodes if node.target is torch.ops.aten.linear.default]


@pytest.mark.parametrize("bias", [True, False])
def test_linears_of_one_input_become_one(bias):
    result = merged(Heads(bias), X)
    assert (result.changed, result.held_bytes, result.refusals) == (1, 0, [])
    (linear,) = linears(result)
    assert tuple(linear.meta["val"].shape) == (2, 6, 80)
    assert len(linear.args) == (3 if bias else 2)


def test_the_layouts_that_follow_are_traced_anew():
    result = merged(Heads(), X)
    values = [node.meta["val"] for node in result.region.graph.graph.nodes if "view" in str(node.target)]
    assert any(value.stride() == (480, 80, 8, 1) for value in values)
    seen = {}

    class Seen(torch.fx.Interpreter):
        def run_node(self, node):
            seen[node] = super().run_node(node)
            return seen[node]

    with torch.no_grad():
        Seen(result.region.graph).run(*result.region.example_args)
    for node, value in seen.items():
        if isinstance(value, torch.Tensor) and node.op == "call_function":
            assert (value.shape, value.stride()) == (node.meta["val"].shape, node.meta["val"].stride()), node


def test_weights_that_lie_apart_are_copied_only_when_asked_for():
    model = Heads()
    refused = merged(model, X, is_laid_out=False)
    assert refused.changed == 0
    assert refused.refusals == [
        "{q,k,v}: its weights are not adjacent in memory: `fusion_advisor.lay_out_weights(model)` moves them together, "
        "and --freeze keeps a merged copy of 10,560 bytes"
    ]
    copied = merged(model, X, is_laid_out=False, may_copy=True)
    assert (copied.changed, copied.held_bytes) == (1, (80 * 32 + 80) * 4)


def test_a_view_that_must_copy_now_is_memory_of_its_own():
    class Flat(Heads):
        def forward(self, x):
            k = self.k(x)
            return self.q(x) * 1, k.reshape(-1) * 2, k.reshape(12 * 16) * 3

    result = merged(Flat(), X)
    ops, _ = describe(result.region)
    copies = [op for op in ops if "reshape" in op.target]
    assert [(op.op_class, op.alias_of) for op in copies] == [("memory", None)] * 2


class Mixed(nn.Module):
    """One way at a time in which linears do not belong together."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.a, self.b = nn.Linear(32, 16), nn.Linear(32, 16, bias=how != "one bias")
        if how == "tied":
            self.b.weight = self.a.weight

    def forward(self, x):
        if self.how == "flat view":
            return self.a(x).view(-1) + self.b(x).reshape(-1)
        if self.how == "written":
            y = x * 1
            one = self.a(y)
            y.add_(1)
            return one + self.b(y)
        return self.a(x) + self.b(x + 1 if self.how == "other input" else x)


@pytest.mark.parametrize("how", ["other input", "one bias", "tied", "written", "flat view"])
def test_linears_that_do_not_belong_together_are_left_alone(how):
    result = merged(Mixed(how).eval(), X, may_copy=True)
    assert result.changed == 0
    assert len(linears(result)) == 2
    assert len(result.refusals) == (how == "flat view")


class Wrapped(nn.Module):
    """A linear as LoRA wraps it: ``q.base_layer`` and ``q.lora_A.default``."""

    def __init__(self, linear):
        super().__init__()
        self.base_layer = linear
        self.lora_A = nn.ModuleDict({"default": nn.Linear(32, 4, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(4, linear.out_features, bias=False)})

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


def test_linears_that_an_adapter_wraps_are_left_alone():
    model = Heads(bias=False)
    model.q, model.v = Wrapped(model.q), Wrapped(model.v)
    result = merged(model.eval(), X, may_copy=True)
    assert (result.changed, result.refusals) == (0, [])


# ---------------------------------------------------------------------- in the live model


def fused_of(model, *inputs, may_copy=False):
    """A FusedModel with nothing but merged GEMMs; not applied yet."""
    live_inputs = tuple(inputs)
    with torch.no_grad():
        live = capture_regions(model, live_inputs, {})
    step = on_changed(
        Bench(live, on_cuda=False),
        merge_all(live.regions, CopyRoom(may_copy=may_copy, free_bytes=1 << 40))[0],
        [],
        no_move,
    )
    assert step.changed
    return FusedModel(model, step.bench.live.regions, step.bench.build([], ()).modules, live_inputs, {}), step


def no_move(*_):
    raise AssertionError("no fusion was planned")


def state(model):
    return {
        name: (id(value), value.data_ptr(), value._version, value.detach().clone())
        for name, value in [*model.named_parameters(), *model.named_buffers()]
    }


@pytest.mark.parametrize("is_laid_out", [True, False])
def test_parameters_and_state_are_the_same_objects_and_bytes(is_laid_out):
    model = Heads().eval()
    if is_laid_out:
        lay_out_siblings(model)
    before, keys = state(model), list(model.state_dict())
    expected = model(X)
    fused, step = fused_of(model, X, may_copy=not is_laid_out)
    assert (step.held_bytes > 0) is not is_laid_out
    for _ in range(2):
        with torch.no_grad(), fused:
            torch.testing.assert_close(model(X), expected)
            assert list(model.state_dict()) == keys
        assert fused.fallbacks == {}
        for name, (identity, address, version, value) in state(model).items():
            assert (identity, address, version) == before[name][:3]
            assert torch.equal(value, before[name][3])
    assert torch.equal(model(X)[0], expected[0])


def test_what_is_written_to_a_weight_is_seen():
    model = Heads().eval()
    lay_out_siblings(model)
    fused, _ = fused_of(model, X)
    with torch.no_grad(), fused:
        model(X)
        model.k.weight.data.mul_(3)
        model.v.bias.add_(1)
        model.load_state_dict({**model.state_dict(), "q.weight": torch.randn(48, 32)})
        torch.testing.assert_close(model(X), model._call_impl(X))
    assert fused.fallbacks == {}


def test_a_copy_is_made_again_when_a_weight_was_written_to_or_exchanged():
    model = Heads().eval()
    fused, _ = fused_of(model, X, may_copy=True)
    with torch.no_grad(), fused:
        model(X)
        model.k.weight.mul_(3)
        torch.testing.assert_close(model(X), model._call_impl(X))
        model.q.weight = nn.Parameter(torch.randn(48, 32))
        torch.testing.assert_close(model(X), model._call_impl(X))


def test_a_weight_that_was_exchanged_ends_the_merge_not_the_model():
    model = Heads().eval()
    lay_out_siblings(model)
    fused, _ = fused_of(model, X)
    with torch.no_grad(), fused, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.q.weight = nn.Parameter(torch.randn(48, 32))
        torch.testing.assert_close(model(X), model._call_impl(X))
    assert "no longer do" in next(iter(fused.fallbacks))


# ---------------------------------------------------------------------- with the chains behind the GEMMs


def merged_qwen2():
    model, inputs = qwen2()
    assert lay_out_siblings(model) == 16
    capture, live = profile_live(model, (), inputs)
    plan = make_plan(capture, patterns(), min_share=0.0)
    bench, built = bench_of(live, plan)
    return model, inputs, bench, built


def moved(bench, planned, _):
    fresh = evaluated(bench, planned)
    return fresh, fresh.kernel


def test_kept_chains_are_bound_to_the_slices():
    model, inputs, bench, built = merged_qwen2()
    step = on_changed(bench, merge_all(bench.live.regions, CopyRoom())[0], built, moved)
    assert (step.changed, step.held_bytes) == (4, 0)

    def sites(fusions):
        found = {}
        for item in fusions:
            found[item.planned.match.kernel] = found.get(item.planned.match.kernel, 0) + len(item.sites)
        return found

    assert sites(step.built) == sites(built)
    new = {item.planned.match.kernel for item in built if item.planned.id in step.kernels}
    assert {"rope_qk", "swiglu"} <= new
    assert "rmsnorm" not in new
    for passes in ((), tuple(PASSES)):
        variant = step.bench.build(step.built, passes)
        for module in variant.modules:
            assert sum(node.target is torch.ops.aten.linear.default for node in module.graph.nodes) == 2 * 4 + 1
            assert not any("silu" in str(node.target) for node in module.graph.nodes)
        with torch.no_grad():
            fused = FusedModel(model, step.bench.live.regions, variant.modules, (), inputs)
            torch.testing.assert_close(fused.dispatch(**inputs).logits, model(**inputs).logits, rtol=1e-5, atol=1e-5)
        assert fused.fallbacks == {}


def test_a_fusion_that_has_no_kernel_on_the_slices_stops_the_merge():
    _, _, bench, built = merged_qwen2()

    def refuse(_bench, planned, _number):
        raise CannotMove(f"{planned.id}: no")

    with pytest.raises(CannotMove, match="no"):
        on_changed(bench, merge_all(bench.live.regions, CopyRoom())[0], built, refuse)


def test_no_copy_is_made_where_it_does_not_fit():
    model = Heads().eval()
    with torch.no_grad():
        bench = Bench(capture_regions(model, (X,), {}), on_cuda=False)
    assert [one.changed for one in merge_all(bench.live.regions, CopyRoom(may_copy=True, free_bytes=1000))[0]] == [0]
    assert [one.changed for one in merge_all(bench.live.regions, CopyRoom(may_copy=True, free_bytes=1 << 30))[0]] == [1]


# ---------------------------------------------------------------------- laying weights out


def test_siblings_are_laid_out_with_their_values_and_flags():
    model = Heads()
    model.k.weight.requires_grad_(False)
    model.k.weight.mark = "own"
    plain = copy.deepcopy(model)
    assert lay_out_siblings(model) == 6
    assert model.q.weight.data_ptr() + model.q.weight.numel() * 4 == model.k.weight.data_ptr()
    assert model.q.bias.data_ptr() + model.q.bias.numel() * 4 == model.k.bias.data_ptr()
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in model.state_dict().items())
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in plain.parameters()]
    assert model.k.weight.mark == "own"
    assert model.q.weight.untyped_storage().nbytes() == 80 * 32 * 4
    model(X)[0].sum().backward()
    assert model.q.weight.grad is not None


def test_tied_and_unaligned_weights_stay_where_they_are():
    tied, odd = Heads(), Heads()
    tied.k.weight, odd.k = tied.v.weight, nn.Linear(32, 15)
    before = {name: value.data_ptr() for name, value in odd.named_parameters()}
    assert lay_out_siblings(tied) == 0
    assert tied.k.weight is tied.v.weight
    assert lay_out_siblings(odd) == 0
    assert {name: value.data_ptr() for name, value in odd.named_parameters()} == before


def test_a_copy_of_a_laid_out_model_owns_its_weights():
    model = Heads()
    lay_out_siblings(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.q.weight.zero_()
    assert model.q.weight.abs().sum() > 0
    assert other.k.weight.abs().sum() > 0
