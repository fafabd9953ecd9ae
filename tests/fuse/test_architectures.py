"""Models we did not write: every preset architecture in a tiny configuration, and modules that users write by hand.

Each is captured, planned, built with the C++ backend whatever it gains, checked chain by chain, and run whole with all fusions
and all graph passes in place, twice, against eager.
"""

from __future__ import annotations

import contextlib
import fnmatch
import inspect
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from fusion_advisor.capture.graph.op_records import describe
from fusion_advisor.capture.graph.tracer import capture_regions
from fusion_advisor.codegen.common.interface import Tuning
from fusion_advisor.codegen.registry import backend
from fusion_advisor.fuse.decide.session import Bench, replaced_sites
from fusion_advisor.fuse.live.fused_model import FusedModel
from fusion_advisor.fuse.live.model_check import check_whole_model, named_tensors
from fusion_advisor.fuse.passes.registry import PASSES
from fusion_advisor.fuse.plan.plan import make_plan
from fusion_advisor.fuse.rewrite.graph_rewriter import fused_call
from fusion_advisor.fuse.stages import epilogue_sites, gemm_sites
from fusion_advisor.library.patterns import library_patterns
from fusion_advisor.library.philox_dropout import seeded_dropout
from fusion_advisor.records import (
    Bandwidth,
    Capture,
    DataQuality,
    Environment,
    Launch,
    Match,
    NoMatch,
    OpClass,
    RenderedKernel,
    Timing,
)
from fusion_advisor.runtime.torch_internals import aten_ops
from fusion_advisor.verify import check_chain
from fusion_advisor.workload.architecture import auto_class
from fusion_advisor.workload.load import describe_live
from fusion_advisor.workload.preset import find_preset

SMALL = {
    **dict.fromkeys(("hidden_size", "n_embd", "dim", "d_model", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "hidden_dim", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_key_value_heads"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("head_dim", "d_kv", "query_pre_attn_scalar", "num_mel_bins"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_target_positions"), 64),
    "vocab_size": 120, "image_size": 32, "patch_size": 8, "embedding_size": 32, "max_source_positions": 20,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def patterns():
    return library_patterns()[0]


def shrunk(config):
    small = {key: SMALL[key] for key, value in config.items() if key in SMALL and value is not None}
    nested = {key: shrunk(config[key]) for key in ("text_config", "vision_config") if key in config}
    return {**config, **small, **nested}


def tiny(model_id, dtype=torch.float32, batch=2, seq=12):
    """A preset's architecture with its own arithmetic and hardly any weights, and the inputs of one step."""
    from transformers import AutoConfig

    fields = shrunk(find_preset(model_id).config)
    kind = fields.pop("model_type")
    if kind in ("convnext", "resnet"):
        fields |= {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 16, 24, 24], "embedding_size": 16}
    config = AutoConfig.for_model(kind, **fields)
    torch.manual_seed(0)
    model = auto_class(config, model_id=model_id, trust_remote_code=False).from_config(config).eval().to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():  # norms of ones and zeros would hide what is left out
            parameter.add_(torch.randn_like(parameter) * 0.02)
    names = inspect.signature(model.forward).parameters
    ids, size = torch.randint(3, 100, (batch, seq)), 64 if kind in ("convnext", "resnet") else 32
    inputs = {"pixel_values": torch.randn(batch, 3, size, size, dtype=dtype)} if "pixel_values" in names else {}
    if kind == "whisper":
        inputs = {"input_features": torch.randn(batch, 16, 40, dtype=dtype), "decoder_input_ids": ids}
    elif "input_ids" in names:
        inputs["input_ids"] = ids
        if kind == "t5":
            inputs["decoder_input_ids"] = ids
    if "use_cache" in names and hasattr(config, "use_cache"):
        inputs["use_cache"] = False
    return describe_live(model, (), inputs)


def as_capture(live, record):
    """A capture in which every op costs the same: what is tested here does not depend on time."""
    ops = []
    for region in live.regions:
        ops += describe(region, first_index=len(ops))[0]
    launches = tuple(
        Launch(kernel_name="op", op_index=op.index, duration_ns=1_000_000)
        for op in ops
        if op.role == "op" and op.op_class is not OpClass.VIEW
    )
    return Capture(
        workload=record,
        environment=Environment(device_name="cpu", device_kind="cpu"),
        ops=tuple(ops),
        launches=launches,
        eager_launches=launches,
        eager_step=Timing(times_ns=(1,), median_ns=1, ci_low_ns=1, ci_high_ns=1, method="wall"),
        bandwidth=Bandwidth(copy_bytes_per_s=10**12, launch_ns=1),
        quality=DataQuality(
            launches=0, kernels=0, joined_share=1.0, eager_device_ns=1, captured_device_ns=1, reconciliation="",
            graph_breaks=tuple(live.breaks),
        ),
    )  # fmt: skip


class Fused:
    """A workload with everything that was planned in place."""

    def __init__(self, loaded, patterns, tmp_path, in_gemms=()):
        torch._dynamo.reset()
        self.loaded = loaded
        with torch.no_grad():
            self.live = capture_regions(loaded.model, loaded.args, loaded.kwargs)
        self.plan = make_plan(as_capture(self.live, loaded.record), patterns, min_share=0, top=1000)
        bench = Bench(self.live, on_cuda=False)
        bench.observe(self.plan.fusions)
        built = [self._built(bench, fusion, tmp_path, seed) for seed, fusion in enumerate(self.plan.fusions)]
        self.variant = bench.build(built, tuple(PASSES), self._in_gemms(bench, built, in_gemms) if in_gemms else [])
        # Folding takes whole chains away where they depend on buffers alone (rotary tables).
        self.replaced = replaced_sites(bench.build(built, [name for name in PASSES if not name.startswith("fold-")]))
        for module in self.variant.modules:
            module.graph.lint()
        self.fused = FusedModel(loaded.model, self.live.regions, self.variant.modules, loaded.args, loaded.kwargs)

    @staticmethod
    def _built(bench, fusion, tmp_path, seed):
        maker = backend("cpp")
        rendered = maker.render(fusion.program, fusion.header, tuning=Tuning(), fast_math=False)
        kernel = maker.build(rendered, tmp_path / f"{fusion.id}{rendered.suffix}")
        chain, roots = bench.first_site(fusion)
        outputs = [bench.ops[index].outputs[0] for index in fusion.sites[0].outputs]
        inputs = [check_chain.layout_of(root) for root in roots]
        launch = kernel.bind(fusion.program)
        call = fused_call(rendered.entry, launch, inputs, outputs, in_place=chain.in_place, is_poisoned=True)
        numerics = check_chain.check_chain(chain, call, roots, seed=seed)
        assert numerics.is_passed, f"{fusion.match.kernel}: {numerics}"
        record = RenderedKernel(name=rendered.entry, backend="cpp", path="", source="", origin="", build_ns=0, tuning="")
        installed = bench.install(fusion, record, kernel)
        assert installed.refusals == ()
        return installed

    @staticmethod
    def _in_gemms(bench, built, expected):
        """Activations that the GEMMs before them compute, each checked against the ops that it stands for."""
        placed, _ = epilogue_sites.find_places(bench, [fusion.planned for fusion in built])
        assert tuple(one.call.__name__ for one in placed) == expected
        gemm_sites.observe(bench, [one.place for one in placed])
        assert epilogue_sites.check(bench, placed).is_passed
        return [epilogue_sites.built_of(placed)]

    def check(self):
        """All sites replaced, and the model right twice: what a first call wrote must not spoil a second."""
        assert self.replaced == {fusion.id: len(fusion.sites) for fusion in self.plan.fusions}
        model, args, kwargs = self.loaded.model, self.loaded.args, self.loaded.kwargs
        with torch.no_grad():
            for _ in range(2):
                check = check_whole_model(
                    self.loaded, lambda: model(*args, **kwargs), lambda: self.fused.dispatch(*args, **kwargs), self.live.written
                )
                assert check.is_passed, check
        assert self.fused.fallbacks == {}

    def sites_of(self, wanted):
        """How many sites the kernels of this name (a shell pattern) have."""
        return sum(len(fusion.sites) for fusion in self.plan.fusions if fnmatch.fnmatchcase(fusion.match.kernel, wanted))

    @property
    def refusals(self):
        return {answer.code: answer.reason for answer in self.plan.answers if isinstance(answer, NoMatch)}


# ---------------------------------------------------------------------- presets

LLAMA = {"add_rmsnorm": 4, "embedding_rmsnorm": 1, "rope_qk": 2, "swiglu": 2}
PRESETS = {
    "openai-community/gpt2": {"gelu_tanh": 2, "add_layernorm": 4},
    "Qwen/Qwen2.5-0.5B": LLAMA,
    # The norm of queries and keys and their rotation are one kernel.
    "Qwen/Qwen3-0.6B": {"add_rmsnorm": 4, "embedding_rmsnorm": 1, "swiglu": 2, "qk_norm_rope": 4},
    "meta-llama/Llama-3.2-1B": LLAMA,
    "mistralai/Mistral-7B-v0.1": LLAMA,
    # Gate and up are halves of one tensor, and only a part of each head is rotated in some variants.
    "microsoft/Phi-3-mini-4k-instruct": {"add_rmsnorm": 4, "embedding_rmsnorm": 1, "swiglu_packed": 2, "rope": 4},
    # Norm, residual and next norm in one; scores capped, masked and normalised in one; logits capped.
    "google/gemma-2-2b": {
        "pow_mean_add_rsqrt_mul_add_*": 4, "mul_div_tanh_mul_add_softmax_*": 2, "rope_qk": 2, "geglu_tanh": 2, "softcap": 1,
    },
    "EleutherAI/pythia-160m": {"mul_neg_cat_mul_add_cat_*": 4, "add_add_layer_norm_layer_norm_*": 1},
    "facebook/opt-125m": {"add_layernorm": 4, "embedding_embedding_add_layer_norm_*": 1},
    "google-bert/bert-base-uncased": {"add_layernorm": 4, "gather_embedding_embedding_add_embedding_add_*": 1},
    # The places of the tokens are counted up by a cumsum, and all that follows it is one kernel.
    "FacebookAI/roberta-base": {"add_layernorm": 4, "ne_to_*": 1, "type_as_add_mul_to_add_gather_*": 1},
    "distilbert/distilbert-base-uncased": {"add_layernorm": 4},
    "albert/albert-base-v2": {"gelu_tanh": 2, "add_layernorm": 4},
    "google/vit-base-patch16-224": {"add_layernorm": 4, "cat_add_layer_norm_*": 1},
    "facebook/dinov2-small": {"mul_add_layer_norm_*": 4, "cat_add_layer_norm_*": 1},
    "openai/clip-vit-base-patch32": {"quick_gelu": 4, "add_layernorm": 7, "pow_sum_pow_div_*": 2},
    "facebook/convnext-tiny-224": {},
    "microsoft/resnet-50": {"batch_norm_relu_*": 9},
    "openai/whisper-tiny": {"add_layernorm": 9},
    "google-t5/t5-small": {"add_rmsnorm": 9, "embedding_rmsnorm": 2},
    "google/flan-t5-base": {"add_rmsnorm": 10, "embedding_rmsnorm": 2, "geglu_tanh": 4},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("model_id", PRESETS)
def test_preset_architecture(model_id, patterns, tmp_path):
    run = Fused(tiny(model_id), patterns, tmp_path)
    assert len(run.live.regions) == 1
    assert run.live.breaks == []
    for wanted, sites in PRESETS[model_id].items():
        assert run.sites_of(wanted) >= sites, [(fusion.match.kernel, len(fusion.sites)) for fusion in run.plan.fusions]
    run.check()


@pytest.mark.slow
@pytest.mark.parametrize("model_id", ["Qwen/Qwen3-0.6B", "google/gemma-2-2b", "google-bert/bert-base-uncased"])
def test_preset_architecture_in_bf16(model_id, patterns, tmp_path):
    run = Fused(tiny(model_id, dtype=torch.bfloat16), patterns, tmp_path)
    assert run.plan.fusions
    run.check()


IN_GEMMS = {
    "EleutherAI/pythia-160m": ("linear_gelu_erf",) * 2,
    "facebook/opt-125m": ("linear_relu",) * 2,
    "google-bert/bert-base-uncased": ("linear_gelu_erf",) * 2,
    "facebook/convnext-tiny-224": ("linear_gelu_erf",) * 2,  # its later stages have too few rows
    "openai/whisper-tiny": ("linear_gelu_erf",) * 4,
}


@pytest.mark.slow
@pytest.mark.usefixtures("cpu_epilogue")
@pytest.mark.parametrize("model_id", IN_GEMMS)
def test_preset_architecture_with_activations_in_its_gemms(model_id, patterns, tmp_path):
    """Of the two GELUs a CPU's epilogue has the one with erf."""
    run = Fused(tiny(model_id, batch=8), patterns, tmp_path, in_gemms=IN_GEMMS[model_id])
    calls = [node.name.rstrip("_0123456789") for module in run.variant.modules for node in module.graph.nodes]
    assert all(calls.count(name) == IN_GEMMS[model_id].count(name) for name in set(IN_GEMMS[model_id]))
    run.check()


CONVOLUTIONS = {
    # Behind each convolution of a block its norm, behind the three between stages the next convolution.
    "facebook/convnext-tiny-224": {"add_layer_norm_*": 5, "add_????": 3, "gelu_erf": 4},
    "google/vit-base-patch16-224": {"add_cat_add_layer_norm_*": 1, "gelu_erf": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_id", CONVOLUTIONS)
def test_biases_of_convolutions_join_the_chains_behind_them(model_id, dtype, patterns, tmp_path, monkeypatch):
    monkeypatch.setattr(aten_ops, "adds_bias_after_convolution", lambda *_: True)
    run = Fused(tiny(model_id, dtype=dtype), patterns, tmp_path)
    found = {wanted: run.sites_of(wanted) for wanted in CONVOLUTIONS[model_id]}
    assert found == CONVOLUTIONS[model_id], [(fusion.match.kernel, len(fusion.sites)) for fusion in run.plan.fusions]
    run.check()
    untouched = Bench(run.live, on_cuda=False).build((), ())
    nodes = [node for module in untouched.modules for node in module.graph.nodes if node.op == "call_function"]
    assert all(node.args[2] is not None for node in nodes if "conv" in str(node.target))
    for region, module in zip(run.live.regions, untouched.modules, strict=True):
        for one, other in zip(region.original(*region.example_args), module(*region.example_args), strict=True):
            assert torch.equal(one, other)


def test_biases_of_gemms_join_the_chains_behind_them(patterns, tmp_path, slow_biases):
    run = Fused(tiny("openai-community/gpt2"), patterns, tmp_path)
    assert run.sites_of("bias_gelu_tanh") == 2
    assert run.sites_of("add_add_layer_norm_*") == 4
    run.check()
    bench = Bench(run.live, on_cuda=False)
    for passes, gemms in (((), "addmm"), (("split-biases",), "mm")):
        (module,) = bench.build((), passes).modules
        ops = [str(node.target) for node in module.graph.nodes if node.op == "call_function"]
        assert ops.count(f"aten.{gemms}.default") == 8
        (region,) = run.live.regions
        for one, other in zip(region.original(*region.example_args), module(*region.example_args), strict=True):
            torch.testing.assert_close(one, other)


# ---------------------------------------------------------------------- modules that users write


class Module(nn.Module):
    """A forward pass from a function, with a linear layer and buffers at hand."""

    def __init__(self, forward, buffers=()):
        super().__init__()
        torch.manual_seed(0)
        self.function, self.linear = forward, nn.Linear(16, 16)
        for number, buffer in enumerate(buffers):
            self.register_buffer(f"buffer{number}", buffer.clone())

    def forward(self, *args):
        return self.function(self, *args)


def rand(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ints(low, high, *shape, dtype=torch.int64, seed=0):
    return torch.randint(low, high, shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def mlp(self, x):
    return self.linear(F.gelu(self.linear(x) + 1.0) * 2)


def attention(self, q, k, v, mask):
    return torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(16) + mask, -1) @ v


def masked_softmax(self, x, mask):
    return torch.softmax((x * 0.5).masked_fill(mask, -1e9), -1)


def convnet(self, x):
    x = F.batch_norm(x * 2, self.buffer0, self.buffer1, self.buffer2, self.buffer3, False, 0.1, 1e-5)
    return F.silu(F.group_norm(F.relu(x), 4, self.buffer2, self.buffer3)) * 2


def write_through_a_view(self, x, y):
    t = x * y
    view = t.view(-1)
    t.add_(1)
    return (view * 2).sin() + 1, t


def write_to_a_view(self, x, y):
    t = x * y
    view = t.view(8, 8)
    z = t + y
    view.mul_(2)
    return z * 2 + t, view * 3


def cache_by_index(self, x, place):
    key = x[:1] * 2 + 1
    self.buffer0.index_copy_(0, place, key)
    return (self.buffer0 * 0.5 + key).tanh(), self.buffer0.sum(-1)


def cache_by_slice(self, x):
    before = self.buffer0 * 2
    row = x * 3 + 1
    self.buffer0[2:4] = row
    return before + (self.buffer0 + 1), row.exp()


def in_place_activations(self, x):
    hidden = self.linear(x)
    hidden.relu_()
    hidden.mul_(2)
    gate = hidden + 1
    hidden.add_(gate)
    return hidden * 2 + gate


def nested_outputs(self, x, y):
    a = x * y + 1
    return {"a": a, "nested": (a.relu() * 2, [a.view(-1) + 1, x]), "input": x}


def aliasing_outputs(self, x, y):
    a = x * y + 1
    return a, a.t(), a[:2], a[:2] * 2


def constant_outputs(self, x):
    positions, zeros = torch.arange(16) * 2 + 1, torch.zeros(3, 16)
    zeros[1].add_(x[0])
    return positions, x * positions + zeros, zeros


def read_through_views(self, x):
    a = (x * 2 + 1).tanh()
    return a.t() @ a, a.view(8, 8).sum(-1)


def broadcast(self, a, b, c):
    return (a * b + c).relu() * a


def with_its_transpose(self, a):
    return (a + a.t()) * 2 + a.t() * a


def two_scalars(self, x, a, b):
    return (x * a + b).tanh() * b


def integers(self, i, j, x):
    k = (i * 3 + j - 2).clamp(-5, 5)
    chosen = (k > 1) & (j != 3)
    return k, chosen, x * chosen + k, (chosen | (i < 0)).logical_not().int() * 2


def wrapping_bytes(self, i, j):
    t = i * j + i
    return t.float() * 0.5 + 1, (t > 100).float() + t, (t - j).to(torch.int64) + 1


def wrapping_int32(self, i, j):
    t = i + j
    return t.to(torch.int64) * 2, (t * t).double() + 1, (-t).abs() > 5


def booleans(self, a, b, x):
    c = a + b
    d = c * a
    return d, x * d + 1, (c ^ a).float() * 2, torch.where(d, c, a), c.to(torch.int64) + a, ~d & c


def promotions(self, a, b, i):
    return (a + b) * i + True, a * 2.5 + i, (a * b).to(torch.bfloat16) + 1


def choices(self, x, mask):
    return torch.where(mask, x * 2, 0.0) + 1, torch.where(mask, 1.5, -x) * 2, torch.where(mask, 1.0, 2.0) * x


def powers(self, x):
    return x**-1 * 2 + x**-2, x**-0.5 + x**-3.5, (2.0**x) * 3, x**0.5 + 1, (x**4 - 1) * x**3


def split_inputs(self, x):
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up, x.split([10, 22], -1)[1] * 2 + 1


def split_inside(self, x):
    gate, up = (x * 2 + 1).chunk(2, -1)
    return F.silu(gate) * up


def unbound(self, x):
    a, b, c = (x * 2).unbind(1)
    return a * b + c, x[:, 0] * x[:, 1] + 1, x.select(1, 2).relu() * 2


def cat_of_single_columns(self, x, first, last):
    return torch.cat([first, x, last], -1) * 2 + 1, torch.cat([x * 2, (x[:, :1] + 1) * 3], -1) * 2


def cat_with_an_empty_cache(self, x, cache):
    return torch.cat([cache, x, x * 2], -1).tanh() * 2


def nothing_at_all(self, x, y):
    return (x * y + 1).tanh(), F.layer_norm(x + y, (16,))


def input_returned(self, x):
    return x, x.view(8, 8), x * 2 + 1


def norms_by_hand(self, x):
    mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
    return (
        (x - mean) / torch.sqrt(variance + 1e-5) * 2 + x.std(-1, keepdim=True),
        F.normalize(x, dim=-1) * 3,
        torch.logsumexp(x, -1, keepdim=True) + x,
    )


def activations(self, x):
    return (
        F.softplus(x) * 2, F.mish(x) * 2, F.elu(x) + 1, F.selu(x) + 1, F.celu(x, 0.7) + 1, F.hardtanh(x) + 1, F.relu6(x) * 2,
        F.hardswish(x) + 1, F.hardsigmoid(x) + 1, F.logsigmoid(x) * 2, F.threshold(x, 0.1, 0.5) + 1, F.glu(x, -1) * 2,
        F.leaky_relu(x, 0.2) + 1, F.glu(x, 0) + 2,
    )  # fmt: skip


def arithmetic(self, x, w):
    return (
        x.square() + 1, x.clamp_min(0.1) * 2, x.clamp_max(0.5) + 1, torch.lerp(x, w, w) + 1, torch.lerp(x, w, 0.3) * 2,
        torch.addcdiv(x, w, w + 1, value=0.5) * 2, torch.isnan(x) | torch.isinf(x), torch.max(x, w) * 2,
        torch.rsub(x, w, alpha=3) * 2, torch.add(x, w, alpha=2) * 0.5,
    )  # fmt: skip


def bits_of_floats(self, x):
    return (x.view(torch.int32) + 1) * 2, (x * 2).view(torch.int32) & 255


def complex_inside(self, x):
    c = torch.view_as_complex(x)
    return torch.view_as_real(c * c) * 2 + 1, c.abs() * 2 + 1, c.real * 2 + 1


def chains_that_feed_each_other(self, x, y):
    a = (x.sum(-1, keepdim=True) * 0.1).tanh() + 1
    b = (y * 2).sum(0) + 1
    left = (x * a) * b
    right = y * b + a.view(1, 4).sum()
    return left.softmax(-1) + right, right.softmax(-1) * left


def norm_then_rotation(self, q, weight, table):
    normed = F.layer_norm(q, (16,), weight).transpose(1, 2)
    rotated = torch.cat([-normed[..., 8:], normed[..., :8]], -1)
    return normed * table + rotated * table.sin()


def batch_of_one(self, x):
    return F.layer_norm((x.view(5, 16) * 2 + 1).view(1, 5, 16) + x, (16,))


def tied_weights(self, x):
    for _ in range(2):
        x = self.linear(F.gelu(x * 2) + 1)
    return x @ self.linear.weight.t()


def doubles(self, a, b):
    return (a * b + 1).tanh() * 2, b * 2 + torch.tensor(1.5, dtype=torch.float64)


def dropout_in_eval(self, x):
    dropped = F.dropout(x * 2, 0.5, False)
    return (dropped + 1) * dropped


X, Y = rand(4, 16, seed=1), rand(4, 16, seed=2)
IMAGE = rand(2, 16, 6, 6)
CHANNELS = (rand(16), rand(16).abs() + 0.5, rand(16), rand(16))
USERS = {
    mlp: (X,),
    attention: (rand(2, 4, 8, 16), rand(2, 4, 8, 16, seed=1), rand(2, 4, 8, 16), rand(2, 1, 8, 8).clamp(max=0) * 1e4),
    masked_softmax: (rand(2, 4, 8, 8), rand(2, 1, 8, 8) < -0.5),
    write_through_a_view: (X, Y),
    write_to_a_view: (X, Y),
    in_place_activations: (X,),
    nested_outputs: (X, Y),
    aliasing_outputs: (X, Y),
    constant_outputs: (rand(3, 16),),
    read_through_views: (X,),
    broadcast: (rand(4, 1, 16), rand(5, 1), rand(16)),
    with_its_transpose: (rand(16, 16),),
    two_scalars: (X, torch.tensor(2.5), torch.tensor(3)),
    integers: (ints(-9, 9, 4, 16), ints(0, 9, 4, 16), X),
    wrapping_bytes: (ints(0, 255, 4, 16, dtype=torch.uint8), ints(0, 255, 4, 16, dtype=torch.uint8, seed=1)),
    wrapping_int32: (ints(-(2**31), 2**31 - 1, 4, 16, dtype=torch.int32), ints(0, 2**31 - 1, 4, 16, dtype=torch.int32)),
    booleans: (X > 0, Y > 0, X),
    promotions: (X.bfloat16(), Y, ints(0, 5, 4, 16)),
    choices: (X, Y > 0),
    powers: (X.abs() + 0.1,),
    split_inputs: (rand(4, 32),),
    split_inside: (rand(4, 32),),
    unbound: (rand(2, 3, 16),),
    cat_of_single_columns: (rand(4, 33), rand(4, 1), rand(4, 1, seed=1)),
    cat_with_an_empty_cache: (rand(4, 5), torch.empty(0)),
    nothing_at_all: (rand(0, 16), rand(0, 16)),
    input_returned: (X,),
    norms_by_hand: (X,),
    activations: (X * 3,),
    arithmetic: (X * 3, Y.abs() + 0.1),
    bits_of_floats: (X,),
    complex_inside: (rand(4, 8, 2),),
    chains_that_feed_each_other: (X, Y),
    norm_then_rotation: (rand(2, 8, 4, 16), rand(16), rand(8, 16)),
    batch_of_one: (rand(1, 5, 16),),
    tied_weights: (X,),
    doubles: (X.double(), Y),
    dropout_in_eval: (X,),
}  # fmt: skip


@pytest.mark.parametrize("function", USERS, ids=lambda function: function.__name__)
def test_user_module(function, patterns, tmp_path):
    run = Fused(describe_live(Module(function).eval(), USERS[function], {}), patterns, tmp_path)
    assert run.live.breaks == []
    assert run.plan.fusions
    run.check()


@pytest.mark.parametrize(
    "inputs",
    [
        (rand(1, 16).expand(4, 16), Y),
        (rand(16, 4).t(), Y),
        (rand(8, 16)[::2], rand(4, 32)[:, ::2]),
        (rand(5, 16)[1:], rand(4, 17)[:, 1:]),
        (X, X),
    ],
    ids=["expanded", "transposed", "strided", "offset", "same tensor"],
)
def test_inputs_of_any_layout(inputs, patterns, tmp_path):
    run = Fused(describe_live(Module(lambda _, a, b: (a * b + a).sin() * b).eval(), inputs, {}), patterns, tmp_path)
    assert [len(chain.ops) for chain in run.plan.chains] == [4]
    run.check()


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_convnet(memory_format, patterns, tmp_path):
    image = IMAGE.to(memory_format=memory_format)
    run = Fused(describe_live(Module(convnet, CHANNELS).eval(), (image,), {}), patterns, tmp_path)
    chains = [chain.ops for chain in run.plan.chains if len(chain.ops) > 1]
    assert chains == [("mul", "batch_norm", "relu", "group_norm", "silu", "mul")]
    run.check()


@pytest.mark.parametrize(
    ("function", "inputs"), [(cache_by_index, (rand(2, 16), torch.tensor([3]))), (cache_by_slice, (rand(2, 16),))]
)
def test_a_mutated_buffer_ends_as_eager_leaves_it(function, inputs, patterns, tmp_path):
    model = Module(function, (torch.zeros(8, 16),)).eval()
    run = Fused(describe_live(model, inputs, {}), patterns, tmp_path)
    results = []
    for call in (lambda: model(*inputs), lambda: run.fused.dispatch(*inputs)):
        with torch.no_grad():
            model.buffer0.zero_()
            first = [tensor.clone() for _, tensor in named_tensors(call())]
            second = [tensor.clone() for _, tensor in named_tensors(call())]
        results.append([*first, *second, model.buffer0.clone()])
    for eager, fused in zip(*results, strict=True):
        torch.testing.assert_close(fused, eager)
    assert replaced_sites(run.variant)


def test_inputs_that_share_memory(patterns, tmp_path):
    def write_to_one(self, whole, part):
        before = whole * 2
        kept = part.sum(-1, keepdim=True) + 1
        part.mul_(3)
        return before + whole, kept * part

    model = Module(write_to_one).eval()

    def inputs():
        whole = rand(4, 16)
        return whole, whole[1:3]

    run = Fused(describe_live(model, inputs(), {}), patterns, tmp_path)
    with torch.no_grad():
        eager, fused = model(*inputs()), run.fused.dispatch(*inputs())
    for one, other in zip(fused, eager, strict=True):
        torch.testing.assert_close(one, other)


def test_graph_breaks_are_reported_and_every_region_is_fused(patterns, tmp_path):
    def breaks(self, x):
        a = (x * 2 + 1).tanh()
        print(end="")  # noqa: T201
        b = (a * 3 + 1).tanh()
        return b * 2 + 1 if b.sum() > -1e9 else b.relu() * 3

    with contextlib.redirect_stdout(None):
        run = Fused(describe_live(Module(breaks).eval(), (X,), {}), patterns, tmp_path)
        assert len(run.live.regions) == 3
        assert len(run.live.breaks) == 2
        assert all(found.reason and "test_architectures.py" in found.source for found in run.live.breaks)
        assert all(any("fusion_id" in node.meta for node in module.graph.nodes) for module in run.variant.modules)
        run.check()


def test_live_dropout_is_refused_with_its_reason(patterns):
    class Dropping(nn.Module):
        def forward(self, x):
            return F.dropout((x * 2 + 1).relu(), 0.5, True) * 3 + 1

    torch._dynamo.reset()
    loaded = describe_live(Dropping(), (X,), {})
    with torch.no_grad():
        live = capture_regions(loaded.model, loaded.args, loaded.kwargs)
    plan = make_plan(as_capture(live, loaded.record), patterns, min_share=0)
    assert [chain.ops for chain in plan.chains] == [("mul", "add", "relu"), ("mul", "add")]
    assert all(isinstance(answer, Match) for answer in plan.answers)


def test_seeded_dropout_in_a_model_becomes_the_librarys_kernel(patterns, tmp_path):
    class Block(nn.Module):
        def forward(self, x, residual, seed):
            return residual + seeded_dropout(x, seed, 0.25)

    inputs = (torch.randn(33, 40), torch.randn(33, 40), torch.tensor([5]))
    run = Fused(describe_live(Block().eval(), inputs, {}), patterns, tmp_path)
    assert [answer.kernel for answer in run.plan.answers] == ["dropout_add"]
    assert dict(run.plan.answers[0].constants) == {"p": 0.25}
    run.check()
