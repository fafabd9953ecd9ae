"""Times the model's own forward and the fused one, run after run: python -m gpt2_fused.bench [--compile] [--runs N]."""

from __future__ import annotations

import argparse
import copy
import statistics
import time

import torch

import gpt2_fused

from ._objects import at
from .example import EXPECTED, make_inputs, make_model
from .forward import SETS, WRITTEN


def main() -> int:
    """Print the median step of each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--compile", action="store_true", help="torch.compile around both too")
    asked = parser.parse_args()
    model, inputs = make_model(), _Inputs(make_inputs())
    step = _on_gpu if EXPECTED["device"] == "cuda" else _on_cpu
    ways = {"eager": model.forward}
    gpt2_fused.apply(model)
    ways["fused"] = model.forward
    if asked.compile:
        ways["fused + torch.compile"] = torch.compile(ways["fused"], fullgraph=True)
        ways["torch.compile"] = torch.compile(ways["eager"])
    times: dict[str, list[float]] = {name: [] for name in ways}
    with torch.no_grad():
        for way in ways.values():
            for _ in range(3):
                way(**inputs.as_at_first())
        for _ in range(asked.runs):
            for name, way in ways.items():
                times[name].append(step(way, inputs.as_at_first()))
    eager = statistics.median(times["eager"])
    for name, found in times.items():
        median = statistics.median(found)
        print(f"{name:24} {median * 1e3:9.3f} ms  {eager / median:5.2f}x  (fastest {min(found) * 1e3:.3f} ms, {len(found)} runs)")
    for reason, count in gpt2_fused.fallbacks(model).items():
        print(f"{count} calls ran the model's own forward: {reason}")
    gpt2_fused.revert(model)
    return 0


class _Inputs:
    """The inputs of a step, which may write into them: a cache counts its tokens, and has room for so many alone."""

    def __init__(self, inputs) -> None:
        self.inputs = inputs
        self.written = [(tensor, tensor.clone()) for tensor in (at(name, inputs) for name in WRITTEN)]

    def as_at_first(self):
        """Return them as they were made; a cache that grows gets new tensors in each step, so it is a new one."""
        if SETS:
            return copy.deepcopy(self.inputs)
        for tensor, value in self.written:
            tensor.copy_(value)
        return self.inputs


def _on_cpu(way, inputs) -> float:
    started = time.perf_counter()
    way(**inputs)
    return time.perf_counter() - started


def _on_gpu(way, inputs) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    way(**inputs)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


if __name__ == "__main__":
    raise SystemExit(main())
