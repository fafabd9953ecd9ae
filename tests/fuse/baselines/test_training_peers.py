"""Other ways to run a training step: what is checked of them, AdamW after each, Liger's patches, the order of the run."""

from __future__ import annotations

import functools
import sys
import threading
import types
from dataclasses import replace

import pytest
import torch
import transformers
from torch import nn

from fusion_advisor.fuse.baselines.contenders import AUTOTUNED_TRAINING, LIMITS_S, Contender
from fusion_advisor.fuse.baselines.liger import NotAvailable, liger_model
from fusion_advisor.fuse.baselines.measure_contenders import measure_all
from fusion_advisor.fuse.baselines.step_check import OTHER_NUMBERS, reference_of
from fusion_advisor.fuse.baselines.training_peers import StepWatch, training_peers
from fusion_advisor.fuse.baselines.training_step import CopiedAdamW, TrainingWay, copied_adamw
from fusion_advisor.fuse.modes.apply_training import apply_training
from fusion_advisor.fuse.plan.progress import Progress
from fusion_advisor.records import COMPILED, EAGER, OURS, Status, StepProfile
from fusion_advisor.workload.load import describe_live
from tests.fuse.modes.test_apply_training import OPTIONS
from tests.fuse.train.test_trained_graph import WIDTH, Block

STEP = StepProfile(label="known", device_ns=7, launches=1, categories=(), kernels=())
WORDS = 11


def cross_entropy(rows, labels):
    return nn.functional.cross_entropy(rows, labels)


class Speaker(nn.Module):
    """Computes its own loss; dropout draws random numbers where ``p`` is over 0."""

    def __init__(self, p=0.0):
        super().__init__()
        self.config = types.SimpleNamespace(model_type="speaker")
        self.embedding, self.drop = nn.Embedding(WORDS, 16), nn.Dropout(p)
        self.norm, self.layer, self.head = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, WORDS, bias=False)

    def rows(self, ids):
        return self.norm(self.drop(nn.functional.gelu(self.layer(self.embedding(ids)))))

    def forward(self, ids, labels):
        return {"loss": cross_entropy(self.head(self.rows(ids)).flatten(0, 1), labels.flatten())}


def made(p=0.0, dtype=torch.float32):
    torch.manual_seed(0)
    return Speaker(p).to(dtype).train(), {"ids": torch.randint(WORDS, (64, 33)), "labels": torch.randint(WORDS, (64, 33))}


def way_of(model, kwargs, forward=None):
    return TrainingWay(model=model, args=(), kwargs=kwargs, forward=forward or model, model_id="speaker")


def wrong_loss(model, **kwargs):
    return {"loss": model(**kwargs)["loss"] * 14.2 / 12.2}


def frozen_norm(model, ids, labels):
    rows = torch.func.functional_call(model, {"norm.weight": model.norm.weight.detach()}, (ids, labels))
    return {"loss": rows["loss"]}


class Twice(torch.autograd.Function):
    """Hands a gradient on doubled."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


def doubled(model, ids, labels):
    return torch.func.functional_call(model, {"layer.weight": Twice.apply(model.layer.weight)}, (ids, labels))


def rounded(model, ids, labels):
    """Ops in a narrower dtype than the model's."""
    rows = model.rows(ids).to(torch.bfloat16).float()
    return {"loss": cross_entropy((rows @ model.head.weight.T).flatten(0, 1), labels.flatten())}


def not_finite(model, **kwargs):
    return {"loss": model(**kwargs)["loss"] * float("inf")}


@pytest.mark.parametrize("p", [0.0, 0.3], ids=["exact", "dropout"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_what_computes_the_same_passes_and_what_does_not_is_told(p, dtype):
    model, kwargs = made(p, dtype)
    reference = reference_of(way_of(model, kwargs))
    assert reference.oracle == (OTHER_NUMBERS if p else "float64" if dtype is torch.float32 else "float32")
    own = reference.check(way_of(model, kwargs))
    assert own.is_passed and own.loss == own.eager_loss and own.gradients == len(list(model.parameters()))
    assert own.rel_l2 == 0 if p else own.rel_l2 == own.eager_rel_l2 > 0

    def other_numbers(**given):
        torch.rand(7)
        return model(**given)

    assert reference.check(way_of(model, kwargs, other_numbers)).is_passed
    for plant, words in (
        (wrong_loss, "its loss is "), (frozen_norm, "`norm.weight` has no gradient"),
        (doubled, "`layer.weight`" if p else "the error of "), (not_finite, "not finite"),
    ):  # fmt: skip
        found = reference.check(way_of(model, kwargs, functools.partial(plant, model)))
        assert not found.is_passed and words in found.reason, (plant.__name__, found)
    assert all(one.grad is None for one in model.parameters())


def test_small_errors_show_where_no_random_number_is_drawn():
    model, kwargs = made()
    found = reference_of(way_of(model, kwargs)).check(way_of(model, kwargs, functools.partial(rounded, model)))
    assert not found.is_passed and "eager's own" in found.reason and found.rel_l2 > 100 * found.eager_rel_l2


@pytest.mark.parametrize("p", [0.0, 0.3], ids=["exact", "dropout"])
def test_a_gradient_that_is_nothing_but_rounding_judges_nobody(p):
    """torch.compile of a tiny wav2vec2 was called wrong: a key's bias had 1.6 times eager's gradient, whose true value is 0."""
    torch.manual_seed(0)

    class Shifted(nn.Module):
        """The softmax takes a shift of all its columns away: its true gradient is 0."""

        def __init__(self):
            super().__init__()
            self.layer, self.shift = nn.Linear(8, 8), nn.Parameter(torch.ones(1))

        def forward(self, x):
            return torch.softmax(nn.functional.dropout(self.layer(x), p) + self.shift, -1).square().mean()

    model, x = Shifted().train(), torch.randn(32, 8)
    way = TrainingWay(model=model, args=(x,), kwargs={}, forward=model, model_id="shifted")
    noisy = replace(way, forward=lambda x: model(x) + (model.shift - model.shift.detach()).sum() * 1e-7)
    found = reference_of(way).check(noisy)
    assert found.is_passed and found.worst != "shift" and found.gradients == 3


def test_without_a_wider_copy_eagers_own_gradients_judge():
    model, kwargs = made()
    model.hook = torch.ones(2, requires_grad=True) * 2  # no leaf: deepcopy refuses it
    reference = reference_of(way_of(model, kwargs))
    assert reference.oracle == "eager" and reference.check(way_of(model, kwargs)).is_passed
    found = reference.check(way_of(model, kwargs, functools.partial(doubled, model)))
    assert not found.is_passed and "usual" in found.reason


def test_adamw_updates_copies_as_torch_updates_weights_and_writes_no_weight():
    model, kwargs = made()
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    optimizer = copied_adamw(model, on_cuda=False)
    assert isinstance(optimizer, CopiedAdamW)
    moments = 2 * sum(one.nbytes for one in model.parameters())
    assert moments <= optimizer.state_bytes <= moments + 16 * len(before)
    seen = []
    way = way_of(model, kwargs)
    step = optimizer.after(way)
    copies = [copy for _, copy in optimizer._pairs]
    optimizer._optimizer.register_step_pre_hook(lambda *_: seen.append([copy.grad for copy in copies]))
    start = [copy.detach().clone() for copy in copies]
    step()
    for name, one in model.named_parameters():
        assert torch.equal(one, before[name]) and one.grad is None
    assert not any(torch.equal(copy, first) for copy, first in zip(copies, start, strict=True))
    way.with_gradients()
    for gradient, own in zip(seen[0], model.parameters(), strict=True):
        torch.testing.assert_close(gradient, own.grad)
    assert all(copy.grad is None for copy in copies)


def test_the_optimizer_reads_the_layout_that_a_way_leaves():
    model, kwargs = made()
    optimizer, strides = copied_adamw(model, on_cuda=False), []

    def turned(**given):
        model.layer.weight.register_post_accumulate_grad_hook(lambda one: setattr(one, "grad", one.grad.t().contiguous().t()))
        return model(**given)

    optimizer._optimizer.register_step_pre_hook(
        lambda *_: strides.append(next(copy.grad.stride() for own, copy in optimizer._pairs if own is model.layer.weight))
    )
    optimizer.after(way_of(model, kwargs))()
    optimizer.after(way_of(model, kwargs, turned))()
    assert strides == [(16, 1), (1, 16)]


def test_a_step_with_a_sparse_gradient_has_no_adamw_after_it():
    model, kwargs = made()
    model.embedding.sparse = True
    way = way_of(model, kwargs)
    assert StepWatch(way, copied_adamw(model, on_cuda=False)).larger(way) is None
    assert all(one.grad is None for one in model.parameters())
    model.embedding.sparse = False
    StepWatch(way, copied_adamw(model, on_cuda=False)).larger(way)()


def test_where_adamw_cannot_run_the_reason_is_told():
    model = nn.Linear(2, 2, dtype=torch.complex64)
    assert "complex" in copied_adamw(model, on_cuda=False)


def patch_with(monkeypatch, patch):
    module = types.ModuleType("liger_kernel.transformers")
    module.apply_liger_kernel_to_speaker = patch
    monkeypatch.setitem(sys.modules, "liger_kernel", types.ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", module)


class OwnNorm(nn.LayerNorm):
    """Stands for a norm of Liger's."""


def liger_patch(*, loss=1.0):
    """A patch as Liger's are: a loss that never returns logits on the instance, names of the model's module, a class."""

    def patch(rope=True, fused_linear_cross_entropy=True, model=None):
        here = sys.modules[__name__]
        assert not rope and fused_linear_cross_entropy
        here.cross_entropy = lambda rows, labels: nn.functional.cross_entropy(rows.double(), labels).float()
        Speaker.rows = lambda self, ids: self.norm(nn.functional.gelu(self.layer(self.embedding(ids))))
        model.norm.forward = types.MethodType(OwnNorm.forward, model.norm)

        def forward(self, ids, labels):
            rows = self.rows(ids).flatten(0, 1)
            return {"loss": here.cross_entropy(rows @ self.head.weight.T, labels.flatten()) * loss, "logits": None}

        model.forward = types.MethodType(forward, model)

    return patch


def test_ligers_loss_is_used_and_its_patches_reach_neither_the_model_nor_its_class(monkeypatch):
    patch_with(monkeypatch, liger_patch())
    model, kwargs = made()
    names = (sys.modules[__name__].cross_entropy, Speaker.rows, Speaker.forward, nn.functional.cross_entropy)

    def untouched():
        own = (sys.modules[__name__].cross_entropy, Speaker.rows, Speaker.forward, nn.functional.cross_entropy)
        return own == names and not {"forward", "rows"} & vars(model).keys() and "forward" not in vars(model.norm)

    reference = reference_of(way_of(model, kwargs))
    forward = liger_model(model)
    assert untouched()
    way = way_of(model, kwargs, forward)
    loss = way.with_gradients()
    assert untouched() and forward(**kwargs)["logits"] is None
    assert all(one.grad is not None for one in model.parameters())
    model.zero_grad(set_to_none=True)
    assert reference.check(way).is_passed and untouched()
    torch.testing.assert_close(model(**kwargs)["loss"].detach(), loss)
    model.load_state_dict({name: one + 1 for name, one in model.state_dict().items()})
    assert not torch.equal(way.with_gradients(), loss)  # its weights are the model's own


def measured(model, kwargs, contenders, **more):
    eager = way_of(model, kwargs)
    ours = Contender(name=OURS, make=lambda: way_of(model, kwargs), step=STEP, is_required=True)
    first = Contender(name=EAGER, make=lambda: eager, step=STEP, is_required=True)
    others = [replace(one, step=STEP, is_compiled=False) for one in contenders]
    watch = StepWatch(eager, copied_adamw(model, on_cuda=False))
    return measure_all([first, ours, *others], needed_bytes=0, on_cuda=False, runs=3, budget_s=0.01, watch=watch, **more)


def test_a_peer_with_a_wrong_loss_is_a_row_that_says_so(monkeypatch):
    patch_with(monkeypatch, liger_patch(loss=14.2 / 12.2))
    model, kwargs = made()
    loaded = types.SimpleNamespace(model=model)
    peers = training_peers(loaded, functools.partial(way_of, model, kwargs), on_cuda=True, max_autotune=True)
    assert [one.name for one in peers] == [f"{COMPILED}default", "Liger", f"{COMPILED}{AUTOTUNED_TRAINING}"]
    assert [one.limit_s for one in peers] == [LIMITS_S["default"], None, LIMITS_S[AUTOTUNED_TRAINING]]
    seen = []
    eager, ours, liger = measured(model, kwargs, peers[1:2], on_required=seen.append)
    assert [[row.name for row in rows] for rows in seen] == [[EAGER, OURS], [EAGER, OURS, "Liger"]]
    assert eager.is_right and ours.is_right and not liger.is_right and "its loss is" in liger.check.reason
    for row in (eager, ours, liger):
        assert len(row.with_optimizer.times_ns) == len(row.step.wall.times_ns) == 3
    assert not seen[0][0].check and seen[0][0].with_optimizer  # ours is shown before anything is checked


def test_models_that_liger_does_not_know_are_told(monkeypatch):
    patch_with(monkeypatch, liger_patch())
    model, _ = made()
    for kind in ("gpt2", "bert", "vit"):
        model.config.model_type = kind
        with pytest.raises(NotAvailable, match=f"Liger has no kernels for {kind}"):
            liger_model(model)
    one = training_peers(types.SimpleNamespace(model=model), way_of, on_cuda=False, max_autotune=False)[-1]
    with pytest.raises(NotAvailable, match="CUDA only"):
        one.make()


class CutOff(Progress):
    """A user who ends the run while a compiler works."""

    def step(self, done, total, text):
        if text.startswith(COMPILED):
            raise KeyboardInterrupt


def test_a_run_that_is_cut_off_in_a_baseline_has_reported_ours():
    torch.manual_seed(0)
    reports = []
    loaded = describe_live(Block().train(), (torch.randn(8, 5, WIDTH),), phase="train")
    with pytest.raises(KeyboardInterrupt):
        apply_training(loaded, replace(OPTIONS, compile=True), CutOff(), reports.append)
    last = reports[-1]
    assert last.status == "interrupted" and last.after.label == "fused" and last.after.wall
    assert [row.name for row in last.baselines] == [EAGER, OURS]
    assert all(row.with_optimizer for row in last.baselines) and last.training.parts.state_bytes
    kept = [fusion for fusion in last.fusions if fusion.status is Status.KEPT]
    assert kept and all(fusion.receipt.sites_replaced for fusion in kept)
    torch.compiler.reset()


def test_no_compiler_is_asked_without_compile():
    torch.manual_seed(0)
    loaded = describe_live(Block().train(), (torch.randn(8, 5, WIDTH),), phase="train")
    run = apply_training(loaded, replace(OPTIONS, compile=False), CutOff())
    assert [row.name for row in run.report.baselines] == [EAGER, OURS]
    assert all(row.with_optimizer and row.check is None for row in run.report.baselines)
    run.revert()
    torch.compiler.reset()


def test_a_compilers_step_is_checked_in_a_thread_of_its_own():
    """Plans of cuDNN's attention that other ways' steps left in autograd's thread may read its gradients wrongly."""
    model, kwargs = made()
    threads = []

    def noted(**given):
        threads.append((threading.get_ident(), torch.autograd.is_multithreading_enabled()))
        return model(**given)

    reference = reference_of(way_of(model, kwargs))
    assert not reference.check(way_of(model, kwargs, noted)).reason
    assert not reference.check(replace(way_of(model, kwargs, noted), is_checked_alone=True)).reason
    (here, is_shared), (alone, is_alone_shared) = threads
    assert here == threading.get_ident() != alone and is_shared and not is_alone_shared
    peers = training_peers(
        types.SimpleNamespace(model=model), functools.partial(way_of, model, kwargs), on_cuda=False, max_autotune=True
    )
    assert [peer.make().is_checked_alone for peer in peers if peer.is_compiled] == [True, True]


@pytest.mark.slow
def test_torch_compile_of_both_passes_is_timed_and_checked():
    model, kwargs = made(0.1)
    loaded = types.SimpleNamespace(model=model)
    peers = training_peers(loaded, functools.partial(way_of, model, kwargs), on_cuda=False, max_autotune=True)
    _, _, default, autotuned = measured(model, kwargs, peers[::2])
    for row in (default, autotuned):
        assert row.is_right and row.check.oracle == OTHER_NUMBERS and row.with_optimizer, row
    torch.compiler.reset()


@pytest.mark.gpu
def test_ligers_own_kernels_and_loss_train_a_tiny_llama_as_eager_does():
    pytest.importorskip("liger_kernel", reason="needs liger-kernel: pip install liger-kernel")
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 1000}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, tie_word_embeddings=True)
    model = transformers.LlamaForCausalLM(config).to("cuda", torch.bfloat16).train()
    ids = torch.randint(1000, (2, 128), device="cuda")
    kwargs = {"input_ids": ids, "labels": ids, "use_cache": False}
    found = reference_of(way_of(model, kwargs)).check(way_of(model, kwargs, liger_model(model)))
    assert found.is_passed and found.oracle == "float32" and found.gradients == len(list(model.parameters())), found
    assert liger_model(model)(**kwargs).logits is None and model(**kwargs).logits is not None
    optimizer = copied_adamw(model, on_cuda=True)
    optimizer.after(way_of(model, kwargs, liger_model(model)))()
