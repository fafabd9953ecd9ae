"""Measures what a fused call takes beside its graph: ``python -m tools.call_overhead [CASE …] [--calls N] [--layers N …]``.

Each case is a small model that is captured, with no rewrite. Its graph then returns at once what it returned before. So all that
is timed is Python, dynamo and the checks. Calls past dynamo and calls through dynamo take turns, call by call. Times are the
fifth percentile of single calls in microseconds: other processes of the machine disturb most calls.

The parts are timed by themselves, over and over, with warm caches. Their sum is less than the whole for that reason.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fusion_advisor.capture.graph.tracer import LiveCapture, capture_regions
from fusion_advisor.fuse.decide.session import Bench
from fusion_advisor.fuse.direct.direct_call import DirectCall, Shortcut
from fusion_advisor.fuse.live.call_signature import signature
from fusion_advisor.fuse.live.fused_model import FusedModel
from fusion_advisor.ranks.shard import plan_of, shard
from fusion_advisor.workload.static_cache import cache_name, filled_cache
from tools.machine import here

CASES = ("mlp", "gpt2-prefill", "gpt2-static", "gpt2-dynamic", "bert", "qwen2-static", "qwen2-split")
_WIDTH, _HEADS, _VOCABULARY, _TOKENS = 64, 4, 200, 16
_LIKELY = 0.05
_FIRST_CALLS = 10
"""After the eighth call with one cache, the cache is compared in bulk."""


class Mlp(torch.nn.Module):
    """Blocks of linear, GELU and LayerNorm."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.GELU(), torch.nn.LayerNorm(_WIDTH))
            for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the blocks."""
        for block in self.blocks:
            x = block(x) + x
        return x


@dataclass(frozen=True, slots=True)
class Overhead:
    """What one case takes beside its graph, in microseconds.

    Attributes:
        case: the model and its layers.
        modules: in it.
        inputs: of its graph, parameters among them.
        words: that are compared for the model.
        through_dynamo_us: a whole call, with dynamo's guards.
        past_dynamo_us: a whole call, without them.
        dynamos_guards_us: dynamo's tree of guards alone.
        parts_us: of a call past dynamo, by name.
    """

    case: str
    modules: int
    inputs: int
    words: int
    through_dynamo_us: float
    past_dynamo_us: float
    dynamos_guards_us: float
    parts_us: dict[str, float]


def model_of(case: str, layers: int) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Build a case's model and the arguments of one call."""
    torch.manual_seed(0)
    if case == "mlp":
        return Mlp(layers).eval(), (torch.randn(4, _WIDTH),), {}
    ids = torch.randint(1, _VOCABULARY, (1, _TOKENS))
    if case == "bert":
        from transformers import BertConfig, BertModel

        bert = BertConfig(
            num_hidden_layers=layers, hidden_size=_WIDTH, intermediate_size=2 * _WIDTH, num_attention_heads=_HEADS,
            vocab_size=_VOCABULARY, max_position_embeddings=64,
        )  # fmt: skip
        return BertModel(bert).eval(), (), {"input_ids": ids}
    if case.startswith("qwen2"):
        return _qwen2(layers, ids, is_split=case == "qwen2-split")
    from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=layers, n_head=_HEADS, n_embd=_WIDTH, vocab_size=_VOCABULARY, n_positions=64)
    model = GPT2LMHeadModel(config).eval()
    if case == "gpt2-prefill":
        return model, (), {"input_ids": ids, "use_cache": False}
    if case == "gpt2-static":
        cache, _ = filled_cache(model, ids, maximum=64, phase="decode", model_id=case)
    else:
        cache = DynamicCache(config=config)
        with torch.no_grad():
            model(ids, **{cache_name(model): cache, "use_cache": True})
    return model, (), {"input_ids": ids[:, :1].clone(), cache_name(model): cache, "use_cache": True}


def _qwen2(layers: int, ids: torch.Tensor, *, is_split: bool) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Build a decode step of Qwen2 on a static cache; split as tensor parallel models are, over a group of one process."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        num_hidden_layers=layers, hidden_size=_WIDTH, intermediate_size=2 * _WIDTH, num_attention_heads=_HEADS,
        num_key_value_heads=2, vocab_size=_VOCABULARY, max_position_embeddings=64,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).eval()
    if is_split:
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        group = dist.group.WORLD
        assert group is not None  # joined above
        shard(model, plan_of(model, "qwen2", 1), 0, 1, str(group.group_name), model_id="qwen2")
    cache, _ = filled_cache(model, ids, maximum=64, phase="decode", model_id="qwen2")
    return model, (), {"input_ids": ids[:, :1].clone(), cache_name(model): cache, "use_cache": True}


def measure(case: str, layers: int, calls: int) -> Overhead:
    """Time a case.

    Args:
        case: one of ``CASES``.
        layers: of its model.
        calls: that are timed of each kind.
    """
    model, args, kwargs = model_of(case, layers)
    live = capture_regions(model, args, kwargs)
    modules = Bench(live, on_cuda=False).build((), ()).modules
    fused = FusedModel(model, live.regions, modules, args, kwargs, live=live)
    rewind = live.written.rewind
    with fused, torch.no_grad():
        for _ in range(_FIRST_CALLS):
            rewind()
            model(*args, **kwargs)
        _answer_at_once(live, lambda: model(*args, **kwargs))
        (verified,) = fused._verified.values()
        past, through = verified.shortcut, Shortcut(model, fused._compiled, ())

        def call(shortcut: Shortcut | None) -> Callable[[], Any]:
            def run() -> Any:
                verified.shortcut = shortcut
                return model(*args, **kwargs)

            return run

        whole = _each([call(past), call(through)], rewind, calls)
        rewind()
        direct = None if past is None else past.direct
        guards_us, parts_us = (0.0, {}) if direct is None else _parts(fused, direct, args, kwargs, rewind, calls)
    return Overhead(
        case=f"{case}, {layers} layers", modules=len(list(model.modules())), inputs=sum(len(one.names) for one in live.regions),
        words=0 if direct is None else direct.words, through_dynamo_us=whole[1], past_dynamo_us=whole[0],
        dynamos_guards_us=guards_us, parts_us=parts_us,
    )  # fmt: skip


def known(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call that runs once and returns that result from then on."""
    found: list[Any] = []

    def answer(*args: Any) -> Any:
        if not found:
            found.append(forward(*args))
        return found[0]

    return answer


def _answer_at_once(live: LiveCapture, call: Callable[[], Any]) -> None:
    """Let each graph return what it returned the first time."""
    for region in live.regions:
        assert region.route is not None
        region.route.forward = known(region.route.forward)
    for _ in range(2):
        live.written.rewind()
        call()


def _parts(
    fused: FusedModel, direct: DirectCall, args: tuple[Any, ...], kwargs: dict[str, Any], rewind: Callable[[], object], calls: int
) -> tuple[float, dict[str, float]]:
    variables = direct.variables(args, kwargs)
    leaves: list[torch.Tensor] = []
    objects: list[Any] = []
    signature(args, kwargs, leaves, fused._objects, objects)
    parts: dict[str, Callable[[], Any]] = {
        "signature": lambda: signature(args, kwargs, [], fused._objects, []),
        "model": fused._guard.change,
        "model, in Python": fused._guard.change_in_python,
        "guards that hold": direct.is_current,
        "guards of the call": lambda: direct.fits(variables, leaves, objects),
        "arguments, results": lambda: direct.run(args, kwargs),
        "dynamo": lambda: direct.passes_all_guards(variables),
    }
    times = dict(zip(parts, _each(list(parts.values()), rewind, calls), strict=True))
    return times.pop("dynamo"), times


def _each(calls: Sequence[Callable[[], Any]], rewind: Callable[[], object], count: int) -> list[float]:
    """Return the fifth percentile of each call's times in microseconds; they take turns."""
    times: list[list[int]] = [[] for _ in calls]
    for _ in range(count):
        for call, spent in zip(calls, times, strict=True):
            rewind()
            call()  # once more, so that each finds the caches as its own kind leaves them
            rewind()
            started = time.perf_counter_ns()
            call()
            spent.append(time.perf_counter_ns() - started)
    return [sorted(spent)[int(len(spent) * _LIKELY)] / 1e3 for spent in times]


def table(rows: Sequence[Overhead]) -> str:
    """Return the measurements as markdown."""
    names = list(next((row.parts_us for row in rows if row.parts_us), {}))
    titles = ["Call", "Modules", "Inputs", "Through dynamo, µs", "Past dynamo, µs", "Ratio", "Dynamo's guards", *names, "Words"]
    lines = ["| " + " | ".join(titles) + " |", "|---|" + "--:|" * (len(titles) - 1)]
    for row in rows:
        ratio = row.past_dynamo_us / row.through_dynamo_us
        cells = [row.case, row.modules, row.inputs, f"{row.through_dynamo_us:.1f}", f"{row.past_dynamo_us:.1f}", f"{ratio:.2f}"]
        cells += [f"{value:.1f}" for value in (row.dynamos_guards_us, *(row.parts_us.get(name, 0.0) for name in names))]
        lines.append("| " + " | ".join(map(str, [*cells, row.words])) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure the cases that are named and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], default=[])
    parser.add_argument("--layers", nargs="*", type=int, default=[2, 12])
    parser.add_argument("--calls", type=int, default=500)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(case, layers, asked.calls) for case in asked.cases or CASES for layers in asked.layers]
    print(" · ".join(here(is_on_gpu=False).values()))
    print(table(rows))


if __name__ == "__main__":
    main()
