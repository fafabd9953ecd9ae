"""Times all-reduce + residual add + RMSNorm: torchrun --nproc-per-node N -m tools.collective_bench --to FILE.json.

Contenders: NCCL's all-reduce and then the library's add_rmsnorm kernel, and one launch that does all three, one-shot and
two-shot. Each is timed in a CUDA graph of many calls and launched from Python, as the slowest rank sees it. Before that its
results are held against fp64, and its bits against the other ranks'. At the end come 10,000 calls of mixed sizes in a row, half
of them replays.
A call that waits for another rank for 25 s stops the run, and no run lasts longer than ``--limit-s``.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fusion_advisor.codegen.common.interface import Launcher
from fusion_advisor.collectives.all_reduce_norm import AllReduceNorm
from fusion_advisor.collectives.launch_shape import BUFFER_BYTES, Way
from fusion_advisor.evaluate.kinds import Place, kind_of
from fusion_advisor.library.discover import list_kernels, load_references
from fusion_advisor.library.spec import Case
from fusion_advisor.runtime.graph_capture import recording_into
from fusion_advisor.runtime.torch_internals.symmetric_memory import shared_buffer

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
COLS = (3584, 8192)
EPS = 1e-6
WAYS: tuple[Way, ...] = ("one-shot", "two-shot")
Tensors = dict[str, torch.Tensor]
MIXED_ROWS = (1, 3, 64, 700)


def library_kernel(rows: int, cols: int, device: torch.device, folder: Path, *, tunes: bool) -> Launcher:
    """Return the library's add_rmsnorm for one size: (x, residual, weight, total, out).

    Args:
        rows: of the call.
        cols: of a row.
        device: of this rank.
        folder: for its source.
        tunes: whether its launch parameters are measured, as ``apply`` does.
    """
    spec = next(one for one in list_kernels() if one.name == "add_rmsnorm")
    function = dict(load_references(spec).references)["llama"]
    case = Case(sizes={"R": rows, "C": cols}, dtypes=("bfloat16",))
    subject = next(kind_of(spec).subjects(spec, "llama", function, case, "bfloat16"))
    if tunes:
        timed = subject.tuned("triton", Place(device=device, folder=folder))
        launch, order = timed.launch, timed.inputs
    else:
        version = next(subject.versions("triton"))
        launch, order = version.bind(version.build(folder / f"{version.rendered.entry}.py")), subject.inputs
    if launch is None:
        raise RuntimeError(f"add_rmsnorm has no kernel for {rows} x {cols}")
    found: Launcher = launch

    def call(*tensors: torch.Tensor) -> None:
        found(*(tensors[place] for place in order), *tensors[3:])

    return call


def made(rows: int, cols: int, device: torch.device, rank: int) -> Tensors:
    """Draw a call's tensors; ``x`` differs between ranks."""

    def drawn(seed: int, *shape: int) -> torch.Tensor:
        generator = torch.Generator(device=device).manual_seed(seed)
        return torch.randn(shape, generator=generator, device=device).to(torch.bfloat16)

    names = {"x": drawn(100 + rank, rows, cols), "residual": drawn(1, rows, cols), "weight": drawn(2, cols)}
    return names | {
        name: torch.full((rows, cols), float("nan"), dtype=torch.bfloat16, device=device) for name in ("total", "out")
    }


def truth(given: Tensors, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum and the normed rows in fp64."""
    every = [torch.empty_like(given["x"]) for _ in range(world_size)]
    dist.all_gather(every, given["x"])
    total = given["residual"].double()
    for part in every:
        total += part.double()
    scale = torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + EPS)
    return total, total * scale * given["weight"].double()


def error_of(found: torch.Tensor, right: torch.Tensor) -> float:
    """Return the root mean square error over the root mean square."""
    return float((found.double() - right).pow(2).mean().sqrt() / right.pow(2).mean().sqrt())


def are_bits_equal(tensor: torch.Tensor) -> bool:
    """Whether a tensor has the same bits on all ranks."""
    mine = tensor.view(torch.int16).long().flatten()
    weights = torch.arange(mine.numel(), device=mine.device) % 65521 + 1
    sums = torch.stack([(mine * weights).sum(), mine.sum()])
    most, least = sums.clone(), sums.clone()
    dist.all_reduce(most, dist.ReduceOp.MAX)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return bool(torch.equal(most, least))


def slowest(value: float, device: torch.device) -> float:
    """Return the largest value of all ranks."""
    told = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(told, dist.ReduceOp.MAX)
    return float(told)


def timed_us(call: Callable[[], object], calls: int, device: torch.device, *, repeats: int = 7) -> float:
    """Return the median microseconds of one of ``calls`` calls that ``call`` makes, on the slowest rank."""
    times = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        dist.barrier()
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        times.append(slowest(start.elapsed_time(stop) * 1e3 / calls, device))
    return statistics.median(times[1:])


def graph_of(call: Callable[[], object], calls: int) -> torch.cuda.CUDAGraph:
    """Record so many calls; NCCL's own thread goes on asking events meanwhile."""
    graph = torch.cuda.CUDAGraph()
    with recording_into(graph, capture_error_mode="thread_local"):
        for _ in range(calls):
            call()
    return graph


def measure(call: Callable[[], object], rows: int, device: torch.device) -> dict[str, float]:
    """Time a contender in a CUDA graph and launched from Python."""
    calls = 50 if rows <= 512 else 10
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    dist.barrier()
    graph = graph_of(call, calls)

    def directly() -> None:
        for _ in range(calls):
            call()

    return {"graph_us": timed_us(graph.replay, calls, device), "direct_us": timed_us(directly, calls, device)}


def row_of(rows: int, cols: int, fused: AllReduceNorm, device: torch.device, folder: Path, *, tunes: bool) -> dict[str, Any]:
    """Check and time all contenders at one size."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    given = made(rows, cols, device, rank)
    total, out = truth(given, world_size)
    library = library_kernel(rows, cols, device, folder, tunes=tunes)
    names = ("x", "residual", "weight", "total", "out")
    summed = given["x"].clone()

    def nccl() -> None:
        dist.all_reduce(summed)
        library(summed, *(given[name] for name in names[1:]))

    ways: dict[str, Callable[[], object]] = {"nccl": nccl}
    for way in WAYS:
        launch = fused.launcher(rows, cols, torch.bfloat16, eps=EPS, way=way)
        ways[way] = functools.partial(launch, *(given[name] for name in names))
    found: dict[str, Any] = {"rows": rows, "cols": cols}
    for name, call in ways.items():
        for output in ("total", "out"):
            given[output].fill_(float("nan"))
        call()
        errors = [slowest(error_of(given["total"], total), device), slowest(error_of(given["out"], out), device)]
        found[name] = {
            "total_error": errors[0], "out_error": errors[1],
            "bits_equal": are_bits_equal(given["total"]) and are_bits_equal(given["out"]),
        }  # fmt: skip
        if name == "nccl":
            summed.zero_()  # summed again and again it would overflow
        found[name] |= measure(call, rows, device)
    for way in WAYS:
        found[way]["is_right"] = found[way]["bits_equal"] and all(
            found[way][key] <= 1.5 * found["nccl"][key] + 1e-6 for key in ("total_error", "out_error")
        )
    return found


def endure(calls: int, fused: AllReduceNorm, device: torch.device, cols: int) -> dict[str, Any]:
    """Make many calls of mixed sizes and ways in a row, every second one a replay, and check the results now and then."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    names = ("x", "residual", "weight", "total", "out")
    steps = []
    for rows in MIXED_ROWS:
        given = made(rows, cols, device, rank)
        right = truth(given, world_size)
        for way in WAYS:
            launch = fused.launcher(rows, cols, torch.bfloat16, eps=EPS, way=way)
            call = functools.partial(launch, *(given[name] for name in names))
            call()
            torch.cuda.synchronize()
            dist.barrier()
            steps.append((call, graph_of(call, 1), given, right))
    order = torch.randint(0, len(steps), (calls,), generator=torch.Generator().manual_seed(0)).tolist()  # equal on all ranks
    worst, is_equal = 0.0, True
    for number, chosen in enumerate(order):
        call, graph, given, right = steps[chosen]
        (graph.replay if number % 2 else call)()
        if number % 500 == 499:
            worst = max(worst, error_of(given["total"], right[0]), error_of(given["out"], right[1]))
            is_equal = is_equal and are_bits_equal(given["out"])
    torch.cuda.synchronize()
    return {"calls": calls, "worst_error": slowest(worst, device), "bits_equal": is_equal}


def table(found: Sequence[dict[str, Any]]) -> str:
    """Return the times as one table, a row for each size."""
    lines = ["| rows | cols | NCCL + kernel | one-shot | two-shot | best/NCCL | direct: NCCL | one-shot | two-shot | right |"]
    lines.append("|--|--|--|--|--|--|--|--|--|--|")
    for row in found:
        graph = [row[name]["graph_us"] for name in ("nccl", *WAYS)]
        direct = [row[name]["direct_us"] for name in ("nccl", *WAYS)]
        right = " ".join("yes" if row[way]["is_right"] else "NO" for way in WAYS)
        cells = [f"{time:.1f}" for time in graph] + [f"{min(graph[1:]) / graph[0]:.2f}"] + [f"{time:.1f}" for time in direct]
        lines.append(f"| {row['rows']} | {row['cols']} | {' | '.join(cells)} | {right} |")
    return "\n".join(lines)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(one) for one in text.split(","))


def main() -> int:
    """Measure, print a table on rank 0, and write everything to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--rows", type=_numbers, default=ROWS)
    parser.add_argument("--cols", type=_numbers, default=COLS)
    parser.add_argument("--calls", type=int, default=10_000, help="in a row, at the end")
    parser.add_argument("--limit-s", type=float, default=540.0)
    parser.add_argument("--tunes", action="store_true", help="measure the library kernel's launch parameters at each size")
    given = parser.parse_args()
    faulthandler.dump_traceback_later(given.limit_s, exit=True)
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    device = torch.device("cuda", local)
    dist.init_process_group("nccl", timeout=timedelta(seconds=60), device_id=device)
    world: Any = dist.group.WORLD
    buffer = shared_buffer(BUFFER_BYTES, device, world.group_name)
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    least = torch.tensor([multiprocessors], device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    fused = AllReduceNorm(buffer.addresses, dist.get_rank(), multiprocessors=int(least))
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "ranks": dist.get_world_size(), "rows": []}

    def keep() -> None:
        if dist.get_rank() == 0:
            given.to.write_text(json.dumps(found, indent=1))

    with tempfile.TemporaryDirectory() as folder:
        for cols in given.cols:
            for rows in given.rows:
                found["rows"].append(row_of(rows, cols, fused, device, Path(folder), tunes=given.tunes))
                keep()
                if dist.get_rank() == 0:
                    print(table(found["rows"][-1:]).splitlines()[-1], flush=True)
        found["in a row"] = endure(given.calls, fused, device, given.cols[0])
        keep()
    if dist.get_rank() == 0:
        print(table(found["rows"]))
        print(found["in a row"])
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
