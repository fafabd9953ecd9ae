"""Makes a fleet of traces from the committed captures: jobs of several ranks, models and dates; some broken, some hostile.

The events carry the fields that Kineto writes (ids, grids, strides, flow events), so that their bytes are those of real traces.
A file's numbers follow from its name and the seed alone.

Run: ``python -m tools.make_fleet DIR --count 200``.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

CAPTURES = Path(__file__).parents[1] / "tests" / "data" / "captures"
MODELS = {"gpt2": "gpt2-fp32-1x1024-h200", "qwen2.5-7b": "qwen2.5-7b-bf16-1x512-h200"}
_DTYPES = {"float32": "float", "bfloat16": "c10::BFloat16", "float16": "c10::Half", "int64": "long int", "bool": "bool"}
_FIRST_DAY_NS = 1_790_000_000_000_000_000
_DAY_NS = 86_400_000_000_000
_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
_REDUCE_EVERY = 40
"""One all-reduce after so many kernels, in jobs of several ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One trace to make."""

    job: str
    model: str
    rank: int
    world: int
    steps: int
    scale: float
    """Of all device times: the job's own length and batch."""
    day: int
    has_shapes: bool
    launches: int
    """Of each step at most."""


def plans(count: int, seed: int = 0, launches: int = 100_000) -> Iterator[Plan]:
    """Yield ``count`` traces, job by job."""
    draw = random.Random(seed)
    made = 0
    for number in range(count):
        world = min(draw.choice((1, 1, 2, 4, 8)), count - made)
        model = draw.choice(sorted(MODELS))
        steps, scale, has_shapes = draw.randint(1, 3), draw.choice((0.5, 1.0, 2.0)), draw.random() < 0.8
        for rank in range(world):
            job = f"job-{number:04d}-{model}"
            yield Plan(
                job=job,
                model=model,
                rank=rank,
                world=world,
                steps=steps,
                scale=scale,
                day=number % 90,
                has_shapes=has_shapes,
                launches=launches,
            )
        made += world
        if made >= count:
            return


@cache
def _capture(model: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(gzip.decompress((CAPTURES / f"{MODELS[model]}.json.gz").read_bytes()))
    return found


def facts(plan: Plan) -> dict[str, Any]:
    """Return the trace's top-level keys, as Kineto would have written them."""
    made: dict[str, Any] = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": plan.rank, "name": "NVIDIA H200", "totalGlobalMem": 150754820096}],
        "record_shapes": int(plan.has_shapes),
        "baseTimeNanoseconds": _FIRST_DAY_NS + plan.day * _DAY_NS,
        "traceName": f"{plan.job}.pt.trace.json",
        "job": plan.job,
        "model": plan.model,
    }
    if plan.world > 1:
        made["distributedInfo"] = {"backend": "nccl", "rank": plan.rank, "world_size": plan.world, "nccl_version": "2.27.5"}
    return made


def slowness(rank: int) -> float:
    """Return how much slower a rank computes; the others wait for it in their all-reduces."""
    return 1 + 0.02 * ((rank * 7) % 5)


def events(plan: Plan) -> list[dict[str, Any]]:
    """Return one trace's events."""
    return _events(*_key(plan))


def _key(plan: Plan) -> tuple[Any, ...]:
    slowest = max(slowness(rank) for rank in range(plan.world))
    own = slowness(plan.rank)
    return plan.model, plan.steps, plan.scale, own, slowest, plan.world > 1, plan.has_shapes, plan.launches


def _events(
    model: str, steps: int, scale: float, own: float, slowest: float, is_rank: bool, has_shapes: bool, most: int
) -> list[dict[str, Any]]:
    capture = _capture(model)
    found: list[dict[str, Any]] = []
    now, device_now, number = 1000.0, 1000.0, 0
    for step in range(steps):
        began, since = now - 0.5, 0.0
        for place, launch in enumerate(capture["launches"][:most]):
            op = capture["ops"][launch["op_index"]]
            number += 1
            name = f"aten::{op['target'].split('.')[1]}"
            found.append(_op(name, now, number, _inputs(capture, op) if has_shapes else {}))
            took = launch["duration_ns"] / 1000 * scale * own
            device_now = max(device_now, now + 2) + 0.5
            found += _launched(launch["kernel_name"], now + 1, device_now, took, number, launch)
            device_now, now, since = device_now + took, now + 7, since + took
            if is_rank and place % _REDUCE_EVERY == _REDUCE_EVERY - 1:
                number += 1
                wait = since / own * (slowest - own)
                found.append(_op("c10d::allreduce_", now, number, {}))
                found += _launched(_REDUCE, now + 1, device_now + 0.5, 20 + wait, number, launch)
                device_now, now, since = device_now + 20.5 + wait, now + 7, 0.0
        now = max(now, device_now)
        found.append(_event("user_annotation", f"ProfilerStep#{step}", began, now - began))
    return found


@lru_cache(maxsize=8)
def _events_text(*key: Any) -> str:
    return json.dumps(_events(*key), indent=1)


def _event(category: str, name: str, ts: float, dur: float, *, pid: int = 1, tid: int = 1, **args: Any) -> dict[str, Any]:
    times = {"ts": round(ts, 3), "dur": round(dur, 3)}
    return {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, **times, "args": args}


def _op(name: str, now: float, number: int, inputs: dict[str, Any]) -> dict[str, Any]:
    ids = {"External id": number, "Record function id": 0, "Sequence number": number, "Fwd thread id": 0, "Ev Idx": number}
    return _event("cpu_op", name, now, 6.0, **ids, **inputs)


def _launched(name: str, called: float, start: float, took: float, number: int, launch: dict[str, Any]) -> list[dict[str, Any]]:
    call = {"cbid": 211, "correlation": number, "External id": number}
    kernel = {
        "External id": number, "queued": 0, "device": 0, "context": 1, "stream": 7, "correlation": number,
        "registers per thread": 40, "shared memory": 0, "blocks per SM": 7.757576, "warps per SM": 31.030304,
        "grid": launch["grid"], "block": launch["block"], "est. achieved occupancy %": 48,
    }  # fmt: skip
    flow = {"ph": "s", "id": number, "pid": 1, "tid": 1, "ts": round(called, 3), "cat": "ac2g", "name": "ac2g"}
    return [
        _event("cuda_runtime", "cudaLaunchKernel", called, 2.0, **call),
        flow,
        _event("kernel", name, start, took, pid=0, tid=7, **kernel),
        flow | {"ph": "f", "pid": 0, "tid": 7, "ts": round(start, 3), "bp": "e"},
    ]


def _inputs(capture: dict[str, Any], op: dict[str, Any]) -> dict[str, Any]:
    metas = []
    for arg in op.get("args", ()):
        ref = arg.get("ref", arg.get("index")) if isinstance(arg, dict) else None
        outputs = capture["ops"][ref].get("outputs", ()) if ref is not None else ()
        metas.append(outputs[0] if outputs else None)
    return {
        "Input Dims": [list(meta["shape"]) if meta else [] for meta in metas],
        "Input type": [_DTYPES.get(meta["dtype"], "float") if meta else "Scalar" for meta in metas],
        "Input Strides": [list(meta["stride"]) if meta else [] for meta in metas],
        "Concrete Inputs": ["" for _ in metas],
    }


def write(path: Path, plan: Plan) -> int:
    """Write one trace, indented as Kineto does; returns its size as JSON in bytes."""
    listed = _events_text(*_key(plan))
    text = f'{json.dumps(facts(plan), indent=1)[:-2]},\n "traceEvents": {listed}\n}}'.encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text, compresslevel=1))
    return len(text)


BROKEN = ("cut", "empty", "no-json", "no-events", "lost-kernels")
HOSTILE = ("bomb", "nested", "numbers", "names", "endless-string")


def write_broken(path: Path, kind: str, plan: Plan) -> None:
    """Write a trace that cannot be ranked, or that means harm; those of different jobs differ in their bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made = facts(plan) | {"traceEvents": events(plan)}
    text = json.dumps(made).encode()
    if kind == "cut":
        path.write_bytes(gzip.compress(text)[: len(text) // 40])
    elif kind == "empty":
        path.write_bytes(gzip.compress(b"", mtime=plan.day))
    elif kind == "no-json":
        path.write_bytes(gzip.compress(b"<html>" + text[:1500]))
    elif kind == "no-events":
        path.write_bytes(gzip.compress(json.dumps(facts(plan)).encode()))
    elif kind == "lost-kernels":
        left = [event for place, event in enumerate(made["traceEvents"]) if event.get("cat") != "kernel" or place % 3]
        path.write_bytes(gzip.compress(json.dumps(made | {"traceEvents": left}).encode()))
    elif kind == "bomb":
        path.write_bytes(gzip.compress(_hostile(plan, '["') + b"x" * (135 << 20), 9))
    elif kind == "nested":
        path.write_bytes(gzip.compress(_hostile(plan, "[" * 200_000)))
    elif kind == "numbers":
        strange = [_event("kernel", "k", 10**400 if place % 2 else -1e308, 1e308) for place in range(100)]
        path.write_bytes(gzip.compress(json.dumps(facts(plan) | {"traceEvents": strange}).encode()))
    elif kind == "names":
        made["job"], made["model"] = f"../../../etc/passwd\x1b[2J'; drop table parts; -- {plan.job}", "<script>alert(1)</script>"
        path.write_bytes(gzip.compress(json.dumps(made).encode()))
    elif kind == "endless-string":
        path.write_bytes(gzip.compress(_hostile(plan, '[], "job": "') + b"x" * (135 << 20) + b'"}', 9))


def _hostile(plan: Plan, events_text: str) -> bytes:
    return f'{json.dumps(facts(plan))[:-1]}, "traceEvents": {events_text}'.encode()


def main() -> None:
    """Make the fleet of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--broken", type=int, default=2)
    parser.add_argument("--hostile", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--launches", type=int, default=100_000, help="of each step, at most")
    asked = parser.parse_args()
    bad = {"broken": asked.broken, "hostile": asked.hostile}
    made = make(asked.folder, asked.count, seed=asked.seed, launches=asked.launches, **bad)
    print(f"{asked.count:,} traces, {made / 1e6:,.0f} MB of JSON")


def make(folder: Path, count: int, *, broken: int = 0, hostile: int = 0, seed: int = 0, launches: int = 100_000) -> int:
    """Make ``count`` traces, the broken and hostile ones among them; returns the JSON bytes of the whole ones."""
    todo = list(plans(count - broken - hostile, seed, launches))
    first = todo[0]
    todo.sort(key=_key)  # equal events together, whose text is kept
    total = sum(write(folder / plan.job / f"rank{plan.rank}.pt.trace.json.gz", plan) for plan in todo)
    kinds = [BROKEN[number % len(BROKEN)] for number in range(broken)] + [
        HOSTILE[number % len(HOSTILE)] for number in range(hostile)
    ]
    for number, kind in enumerate(kinds):
        plan = replace(first, job=f"bad-{number:02d}", day=number)
        write_broken(folder / "bad" / f"{number:02d}-{kind}.json.gz", kind, plan)
    return total


if __name__ == "__main__":
    main()
