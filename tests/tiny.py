"""Small real models, their captures and plans, made once per process; and kernels that the evaluator stands in for.

Everything is seeded and runs on the CPU. Thread pools cost milliseconds on tensors this small, so one thread is used.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from fusion_advisor.capture.graph.op_records import describe
from fusion_advisor.capture.graph.retrace import trace
from fusion_advisor.capture.graph.tracer import Region
from fusion_advisor.capture.profile import profile_model
from fusion_advisor.capture.unchanged_step import Measurement
from fusion_advisor.chains.find import find_groups
from fusion_advisor.fuse.decide.session import Bench
from fusion_advisor.fuse.live.fused_model import FusedModel
from fusion_advisor.fuse.plan.plan import judge_with, make_plan
from fusion_advisor.library.patterns import library_patterns
from fusion_advisor.records import Bandwidth, Environment, Launch, RenderedKernel
from fusion_advisor.workload.load import describe_live
from fusion_advisor.workload.static_cache import cache_name, filled_cache
from tests.kernel_cases.evaluate import evaluate

BANDWIDTH = Bandwidth(copy_bytes_per_s=10**12, launch_ns=1)
"""So fast that every chain could still be faster: tiny tensors on a CPU would else be refused for saving nothing."""
ENVIRONMENT = Environment(device_name="cpu", device_kind="cpu")
LAYERS = 2


def gpt2():
    """A GPT-2 of two layers and the inputs of one step."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=LAYERS, n_head=4, n_embd=64, vocab_size=200, n_positions=64, bos_token_id=0, eos_token_id=0, pad_token_id=0
    )
    return GPT2LMHeadModel(config).eval(), {"input_ids": torch.randint(1, 200, (2, 16)), "use_cache": False}


def qwen2():
    """A Qwen2 of two layers with shared KV heads, and the inputs of one step."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        num_hidden_layers=LAYERS, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=200, max_position_embeddings=64, rms_norm_eps=3e-6, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).eval(), {"input_ids": torch.randint(1, 200, (2, 16)), "use_cache": False}


def llama():
    """A Llama of two layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=LAYERS, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=200, max_position_embeddings=64, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval(), {"input_ids": torch.randint(1, 200, (2, 16)), "use_cache": False}


def decode_step(model, tokens=16, *, room=64, batch=2):
    """The keyword arguments of a decode step on a static cache that holds ``tokens`` tokens; the same ones in every call."""
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(1, 200, (batch, tokens + 1), generator=generator)
    cache, _ = filled_cache(model, ids[:, :-1], maximum=room, phase="decode", model_id="tiny")
    return {"input_ids": ids[:, -1:].clone(), cache_name(model): cache, "use_cache": True}


def cache_in(kwargs):
    """The KV cache among a call's keyword arguments, under whichever name transformers gives it."""
    return next(value for value in kwargs.values() if hasattr(value, "get_seq_length"))


class Calling(torch.nn.Module):
    """A module that calls a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


class Toy(torch.nn.Module):
    """Two blocks of linear, written-out GELU and LayerNorm with a residual: three kinds of chains, captured in no time."""

    def __init__(self, width=32, blocks=2):
        super().__init__()
        self.lins = torch.nn.ModuleList([torch.nn.Linear(width, width) for _ in range(blocks)])
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(width) for _ in range(blocks)])
        self.register_buffer("scale", torch.full((width,), 0.5))

    def forward(self, x):
        for lin, norm in zip(self.lins, self.norms, strict=True):
            u = lin(x)
            act = 0.5 * u * (1.0 + torch.tanh(0.7978845608028654 * (u + 0.044715 * torch.pow(u, 3.0))))
            x = norm(act * self.scale + x)
        return x


def toy():
    """A Toy and its positional input."""
    torch.manual_seed(0)
    return Toy().eval(), (torch.randn(6, 32),)


@functools.cache
def profiled(name):
    """Return (model, capture, live) of ``gpt2``, ``qwen2`` or ``toy``."""
    model, inputs = {"gpt2": gpt2, "qwen2": qwen2, "toy": toy}[name]()
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    return (model, *profile_live(model, args, kwargs))


def profile_live(model, args=(), kwargs=None):
    """Profile a live model quickly; return (capture, live)."""
    loaded = describe_live(model, args, kwargs or {})
    return profile_model(
        model,
        loaded.args,
        loaded.kwargs,
        workload=loaded.record,
        environment=ENVIRONMENT,
        bandwidth=BANDWIDTH,
        how=Measurement(warmup=1, runs=5, budget_s=0.05),
    )


@functools.cache
def patterns():
    """The library's patterns."""
    return library_patterns()[0]


@functools.cache
def planned(name):
    """Return the plan of ``profiled(name)``."""
    return make_plan(profiled(name)[1], patterns(), min_share=0.0)


def region_of(function, *inputs):
    """Trace a function; return (region, ops, index_of)."""
    graph = trace(function, inputs)
    names = tuple(f"x{number}" for number in range(len(inputs)))
    region = Region(index=0, graph=graph, original=graph, names=names, roles=("input",) * len(inputs), example_args=inputs)
    return region, *describe(region)


def groups_of(function, *inputs):
    """Return the ops of a function and its groups."""
    _, ops, _ = region_of(function, *inputs)
    return ops, find_groups(ops, lambda members, outputs: judge_with(ops, members, outputs))


def names(ops, members):
    """Short names of ops, views left out."""
    return [ops[index].target.removeprefix("aten.").split(".")[0] for index in members if ops[index].op_class != "view"]


def launches(ops, duration_ns=1000):
    """One launch for each op that computes."""
    return tuple(
        Launch(kernel_name=op.target, op_index=op.index, duration_ns=duration_ns, category=op.op_class.value)
        for op in ops
        if op.op_class not in ("input", "view") and op.role == "op"
    )


@dataclass
class EvaluatedKernel:
    """Stands for a compiled kernel: the fp64 evaluator of the backends' tests computes what the Program says."""

    spoil: float = 0.0
    """Added to every output."""
    build_ns: int = 1
    tuning: str = ""

    def bind(self, program):
        inputs = sum(1 for operand in program.operands if not operand.is_output)

        def launch(*tensors):
            flat = [_flat(tensor) for tensor in tensors]
            results = evaluate(program, *flat[:inputs], into=flat[inputs:])
            for out, result in zip(flat[inputs:], results, strict=True):
                spoilt = result + self.spoil if self.spoil else result  # a zero keeps its sign
                out[: result.numel()] = spoilt.to(out.dtype)

        return launch


def _flat(tensor):
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((reach if tensor.numel() else 0,), (1,))


def evaluated(bench, fusion, spoil=0.0):
    """Install a planned fusion with an evaluated kernel."""
    kernel = RenderedKernel(name=f"fa_{fusion.match.kernel}", backend="none", path="", source="", origin="")
    return bench.install(fusion, kernel, EvaluatedKernel(spoil))


def bench_of(live, plan):
    """A bench that has observed a plan's fusions, and all of them installed."""
    bench = Bench(live, on_cuda=False)
    bench.observe(plan.fusions)
    return bench, [evaluated(bench, fusion) for fusion in plan.fusions]


def fuse(model, args=(), kwargs=None, *, spoil=0.0):
    """A FusedModel (not applied yet) with every chain of the model fused, whether it pays or not."""
    capture, live = profile_live(model, args, kwargs or {})
    plan = make_plan(capture, patterns(), min_share=0.0)
    assert plan.fusions
    bench = Bench(live, on_cuda=False)
    bench.observe(plan.fusions)
    variant = bench.build([evaluated(bench, fusion, spoil) for fusion in plan.fusions], ())
    return FusedModel(model, live.regions, variant.modules, args, kwargs or {})
