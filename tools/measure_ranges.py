"""Measures a saved plan of ranges: python -m tools.measure_ranges STAGE[,STAGE…] RUN_DIR --to FILE.jsonl [--seconds S[,S…]].

RUN_DIR is of ``fusion-advisor apply MODEL --shapes …``. The stages run one after the other in this process, which makes the model
once and loads the plan once. Each makes the same random calls, and ends after the call in which its seconds are over, or those of
``--within``, which are of everything:

- ``serve`` compares every call with the original ops and times both. It counts traces, compiled kernels and calls of the original
  ops.
- ``exact`` makes a plan for exactly the sizes of a call, and times it and the saved plan at this call in turns.
- ``generate``: prompts of random lengths, tokens per second of eager, the plan and torch.compile with a static cache; where a
  token differs from eager's, how far apart the two are in eager's own scores.
- ``compile``: ``torch.compile(dynamic=True)`` in a mode (``--mode``). It takes the plan out, and belongs at the end.

Sizes are random on a logarithmic scale. Masks of an encoder's calls hide a random number of tokens at the end of each row. Times
are of the wall clock, device idle at both ends, the median of a few. Between two runs of a call its cache is put back; a growing
one comes back at other addresses. Every line is written as soon as it is known.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.utils

from fusion_advisor import apply, load_plan
from fusion_advisor.cli.common.core import load_request
from fusion_advisor.errors import AdvisorError
from fusion_advisor.fuse.cuda_graph.recording import Recording
from fusion_advisor.fuse.cuda_graph.segmented_region import SegmentedRecording
from fusion_advisor.fuse.live.fused_model import FusedModel
from fusion_advisor.fuse.live.saved_plan import SavedPlan
from fusion_advisor.fuse.passes.registry import kept_ids
from fusion_advisor.fuse.plan.size_ranges import ShapeRequest
from fusion_advisor.fuse.shapes.ranged_calls import RangedCall, ranged_calls
from fusion_advisor.records import ShapeRanges, Status
from fusion_advisor.runtime.call_tensors import objects_in, tensors_in
from fusion_advisor.runtime.torch_internals import module_call
from fusion_advisor.timing.alone import alone, timed_alone
from fusion_advisor.workload.load import LoadedWorkload, load_workload

MOST_TOKENS = 16_384
"""Of a call, cached tokens apart."""
MOST_CACHED = 131_072
"""Tokens in the caches of all rows."""
_BEFORE = 2
"""Calls ahead of those that are timed: the second is recorded as a CUDA graph where there is one."""
_TIMED = 5
_TURNS = 3
"""Of two plans for the same sizes, each put in anew."""
_UNTIL_RECORDED = 8
"""Calls of a size that was served before, and lost its graph to others: it gets one again after a few calls."""
_ALIVE = 3
"""Copies of a cache that stay in memory."""
_LONG_S, _VERY_LONG_S = 0.05, 0.25
"""Calls that take longer are timed three times, or once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call at random sizes."""

    name: str
    sizes: dict[str, int]
    ranged: RangedCall

    def make(self, seed: int) -> dict[str, Any]:
        """Return its keyword arguments, with random tokens or pixels, and rows of random lengths where the call has a mask."""
        args, kwargs = self.ranged.at(self.sizes)
        assert not args, "the example's inputs have no names"
        generator = torch.Generator().manual_seed(seed)
        ids, mask = kwargs.get("input_ids"), kwargs.get("attention_mask")
        if ids is not None:
            ids.copy_(torch.randint(3, 200, ids.shape, generator=generator))
        for value in kwargs.values():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                value.copy_(torch.randn(value.shape, generator=generator))
        if not self.name and mask is not None and mask.dim() == 2:
            lengths = torch.randint(1, mask.shape[1] + 1, (mask.shape[0], 1), generator=generator)
            lengths[0] = mask.shape[1]
            mask.copy_(torch.arange(mask.shape[1]) < lengths)
        return kwargs


def random_calls(calls: Sequence[RangedCall], count: int, seed: int = 0) -> list[Call]:
    """Return calls of all kinds at sizes that are random on a logarithmic scale."""
    generator, found = random.Random(seed), []
    served = [call for call in calls if not call.refusal]
    while len(found) < count:
        ranged = served[len(found) % len(served)]
        sizes = {one.name: round(math.exp(generator.uniform(math.log(one.least), math.log(one.most)))) for one in ranged.ranges}
        cached = sizes.get("cached", sizes.get("room", 1)) * sizes.get("batch", 1)
        tokens = math.prod(size for name, size in sizes.items() if name not in ("cached", "room"))
        if tokens > MOST_TOKENS or cached > MOST_CACHED:
            continue
        found.append(Call(name=ranged.name, sizes=sizes, ranged=ranged))
    return found


def loaded_of(run_dir: Path) -> LoadedWorkload:
    """Make the model of a run again."""
    path = run_dir / "request.json"
    return load_workload(load_request(path.read_bytes(), str(path)))


def calls_of(loaded: LoadedWorkload, ranges: ShapeRanges) -> list[RangedCall]:
    """Return the ways to call a model that its saved ranges are of."""
    asked = ShapeRequest(ranges=ranges.asked, dims=() if any(piece.call for piece in ranges.pieces) else ranges.dims)
    return ranged_calls(loaded, asked)


def wait() -> None:
    """Let the device finish."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@timed_alone
def timed(run: Callable[[], Any], put_back: Callable[[], None]) -> tuple[float, float, float]:
    """Return the seconds of the first call, of the second, and the median of later ones."""
    taken = []
    while len(taken) < _BEFORE + _times(taken):
        put_back()
        wait()
        started = time.perf_counter()
        run()
        wait()
        taken.append(time.perf_counter() - started)
    return taken[0], taken[1], statistics.median(taken[_BEFORE:])


def _times(taken: Sequence[float]) -> int:
    """Return how often a call is timed, by its last time."""
    last = taken[-1] if taken else 0.0
    return _TIMED if last <= _LONG_S else 3 if last <= _VERY_LONG_S else 1


def rewinding(kwargs: Mapping[str, Any]) -> Callable[[], None]:
    """Return what puts a call's cache back as it is now.

    A cache that a call grew comes back in memory of its own, as generation has it at each token: a CUDA graph that holds its
    addresses would be replayed only where the same call is made again and again.
    """
    objects = [(vars(owner), dict(vars(owner))) for owner in objects_in(dict(kwargs))]
    counts = [(tensor, tensor.clone()) for name, tensor in tensors_in("", dict(kwargs)) if name.endswith("cumulative_length")]
    earlier: deque[torch.Tensor] = deque(maxlen=_ALIVE * sum(len(before) for _, before in objects))  # so that no address recurs

    def put_back() -> None:
        for attributes, before in objects:
            for name, value in before.items():
                if isinstance(value, torch.Tensor) and value.numel() and attributes.get(name) is not value:
                    earlier.append(value)
                    before[name] = value.clone()
            attributes.clear()
            attributes.update(before)
        for tensor, before in counts:
            tensor.copy_(before)

    return put_back


def rel_l2(ours: torch.Tensor, other: torch.Tensor) -> float:
    """Return the relative L2 difference, row by row: logits of many tokens in fp32 would not fit."""
    pairs = [(mine.float(), theirs.float()) for mine, theirs in zip(ours, other, strict=True)]
    apart = sum(float((mine - theirs).square().sum()) for mine, theirs in pairs)
    return math.sqrt(apart / max(sum(float(theirs.square().sum()) for _, theirs in pairs), 1e-30))


def first_tensor(result: Any) -> torch.Tensor:
    """Return a call's logits, or what it returns first."""
    return next(tensor for _, tensor in tensors_in("", dict(result) if isinstance(result, Mapping) else result))


class Compiles:
    """Counts what dynamo traces and Triton compiles.

    Attributes:
        names: of kernels that Triton compiled.
        loaded: names of kernels that it had compiled in an earlier process and loaded from its cache on disk.
    """

    def __init__(self) -> None:
        """Begin to count."""
        self.names: list[str] = []
        self.loaded: list[str] = []
        try:
            from triton import knobs

            knobs.compilation.listener = self._seen
        except (ImportError, AttributeError):
            pass
        self._traced = self._graphs()

    def _seen(self, *, src: Any, cache_hit: bool, **_: Any) -> None:
        (self.loaded if cache_hit else self.names).append(str(getattr(src, "name", src)))

    @property
    def kernels(self) -> int:
        """Kernels that were compiled since."""
        return len(self.names)

    @staticmethod
    def _graphs() -> int:
        return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    @property
    def traces(self) -> int:
        """Graphs that dynamo traced since."""
        return self._graphs() - self._traced


def serve(loaded: LoadedWorkload, fused: FusedModel, calls: Sequence[Call], seconds: float) -> Iterator[dict[str, Any]]:
    """Run every call through the plan and through the original ops."""
    fused.apply()
    original, counted, began = module_call.original_call(loaded.model), Compiles(), time.perf_counter()
    for number, call in enumerate(calls):
        if time.perf_counter() - began > seconds:
            break
        kwargs = call.make(number)
        put_back = rewinding(kwargs)
        before, replays, in_parts = sum(fused.fallbacks.values()), replays_of(fused), replays_of(fused, SegmentedRecording)
        # What a library loads for a shape (cuBLAS's modules) is paid by whoever comes first: each way is, in turn.
        ways = [("ours", loaded.model), ("eager", original)]
        times = {}
        for name, way in ways if number % 2 else reversed(ways):
            times[name] = timed(functools.partial(way, **kwargs), put_back)
        put_back()
        found = loaded.model(**kwargs)
        put_back()
        apart = difference(found, original(**kwargs))
        del found, kwargs, put_back, ways
        yield {
            "what": "call", "call": call.name, "sizes": call.sizes, "ours_s": times["ours"], "eager_s": times["eager"],
            "is_ours_first": number % 2 == 1, **apart, "is_replayed": replays_of(fused) != replays,
            "is_in_segments": replays_of(fused, SegmentedRecording) != in_parts,
            "fallbacks": sum(fused.fallbacks.values()) - before, "traces": counted.traces, "kernels_compiled": counted.kernels,
        }  # fmt: skip
    graphs = fused.graphs
    yield {
        "what": "end", "fallbacks": fused.fallbacks, "traces": counted.traces, "kernels_compiled": counted.kernels,
        "compiled": counted.names, "loaded": counted.loaded,
        "held_bytes": _held_bytes(), "graphs": None if graphs is None else graphs.summary,
        "refusals": None if graphs is None else graphs.refusals,
        "graph_bytes": 0 if graphs is None else graphs.pool_bytes(),
    }  # fmt: skip


def difference(ours: Any, expected: Any) -> dict[str, Any]:
    """Return how far two results of a call are apart, and whether the likeliest next token is the same where they are scores."""
    found, wanted = first_tensor(ours), first_tensor(expected)
    is_scores = isinstance(expected, Mapping) and "logits" in expected and wanted.dim() == 3
    is_same = bool(torch.equal(found[..., -1, :].argmax(-1), wanted[..., -1, :].argmax(-1))) if is_scores else None
    return {"rel_l2": rel_l2(found, wanted), "is_same_token": is_same}


def replays_of(fused: FusedModel, kind: type[Recording | SegmentedRecording] = Recording) -> dict[int, int]:
    """Return how often each recorded call ran.

    Args:
        fused: the model.
        kind: calls that are one graph each, or those of which parts are graphs.
    """
    return {} if fused.graphs is None else {id(one): one.replays for one in fused.graphs.recordings if isinstance(one, kind)}


def compiled(
    loaded: LoadedWorkload, fused: FusedModel, mode: str, calls: Sequence[Call], seconds: float
) -> Iterator[dict[str, Any]]:
    """Run every call through torch.compile, which begins with nothing compiled."""
    fused.revert()
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 64
    run = torch.compile(module_call.original_call(loaded.model), dynamic=True, mode=mode)
    counted, began = Compiles(), time.perf_counter()
    for number, call in enumerate(calls):
        if time.perf_counter() - began > seconds:
            break
        kwargs = call.make(number)
        taken = timed(functools.partial(run, **kwargs), rewinding(kwargs))
        yield {
            "what": "call", "call": call.name, "sizes": call.sizes, f"compile {mode}_s": taken, "traces": counted.traces,
            "kernels_compiled": counted.kernels,
        }  # fmt: skip


def exact(loaded: LoadedWorkload, fused: FusedModel, calls: Sequence[Call], seconds: float) -> Iterator[dict[str, Any]]:
    """Make a plan for exactly the sizes of each call, and time it against the saved plan."""
    began = time.perf_counter()
    for number, call in enumerate(calls):
        if time.perf_counter() - began > seconds:
            break
        kwargs = call.make(number)
        put_back, started = rewinding(kwargs), time.perf_counter()
        run = functools.partial(loaded.model, **kwargs)
        with apply(loaded.model, kwargs, effort="quick") as own:
            made_s = time.perf_counter() - started
            before = sum(fused.fallbacks.values())
            turns = in_turns({"exact": own, "ours": fused}, run, put_back)
            kept = [*kept_ids(own.report.rewrites), *(one.kernel for one in own.report.fusions if one.status is Status.KEPT)]
        yield {
            "what": "call", "call": call.name, "sizes": call.sizes, "apply_s": made_s, "exact_rewrites": kept,
            **{f"{name}_s": middle(taken) for name, taken in turns.items()},
            **{f"{name}_turns_s": [one[-1] for one in taken] for name, taken in turns.items()},
            "fallbacks": dict(own.fallbacks), "ours_fallbacks": sum(fused.fallbacks.values()) - before,
        }  # fmt: skip


def in_turns(
    ways: Mapping[str, FusedModel], run: Callable[[], Any], put_back: Callable[[], None]
) -> dict[str, list[tuple[float, float, float]]]:
    """Time fused models of one call in turns: one after the other would show the clock of each one's minute.

    Args:
        ways: each is put in, called until it has its graph, and timed.
        run: the call.
        put_back: puts its cache back.
    """
    taken: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
    for _ in range(_TURNS):
        for name, way in ways.items():
            with way:
                for _ in range(_UNTIL_RECORDED):
                    put_back()
                    run()
                taken[name].append(timed(run, put_back))
    return taken


def middle(turns: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    """Return the turn with the median of what :func:`timed` gives last."""
    return sorted(turns, key=lambda one: one[-1])[len(turns) // 2]


def generate(
    loaded: LoadedWorkload, fused: FusedModel, plan: SavedPlan, calls: int, new_tokens: int, seconds: float
) -> Iterator[dict[str, Any]]:
    """Generate tokens of random prompts in each way; a way whose share of the seconds is over has fewer prompts."""
    model: Any = loaded.model
    fused.apply()
    generator = random.Random(1)
    device = torch.device(loaded.record.device)
    assert plan.report.shapes is not None
    ends = {one.name: one.most for one in plan.report.shapes.asked}
    longest = min(1024, ends.get("seq", 1024), ends.get("cached", 1024) - new_tokens)
    lengths = [round(math.exp(generator.uniform(math.log(8), math.log(longest)))) for _ in range(calls)]
    prompts = [torch.randint(3, 200, (1, length), device=device) for length in lengths]
    usual = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    ways: dict[str, Callable[[torch.Tensor], Any]] = {
        "ours": lambda ids: fused.generate(ids, attention_mask=torch.ones_like(ids), disable_compile=True, **usual),
        "ours, growing": lambda ids: model.generate(ids, attention_mask=torch.ones_like(ids), disable_compile=True, **usual),
        "eager": lambda ids: model.generate(ids, attention_mask=torch.ones_like(ids), disable_compile=True, **usual),
        "compile, static": lambda ids: model.generate(
            ids, attention_mask=torch.ones_like(ids), cache_implementation="static", **usual
        ),
    }
    tokens: dict[str, list[Any]] = {}
    for name, run in ways.items():
        if name == "eager":
            yield {"what": "fallbacks", "fallbacks": fused.fallbacks}
            fused.revert()
        taken: list[float] = []
        began = time.perf_counter()
        for ids in (*prompts[:2], *prompts):
            if len(taken) > _BEFORE and time.perf_counter() - began > seconds / len(ways):
                break
            with alone():
                wait()
                started = time.perf_counter()
                made = run(ids)
                wait()
                taken.append(time.perf_counter() - started)
            tokens.setdefault(name, []).append(made[0, ids.shape[1] :].tolist())
        tokens[name] = tokens[name][2:]
        yield {
            "what": "generate", "way": name, "tokens_per_s": len(taken[2:]) * new_tokens / sum(taken[2:]), "first_s": taken[0],
            "seconds": taken[2:], "lengths": lengths[: len(taken) - 2],
        }  # fmt: skip
    for name, made in tokens.items():
        pairs = list(zip(prompts, made, tokens["eager"], strict=False))  # as many as both had time for
        differing = [trio for trio in pairs if trio[1] != trio[2]]
        yield {
            "what": "tokens", "way": name, "same_as_eager": len(pairs) - len(differing), "prompts": len(pairs),
            "gaps": [first_gap(model, ids, ours, theirs) for ids, ours, theirs in differing],
        }  # fmt: skip


def first_gap(model: Any, ids: torch.Tensor, ours: Sequence[int], theirs: Sequence[int]) -> float:
    """Return by how much the scores of two ways' first differing tokens differ in eager, in steps of the scores' dtype there."""
    at = next(number for number, (one, other) in enumerate(zip(ours, theirs, strict=True)) if one != other)
    prefix = torch.cat([ids, torch.tensor([theirs[:at]], dtype=ids.dtype, device=ids.device)], dim=1)
    scores = model(input_ids=prefix).logits[0, -1]
    one, other = scores[ours[at]].double(), scores[theirs[at]].double()
    step = torch.finfo(scores.dtype).eps * 2.0 ** math.floor(math.log2(max(abs(float(other)), 1e-30)))
    return abs(float(one - other)) / step


def _held_bytes() -> int:
    if not torch.cuda.is_available():
        return 0
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_reserved())


STAGES = ("serve", "exact", "generate", "compile")


def limits_of(stages: Sequence[str], seconds: Sequence[float]) -> dict[str, float]:
    """Return each stage's seconds: one number is of all of them.

    Raises:
        ValueError: there are neither one nor as many numbers as stages, or a stage is not known.
    """
    if not set(stages) <= set(STAGES):
        raise ValueError(f"the stages are {', '.join(STAGES)}")
    if len(seconds) not in (1, len(stages)):
        raise ValueError(f"{len(stages)} stages and {len(seconds)} limits")
    return dict(zip(stages, [*seconds] * len(stages) if len(seconds) == 1 else seconds, strict=True))


def seconds_left(own: float, within: float | None, gone: float) -> float:
    """Return the seconds that a stage may take.

    Args:
        own: its limit.
        within: seconds for everything since the process began; None: without end.
        gone: seconds since then.
    """
    return own if within is None else max(0.0, min(own, within - gone))


def rows_of(
    loaded: LoadedWorkload, plan: SavedPlan, calls: Sequence[Call], limits: Mapping[str, float], asked: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Load the plan and run the stages; a stage that fails is a row with its error."""
    weights, started = _held_bytes(), time.perf_counter()
    fused: FusedModel = apply(loaded.model, loaded.kwargs or loaded.args, plan=plan)
    yield {"what": "loaded", "seconds": time.perf_counter() - started, "weights_bytes": weights, "held_bytes": _held_bytes()}
    stages: dict[str, Callable[[float], Iterator[dict[str, Any]]]] = {
        "serve": lambda seconds: serve(loaded, fused, calls, seconds),
        "exact": lambda seconds: exact(loaded, fused, calls[:: max(1, len(calls) // asked.exact_sizes)], seconds),
        "generate": lambda seconds: generate(loaded, fused, plan, asked.prompts, asked.new_tokens, seconds),
        "compile": lambda seconds: compiled(loaded, fused, asked.mode, calls, seconds),
    }
    for name, seconds in limits.items():
        try:
            left = seconds_left(seconds, asked.within, time.perf_counter() - asked.began)
            yield from ({"stage": name, "limit_s": round(left, 1), **row} for row in stages[name](left))
        except (RuntimeError, AdvisorError) as error:  # the other stages still say what they have
            yield {"stage": name, "what": "failed", "error": f"{type(error).__name__}: {error}"[:2000]}


def main() -> None:
    """Run the stages; every line is written as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", help=f"some of {','.join(STAGES)}")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--seconds", default="200", help="of each stage: one number, or one for each stage with commas")
    parser.add_argument("--within", type=float, help="seconds for everything, making the model and loading the plan among it")
    parser.add_argument("--mode", default="default")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--exact-sizes", type=int, default=4)
    parser.add_argument("--every", type=int, default=1, help="take every so manieth of the calls")
    asked = parser.parse_args(namespace=argparse.Namespace(began=time.perf_counter()))
    limits = limits_of(asked.stages.split(","), [float(one) for one in asked.seconds.split(",")])
    with asked.to.open("w", encoding="utf-8") as out, torch.no_grad():

        def write(row: dict[str, Any]) -> None:
            out.write(json.dumps(row) + "\n")
            out.flush()

        started = time.perf_counter()
        loaded, plan = loaded_of(asked.run_dir), load_plan(asked.run_dir)
        write({"what": "model", "seconds": time.perf_counter() - started})
        assert plan.report.shapes is not None, "the run has no ranges"
        calls = random_calls(calls_of(loaded, plan.report.shapes), asked.calls)[:: asked.every]
        for row in rows_of(loaded, plan, calls, limits, asked):
            write(row)


if __name__ == "__main__":
    main()
