"""Measures the Python around a package's CUDA graph, beside the model in place: ``python -m tools.package_overhead [CASE …]``.

Each case is a small model that is fused, exported and put into itself. A stand-in takes the place of what records CUDA graphs: a
replay does nothing. So all that is timed is Python and the copies around a replay. Ahead of it a GPU
waits, behind it a GPU works.
Times are the fifth percentile of single calls in microseconds. Figures: ``docs/measurements/start_up.md``.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fusion_advisor
from fusion_advisor.capture.graph.tracer import capture_regions
from fusion_advisor.fuse.cuda_graph.replay import Graphs
from fusion_advisor.fuse.decide.session import Bench
from fusion_advisor.fuse.live.fused_model import FusedModel
from tools.call_overhead import model_of
from tools.machine import here
from tools.start_up.child import counters

CASES = {"gpt2": ("gpt2-prefill", 12), "bert": ("bert", 12), "qwen2 decode": ("qwen2-static", 28)}
_FIRST_CALLS = 12
_LIKELY = 0.05


class AtOnce:
    """Records by running the call; a replay does nothing but note the time.

    Attributes:
        replayed_ns: when the last replay was.
        replays: how many there were.
    """

    def __init__(self) -> None:
        self.replayed_ns = self.replays = 0

    def replay(self) -> None:
        """Note the time."""
        self.replayed_ns = time.perf_counter_ns()
        self.replays += 1

    def is_recording(self) -> bool:
        """Nobody records around a call."""
        return False

    def refusal(self) -> str | None:
        """Refuse no call."""
        return None

    def pool_bytes(self) -> int:
        """Hold nothing."""
        return 0

    def give_back(self) -> None:
        """Give nothing back."""


class OfPackage(AtOnce):
    """In a package's words."""

    def record(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """Run a call; return its output and the replay."""
        return run(), self.replay


class InPlace(AtOnce):
    """In the fused model's words."""

    def record(self, call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Run a call; return the replay and its output."""
        output = call()
        return self.replay, output


def packaged(model: torch.nn.Module, inputs: dict[str, Any], name: str, folder: Path, recorder: OfPackage) -> Any:
    """Fuse and export a model, and put the package into it; return the package.

    Args:
        model: of any class that can be exported.
        inputs: of its call.
        name: of the package.
        folder: to write into.
        recorder: stands in for CUDA graphs.
    """
    options: dict[str, Any] = {"runs": 3, "warmup": 1, "steps": 1, "compile": False, "keep": "verified", "effort": "quick"}
    fused = fusion_advisor.apply(model, inputs, **options)
    fused.export(folder / name)
    fused.revert()
    sys.path.insert(0, str(folder / name))
    package = importlib.import_module(name)
    package.apply(model, cuda_graph=True, recorder=recorder)
    return package


def in_place(model: torch.nn.Module, inputs: dict[str, Any], recorder: InPlace) -> FusedModel:
    """Return the model in place, without a rewrite: what is around its graph is the same.

    Args:
        model: of any class.
        inputs: of its call.
        recorder: stands in for CUDA graphs.
    """
    live = capture_regions(model, (), inputs)
    modules = Bench(live, on_cuda=False).build((), ()).modules
    return FusedModel(model, live.regions, modules, (), inputs, graphs=Graphs(recorder), live=live)


def around(step: Callable[[], object], recorder: AtOnce, restore: Callable[[], None], calls: int) -> tuple[float, float]:
    """Return the microseconds ahead of the replay and behind it.

    Args:
        step: makes a call.
        recorder: of its graph.
        restore: sets a cache's counters back.
        calls: that are timed.
    """
    ahead, behind = [], []
    for _ in range(calls + _FIRST_CALLS):
        restore()
        before = recorder.replays
        started = time.perf_counter_ns()
        step()
        ended = time.perf_counter_ns()
        if recorder.replays > before:
            ahead.append(recorder.replayed_ns - started)
            behind.append(ended - recorder.replayed_ns)
    if len(ahead) < calls:
        raise RuntimeError(f"only {len(ahead)} of {calls} calls were replayed")
    first, second = (sorted(times[-calls:])[int(calls * _LIKELY)] / 1e3 for times in (ahead, behind))
    return first, second


def measure(case: str, calls: int, layers: int = 0) -> str:
    """Return a case's row of the table.

    Args:
        case: one of ``CASES``.
        calls: that are timed of each kind.
        layers: of the model; 0: as many as usual.
    """
    kind, usual = CASES[case]
    model, _, inputs = model_of(kind, layers or usual)
    restore = counters(torch, inputs)
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        own, its = OfPackage(), InPlace()
        package = packaged(model, inputs, f"overhead_{kind.replace('-', '_')}", Path(folder), own)
        first = around(lambda: model(**inputs), own, restore, calls)
        package.revert(model)
        with in_place(model, inputs, its) as fused:
            second = around(lambda: fused(**inputs), its, restore, calls)
    cells = [f"{value:.1f}" for pair in zip(first, second, strict=True) for value in pair]
    return f"| {case}, {layers or usual} layers | {' | '.join(cells)} |"


def main() -> None:
    """Measure the cases that are named and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], default=[])
    parser.add_argument("--calls", type=int, default=600)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print(" · ".join(here(is_on_gpu=False).values()))
    print("| Call | Ahead, package | in place | Behind, package | in place |\n|---|--:|--:|--:|--:|")
    for case in asked.cases or CASES:
        print(measure(case, asked.calls), flush=True)


if __name__ == "__main__":
    main()
