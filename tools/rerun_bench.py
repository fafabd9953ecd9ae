"""Measure the committed bench's rows again on all GPUs: python -m tools.rerun_bench [--to DIR] [--minutes N]

First every compiler fills its cache on disk, in many processes at once; nothing is timed then. After that each GPU has one
process, which takes the next row when it is done with one, holds every contender against fp64 and times all of them, as
``kernels bench`` does. The rows are put together in the committed order; where one was not measured in time, nothing is written.
On two H200s the 302 rows take five minutes and a half.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from fusion_advisor.autotune.cache import TuningStore
from fusion_advisor.evaluate.bench.plot import draw
from fusion_advisor.evaluate.bench.records import BenchRow, BenchRun, dump_run, read_run
from fusion_advisor.evaluate.bench.row import BenchOptions, Ceilings, bench_row
from fusion_advisor.evaluate.bench.run import bench, measure_ceilings
from fusion_advisor.evaluate.bench.view import bench_markdown
from fusion_advisor.library.discover import list_kernels
from fusion_advisor.library.spec import Case, KernelSpec
from fusion_advisor.timing.kernel_timer import make_clock
from tests.gpus import visible_gpus
from tools.rerun_examples import compact

COMMITTED = Path(__file__).parents[1] / "reports" / "examples" / "kernels-h200"
Job = tuple[KernelSpec, str, Case, str]


class Silent:
    """Says nothing while a bench works."""

    def step(self, done: int, total: int, text: str) -> None:
        """Nothing."""


def jobs(run: BenchRun) -> list[Job]:
    """Return (kernel, variant, case, dtype) of each row of a run, in its order."""
    specs = {spec.name: spec for spec in list_kernels()}
    return [(specs[row.kernel], row.variant, Case(sizes=row.sizes, dtypes=(row.dtype,)), row.dtype) for row in run.rows]


def take(counter: Path) -> int:
    """Return the next number; each is given to one process."""
    with counter.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        number = int(file.read() or 0)
        file.truncate(0)
        file.write(str(number + 1))
    return number


def fill_caches(todo: Sequence[Job], counter: Path, ends_at: float) -> None:
    """Let compilers work on rows until none is left or half of the time is over."""
    device = _device()
    ceilings = measure_ceilings(device)
    while (number := take(counter)) < len(todo) and time.time() < ends_at:
        spec, variant, case, dtype = todo[number]
        with tempfile.TemporaryDirectory() as folder:
            # What is chosen and timed while others use the GPU is of no use to anyone.
            store = TuningStore(Path(folder) / "tuning.json")
            options = BenchOptions(device=device, rounds=1, budget_s=0.0, store=store)
            bench_row(spec, variant, case, dtype, options, ceilings)


def measure(todo: Sequence[Job], counter: Path, part: Path, ends_at: float) -> None:
    """Measure rows until none is left or the time is over; each part of the result says which rows it holds."""
    device = _device()
    run, numbers = bench([], BenchOptions(device=device), Silent()), []
    ceilings = Ceilings(bandwidth=run.bandwidth, cache_bytes=run.cache_bytes, clock=make_clock(device))
    while (number := take(counter)) < len(todo) and time.time() < ends_at:
        spec, variant, case, dtype = todo[number]
        row = bench_row(spec, variant, case, dtype, BenchOptions(device=device), ceilings)
        run, numbers = replace(run, rows=(*run.rows, row)), [*numbers, number]
    part.write_text(dump_run(run), encoding="utf-8")
    part.with_suffix(".rows").write_text(" ".join(map(str, numbers)), encoding="utf-8")


def merged(parts: Sequence[tuple[BenchRun, Sequence[int]]], count: int) -> BenchRun:
    """Put the parts of a run together, in the order of the rows.

    Args:
        parts: (run, numbers of its rows) of each GPU.
        count: of all rows.

    Raises:
        ValueError: a row is missing, or was measured twice.
    """
    rows: dict[int, BenchRow] = {}
    for run, numbers in parts:
        rows |= dict(zip(numbers, run.rows, strict=True))
    if sorted(rows) != list(range(count)) or sum(len(numbers) for _, numbers in parts) != count:
        raise ValueError(f"{len(rows)} of {count} rows were measured")
    first = parts[0][0]
    method = first.method
    if len(parts) > 1:
        rates = _list(f"{run.bandwidth.copy_bytes_per_s / 1e12:.3f}" for run, _ in parts)
        launches = _list(f"{run.bandwidth.launch_ns / 1e3:.2f}" for run, _ in parts)
        method = (
            *method,
            f"Rows were shared out between {len(parts)} GPUs of one host, all at once; each row's limit comes from its own GPU's "
            f"copy rate ({rates} TB/s) and empty launch ({launches} µs). Compilers had filled their caches on disk before.",
        )
    return replace(first, rows=tuple(rows[number] for number in range(count)), method=method)


def _list(words: Iterable[str]) -> str:
    *before, last = words
    return f"{', '.join(before)} and {last}" if before else last


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _start(kind: str, gpu: str, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-m", "tools.rerun_bench", "--part", kind, *arguments], env=environment)


def main() -> int:
    """Measure, and write what the command line says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--to", type=Path, default=COMMITTED, metavar="DIR", help="default: the committed bench is replaced")
    parser.add_argument(
        "--like", type=Path, default=COMMITTED / "bench.json", metavar="FILE", help="the run whose rows are measured"
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="after so many nothing new is begun")
    parser.add_argument("--processes", type=int, default=8, help="per GPU, that compile")
    parser.add_argument("--part", nargs=4, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    todo = jobs(read_run(asked.like))
    if asked.part:
        kind, counter, part, ends_at = asked.part
        if kind == "fill":
            fill_caches(todo, Path(counter), float(ends_at))
        else:
            measure(todo, Path(counter), Path(part), float(ends_at))
        return 0
    gpus, begun = visible_gpus() or [""], time.time()
    with tempfile.TemporaryDirectory() as folder:
        parts = [Path(folder) / f"{number}.json" for number in range(len(gpus))]
        for kind, each, share in (("fill", asked.processes, 0.5), ("measure", 1, 1.0)):
            ends_at = str(begun + 60 * asked.minutes * share)
            like = ["--like", str(asked.like)]
            running = [
                _start(kind, gpu, [str(Path(folder) / kind), str(part), ends_at, *like])
                for gpu, part in zip(gpus, parts, strict=True)
                for _ in range(each)
            ]
            codes = [process.wait() for process in running]
            if any(codes):
                return 1
        found = [(read_run(part), [int(word) for word in part.with_suffix(".rows").read_text().split()]) for part in parts]
    run = merged(found, len(todo))
    asked.to.mkdir(parents=True, exist_ok=True)
    (asked.to / "bench.json").write_text(compact(dump_run(run)), encoding="utf-8")
    (asked.to / "bench.md").write_text(bench_markdown(run), encoding="utf-8")
    if asked.to != COMMITTED:  # the plots take twelve megabytes
        draw(run, asked.to)
    print(f"{len(run.rows)} rows in {(time.time() - begun) / 60:.1f} minutes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
