"""Measures what a decode step in a range of sizes takes beside its kernels: ``python -m tools.ranged_overhead [--trees A B]``.

A small model serves a range with no rewrite. A stand-in takes the place of CUDA graphs: it records by running the step once, and
a replay does nothing. So all that is timed is Python, dynamo, the checks and the copies around a replay. On a growing cache the
whole graph returns at once what it returned before, or its ops are launched, or its segments are replayed and the ops between
them launched. Times are the fifth percentile of single calls in microseconds.

``--trees`` names checkouts of this repository that take turns, each in processes of its own. Figures:
``docs/measurements/call_overhead.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

from fusion_advisor.capture.graph.tracer import capture_regions
from fusion_advisor.capture.sizes.open_capture import OpenCapture, Sizes, capture_open
from fusion_advisor.fuse.cuda_graph.replay import Graphs
from fusion_advisor.fuse.decide.session import Bench
from fusion_advisor.fuse.live.fused_model import FusedModel
from fusion_advisor.fuse.plan.size_ranges import read_shapes
from fusion_advisor.fuse.shapes.pieces import Served
from fusion_advisor.fuse.shapes.ranged_calls import ranged_calls
from fusion_advisor.fuse.shapes.serve import ShapeTable, serving
from fusion_advisor.runtime.call_tensors import objects_in
from fusion_advisor.workload.load import describe_live
from tools.call_overhead import known, model_of

Way = Literal["replayed", "answered", "launched", "segments"]
CASES: dict[str, tuple[str, str, Way]] = {
    "gpt2, static cache": ("gpt2-prefill", "static decode", "replayed"),
    "qwen2, static cache": ("qwen2-static", "static decode", "replayed"),
    "gpt2, growing cache": ("gpt2-prefill", "decode", "answered"),
    "qwen2, growing cache, launch by launch": ("qwen2-static", "decode", "launched"),
    "qwen2, growing cache, in segments": ("qwen2-static", "decode", "segments"),
}
_RANGES = "batch=1..4,seq=1..16,cached=1..48"
_SIZES = {"batch": 1, "room": 48, "cached": 20}
_FIRST_CALLS = 14
_LIKELY = 0.05


class StandIn:
    """Takes the place of what records CUDA graphs."""

    def refusal(self) -> str | None:
        """Refuse no call."""
        return None

    def record(self, call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Run a call once; its replay does nothing."""
        result = call()
        return (lambda: None), result

    def pool_bytes(self) -> int:
        """Hold nothing."""
        return 0

    def give_back(self) -> None:
        """Give nothing back."""


def served(case: str, layers: int) -> tuple[FusedModel, tuple[Any, ...], dict[str, Any]]:
    """Return a model that serves a range, and one call in it.

    Args:
        case: one of ``CASES``.
        layers: of the model.
    """
    kind, step, way = CASES[case]
    model, args, _ = model_of(kind, layers)
    given = {"input_ids": torch.randint(1, 200, (1, 8))}
    live = capture_regions(model, args, given)
    modules = Bench(live, on_cuda=False).build((), ()).modules
    fused = FusedModel(model, live.regions, modules, args, given, graphs=Graphs(StandIn()), live=live)
    calls = {call.name: call for call in ranged_calls(describe_live(model, args, given), read_shapes(_RANGES))}
    call = calls[step]

    def capture(sizes: Sizes) -> OpenCapture:
        args, kwargs = call.at(sizes)
        return capture_open(model, args, kwargs, call.dims)

    pieces = []
    for piece in call.pieces(capture):
        sizes = {one.name: one.least for one in piece.box}
        graph = None if piece.opened is None else piece.opened.region.graph
        points = [] if graph is None else [Served(sizes=sizes, module=graph, in_segments=way == "segments")]
        pieces.append(serving(piece, points))
    example = (call.args, call.kwargs)
    fused.serve([ShapeTable(call.ranges, call.dims, pieces, example, may_record=call.may_record)])
    return fused, *call.at({one.name: _SIZES[one.name] for one in call.ranges})


def measure(case: str, layers: int, calls: int) -> float:
    """Time a case: microseconds of a call.

    Args:
        case: one of ``CASES``.
        layers: of the model.
        calls: that are timed.
    """
    fused, args, kwargs = served(case, layers)
    before = [(vars(owner), dict(vars(owner))) for owner in objects_in(kwargs)]

    def put_back() -> None:
        for attributes, then in before:  # a growing cache has other tensors after each call
            attributes.update(then)

    def call() -> None:
        put_back()
        fused.model(*args, **kwargs)

    times = []
    with fused, torch.no_grad():
        for _ in range(_FIRST_CALLS):
            call()
        assert fused.graphs is not None
        assert not fused.fallbacks, fused.fallbacks
        way = CASES[case][2]
        assert bool(fused.graphs.recordings) is (way in ("replayed", "segments"))
        if way == "answered":
            _answer_at_once(fused)
        for _ in range(calls):
            call()
            put_back()
            started = time.perf_counter_ns()
            fused.model(*args, **kwargs)
            times.append(time.perf_counter_ns() - started)
    return sorted(times)[int(len(times) * _LIKELY)] / 1e3


def _answer_at_once(fused: FusedModel) -> None:
    """Let each piece's graph return what it returned the first time."""
    for piece in (piece for table in fused.shapes for piece in table.pieces):
        if piece.route is not None:
            piece.route.forward = known(piece.route.forward)


def in_turns(trees: list[Path], layers: int, calls: int, rounds: int) -> str:
    """Let checkouts take turns; returns a table of medians over the rounds.

    Args:
        trees: roots of checkouts.
        layers: of the models.
        calls: that are timed in each process.
        rounds: processes for each checkout and case.
    """
    found: dict[str, dict[Path, list[float]]] = {case: {tree: [] for tree in trees} for case in CASES}
    for number in range(rounds):
        for case in CASES:
            for tree in trees if number % 2 == 0 else trees[::-1]:
                words = [__file__, "--one", case, "--layers", str(layers), "--calls", str(calls)]
                env = {**os.environ, "PYTHONPATH": str(tree)}
                ran = subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True, check=True)
                found[case][tree].append(float(json.loads(ran.stdout.splitlines()[-1])))
    rows = [
        f"| {case} | " + " | ".join(f"{statistics.median(by[tree]):.1f}" for tree in trees) + " |" for case, by in found.items()
    ]
    return "\n".join(["| Call | " + " | ".join(tree.name for tree in trees) + " |", "|---|" + "--:|" * len(trees), *rows])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trees", nargs="*", type=Path, default=[])
    parser.add_argument("--one", choices=list(CASES))
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--calls", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.one:
        print(json.dumps(measure(asked.one, asked.layers, asked.calls)))
        return
    if asked.trees:
        print(in_turns(asked.trees, asked.layers, asked.calls, asked.rounds))
        return
    for case in CASES:
        print(f"{case}, {asked.layers} layers: {measure(case, asked.layers, asked.calls):.1f} µs")


if __name__ == "__main__":
    main()
