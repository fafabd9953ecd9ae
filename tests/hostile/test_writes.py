"""Every way to write to a weight or a buffer of a fused model, times everything that a rewrite may make of one.

Torch counts some writes and lets others pass uncounted; some exchange the tensor, others its memory. After each of them the fused
model must compute what the model's own ops compute, by its rewritten graph wherever the tensor is still laid out as it was.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from fusion_advisor.capture.graph.tracer import capture_regions
from fusion_advisor.fuse import dynamo_backend
from fusion_advisor.fuse.decide.session import Bench
from fusion_advisor.fuse.decide.verdict import Verdict
from fusion_advisor.fuse.live.fused_model import FusedModel
from fusion_advisor.fuse.live.restore_plan import apply_plan
from fusion_advisor.fuse.live.saved_plan import load_plan
from fusion_advisor.fuse.passes.registry import PASSES
from fusion_advisor.fuse.pipeline import apply_workload
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.fuse.plan.plan import make_plan
from fusion_advisor.fuse.rewrite.derived_tensors import Held
from fusion_advisor.records import Status
from fusion_advisor.report.shared_rows import caveats
from fusion_advisor.runtime.torch_internals import module_call
from fusion_advisor.workload.load import describe_live
from fusion_advisor.workload.weight_packing import lay_out_siblings
from tests.fuse.conftest import backend_with
from tests.fuse.live.test_saved_plan import save
from tests.fuse.test_pipeline import keep_all, pytestmark, quick, verdicts  # noqa: F401
from tests.tiny import BANDWIDTH, evaluated, llama, patterns, profile_live

WIDTH, ROWS = 16, 6


class Derived(torch.nn.Module):
    """Something of each kind that a rewrite may make of weights and buffers, and values of either in plain expressions."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.norm = torch.nn.BatchNorm1d(WIDTH)
        self.gain = torch.nn.Parameter(torch.rand(WIDTH))
        self.register_buffer("frequencies", torch.rand(WIDTH // 2))
        self.register_buffer("mask", torch.ones(ROWS, ROWS, dtype=torch.bool).tril())
        self.register_buffer("table", torch.rand(ROWS, WIDTH))
        self.register_buffer("transient", torch.rand(WIDTH), persistent=False)
        self.plain = torch.rand(WIDTH)

    def forward(self, x):
        angles = torch.arange(float(ROWS)).unsqueeze(1) * self.frequencies
        angles = torch.cat((angles, angles), -1)
        x = x * angles.cos() + x.flip(-1) * angles.sin()
        x = F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x), attn_mask=self.mask & (self.table[:, :ROWS] < 2))
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        x = x * torch.tanh(self.table.double()).float() + torch.exp(self.transient) * torch.sigmoid(self.plain)
        return x * (1 + torch.softmax(self.gain * 3, -1))


TARGETS = (
    "frequencies", "mask", "table", "transient", "plain", "gain", "q.weight", "k.weight", "norm.running_mean", "norm.running_var",
    "norm.weight",
)  # fmt: skip


def derived(seed=0, *, is_laid_out=False):
    torch.manual_seed(seed)
    model = Derived().eval()
    model.norm.running_mean.uniform_()
    if is_laid_out:
        assert lay_out_siblings(model) == 3
    return describe_live(model, (torch.randn(2, ROWS, WIDTH),))


def find(model, name):
    owner, _, leaf = name.rpartition(".")
    return model.get_submodule(owner), leaf


def other_value(tensor):
    """Another value of the same layout."""
    if tensor.dtype == torch.bool:
        drawn = torch.rand(tensor.shape) < 0.5
        return drawn | torch.eye(*tensor.shape, dtype=torch.bool)
    return torch.rand_like(tensor) + 0.25


def _as(tensor, value):
    return torch.nn.Parameter(value) if isinstance(tensor, torch.nn.Parameter) else value


def _numpy(model, owner, leaf, tensor):
    tensor.detach().numpy()[...] = other_value(tensor).numpy()


def _storage(model, owner, leaf, tensor):
    alias = torch.empty(0, dtype=tensor.dtype).set_(
        tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )
    alias.copy_(other_value(tensor))


def _whole_storage(model, owner, leaf, tensor):
    value = torch.rand(tensor.untyped_storage().nbytes() // tensor.element_size())
    if tensor.dtype == torch.bool:
        value = torch.ones(tensor.numel(), dtype=torch.bool)
    tensor.untyped_storage().copy_(value.untyped_storage())


def _inference(model, owner, leaf, tensor):
    with torch.inference_mode():
        tensor.copy_(other_value(tensor))


def _optimizer(model, owner, leaf, tensor):
    tensor.grad = torch.rand_like(tensor)
    torch.optim.SGD([tensor], lr=0.25).step()
    tensor.grad = None


def _ema(model, owner, leaf, tensor):
    torch.manual_seed(7)
    other = Derived()
    other.norm.running_mean.uniform_()
    for (_, ema), (_, now) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        ema.data.mul_(0.9).add_(now.data, alpha=0.1)
    for (_, ema), (_, now) in zip(model.named_buffers(), other.named_buffers(), strict=True):
        ema.data.copy_(now.data)


def _load(model, owner, leaf, tensor, *, assign=False):
    state = {name: other_value(value) if value.is_floating_point() else value for name, value in model.state_dict().items()}
    model.load_state_dict({name: _as(value, state[name]) for name, value in model.state_dict().items()}, assign=assign)


def _swap(model, owner, leaf, tensor):
    torch.utils.swap_tensors(tensor, _as(tensor, other_value(tensor)))


def _times(model, owner, leaf, tensor):
    tensor.data.logical_xor_(_flips(tensor)) if tensor.dtype == torch.bool else tensor.data.mul_(1.5)


def _detached_times(model, owner, leaf, tensor):
    tensor.detach().logical_xor_(_flips(tensor)) if tensor.dtype == torch.bool else tensor.detach().mul_(0.75)


def _flips(mask):
    """Elements to flip, none on the diagonal: a query without any key has no result."""
    return ~torch.eye(*mask.shape, dtype=torch.bool) & (torch.rand(mask.shape) < 0.5)


UNCOUNTED = {
    ".data.copy_": lambda model, owner, leaf, tensor: tensor.data.copy_(other_value(tensor)),
    ".data.mul_": _times,
    "numpy": _numpy,
    "dlpack": lambda model, owner, leaf, tensor: torch.from_dlpack(tensor.detach()).copy_(other_value(tensor)),
    "storage": _storage,
    "untyped_storage().copy_": _whole_storage,
    "EMA": _ema,
}
"""These write where the tensor lies, and torch does not count them (or counts them for an alias alone)."""
COUNTED = {
    "detach().mul_": _detached_times,
    "no_grad": lambda model, owner, leaf, tensor: tensor.copy_(other_value(tensor)),
    "foreach": lambda model, owner, leaf, tensor: torch._foreach_copy_([tensor], [other_value(tensor)]),
    "inference_mode": _inference,
    "optimizer": _optimizer,
    "load_state_dict": _load,
}
EXCHANGING = {
    ".data =": lambda model, owner, leaf, tensor: setattr(tensor, "data", other_value(tensor)),
    "set_": lambda model, owner, leaf, tensor: tensor.set_(other_value(tensor)),
    "setattr": lambda model, owner, leaf, tensor: setattr(owner, leaf, _as(tensor, other_value(tensor))),
    "load_state_dict(assign=True)": lambda *given: _load(*given, assign=True),
    "swap_tensors": _swap,
}


def stale_after(loaded, call, writes, targets=TARGETS, *, refresh=lambda: None):
    """Make every write to every target; return those after which ``call`` gives other numbers than the model's own ops."""
    own = module_call.original_call(loaded.model)
    torch.manual_seed(1)
    stale = []
    with torch.no_grad():
        call(*loaded.args)  # what is made at the first call is made before the first write
    for name, write in writes.items():
        for target in targets:
            owner, leaf = find(loaded.model, target)
            tensor = getattr(owner, leaf)
            if name == "optimizer" and not isinstance(tensor, torch.nn.Parameter):
                continue
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                before = own(*loaded.args)
                write(loaded.model, owner, leaf, tensor)
                refresh()
                expected = own(*loaded.args)
                assert not torch.equal(expected, before), f"{name} to {target} changes nothing"
                results = [call(*loaded.args) for _ in range(2)]
            if not all(torch.allclose(result, expected, rtol=1e-4, atol=1e-5) for result in results):
                stale.append(f"{name} to {target}")
    return stale


def keep_passes(candidate):
    """Keep no chain: its kernel would compute in every step what the passes freeze."""
    return Status.KEPT if candidate.graph_pass else Status.WITHIN_NOISE


def planted(status_of=keep_all):
    """Every rewrite is kept, or those that ``status_of`` keeps, and the merging of linears."""
    kept = Verdict(id="R4", status=Status.KEPT, reason="planted", delta_ns=-5, interval_ns=(-6, -4))
    return verdicts(status_of, on_top=lambda *_, **__: kept)


def kept_rows(report):
    return {row.id for row in report.rewrites if row.status is Status.KEPT}


# ---------------------------------------------------------------------- nothing is frozen


@pytest.mark.parametrize("is_laid_out", [False, True], ids=["apart", "laid out"])
def test_no_write_leaves_a_fused_model_or_a_reloaded_plan_stale(quick, is_laid_out):  # noqa: F811
    loaded = derived(is_laid_out=is_laid_out)
    run = apply_workload(loaded, quick, instruments=planted())
    assert run.fused.is_applied
    assert run.report.frozen == ()
    assert not any(name == "fold-frozen" for name in kept_rows(run.report))
    assert ("merge-gemms" in kept_rows(run.report)) == is_laid_out
    save(run, quick.run_dir)
    again = derived(1, is_laid_out=is_laid_out)
    for one, fused in ((loaded, run.fused), (again, apply_plan(again, load_plan(quick.run_dir)))):
        assert stale_after(one, fused, UNCOUNTED | COUNTED) == []
        assert fused.fallbacks == {}  # its own graph has computed all of it
        assert stale_after(one, fused, EXCHANGING) == []
        fused.revert()


def test_no_write_leaves_the_dynamo_backend_stale(quick):  # noqa: F811
    loaded = derived()
    backend = backend_with(ApplyOptions(bandwidth=BANDWIDTH), instruments=planted())
    compiled = torch.compile(loaded.model, backend=backend, dynamic=False)
    assert stale_after(loaded, compiled, UNCOUNTED | COUNTED | EXCHANGING) == []


def test_an_option_that_the_dynamo_backend_does_not_know_is_refused():
    compiled = torch.compile(derived().model, backend=dynamo_backend.fusion_advisor, options={"frieze": True})
    with torch.no_grad(), pytest.raises(Exception, match="no option frieze"):
        compiled(*derived().args)


def test_rotary_tables_of_a_llama_follow_every_write_in_a_kernel_of_their_own():
    model, kwargs = llama()
    capture, live = profile_live(model, (), kwargs)
    plan = make_plan(capture, patterns(), min_share=0.0)
    (tables,) = [fusion for fusion in plan.fusions if "cos" in fusion.chain.ops]
    assert "sin" in tables.chain.ops
    bench = Bench(live, on_cuda=False)
    bench.observe(plan.fusions)
    passes = [name for name in PASSES if name != "fold-frozen"]
    variant = bench.build([evaluated(bench, fusion) for fusion in plan.fusions], passes)
    computing = [str(node.target) for node in variant.modules[0].graph.nodes if node.meta.get("fusion_id") == tables.id]
    assert len(computing) == 1
    fused = FusedModel(model, live.regions, variant.modules, (), kwargs).apply()
    own = module_call.original_call(model)
    writes = {name: write for name, write in (UNCOUNTED | COUNTED).items() if name not in ("EMA", "optimizer", "load_state_dict")}
    torch.manual_seed(1)
    for target in ("model.rotary_emb.inv_freq", "model.norm.weight", "model.layers.1.self_attn.k_proj.weight"):
        owner, leaf = find(model, target)
        for name, write in writes.items():
            with torch.no_grad():
                write(model, owner, leaf, getattr(owner, leaf))
                expected = own(**kwargs).logits
                torch.testing.assert_close(fused(**kwargs).logits, expected, rtol=1e-4, atol=1e-4, msg=f"{name} to {target}")
    assert fused.fallbacks == {}


# ---------------------------------------------------------------------- --freeze


def test_what_is_frozen_is_right_again_after_refresh_and_after_writes_that_torch_counts(quick):  # noqa: F811
    loaded = derived()
    run = apply_workload(loaded, replace(quick, freeze=True), instruments=planted(keep_passes))
    fused, report = run.fused, run.report
    sources = {source for value in report.frozen for source in value.sources}
    assert {"frequencies", "gain", "q.weight", "v.weight"} <= sources
    assert sum(value.held_bytes for value in report.frozen) >= 3 * WIDTH * WIDTH * 4
    assert {"fold-frozen", "merge-gemms"} <= kept_rows(report)
    (contract,) = [line for line in caveats(report) if "--freeze" in line]
    assert "fused.refresh()" in contract
    save(run, quick.run_dir)
    again = derived(1)
    reloaded = apply_plan(again, load_plan(quick.run_dir))
    assert reloaded.report.frozen == report.frozen
    for one, model in ((loaded, fused), (again, reloaded)):
        stale = stale_after(one, model, {".data.mul_": _times})
        assert {".data.mul_ to frequencies", ".data.mul_ to gain", ".data.mul_ to q.weight"} <= set(stale)
        model.refresh()
        assert stale_after(one, model, UNCOUNTED, refresh=model.refresh) == []
        assert stale_after(one, model, COUNTED) == []
        assert model.fallbacks == {}
        assert stale_after(one, model, EXCHANGING) == []
        model.revert()


def test_the_dynamo_backend_freezes_where_it_is_asked_to(quick):  # noqa: F811
    loaded = derived()
    options = replace(dynamo_backend.chosen_options({"freeze": True}), bandwidth=BANDWIDTH)
    backend = backend_with(options, instruments=planted(keep_passes))
    compiled = torch.compile(loaded.model, backend=backend, dynamic=False)
    assert ".data.mul_ to frequencies" in stale_after(loaded, compiled, {".data.mul_": _times})
    torch.compiler.reset()
    assert stale_after(loaded, compiled, COUNTED | EXCHANGING) == []


def test_a_value_of_many_shapes_is_refreshed_in_each():
    loaded = derived()
    live = capture_regions(loaded.model, loaded.args, {})
    variant = Bench(live, on_cuda=False).build((), ("fold-frozen",))
    assert any(isinstance(node.target, Held) for node in variant.modules[0].graph.nodes)
    fused = FusedModel(loaded.model, live.regions, variant.modules, loaded.args, {}).apply()
    shorter = replace(loaded, args=(torch.randn(1, ROWS, WIDTH),))
    other = capture_regions(loaded.model, shorter.args, {})
    fused._add(other.regions, Bench(other, on_cuda=False).build((), ("fold-frozen",)).modules, shorter.args, {})
    for one in (loaded, shorter):
        assert stale_after(one, fused, UNCOUNTED, refresh=fused.refresh) == []
    assert fused.fallbacks == {}
