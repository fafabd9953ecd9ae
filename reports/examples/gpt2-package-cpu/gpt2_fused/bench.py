"""Times the model's own forward and the fused one, run after run: python -m gpt2_fused.bench [--compile] [--runs N]."""

from __future__ import annotations

import argparse
import statistics
import time

import torch

import gpt2_fused

from .example import EXPECTED, make_inputs, make_model


def main() -> int:
    """Print the median step of each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--compile", action="store_true", help="torch.compile around both too")
    asked = parser.parse_args()
    model, inputs = make_model(), make_inputs()
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
                way(**inputs)
        for _ in range(asked.runs):
            for name, way in ways.items():
                times[name].append(step(way, inputs))
    eager = statistics.median(times["eager"])
    for name, found in times.items():
        median = statistics.median(found)
        print(f"{name:24} {median * 1e3:9.3f} ms  {eager / median:5.2f}x  (fastest {min(found) * 1e3:.3f} ms, {len(found)} runs)")
    gpt2_fused.revert(model)
    return 0


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
