"""How long a saved plan takes in a process of its own: python -m tools.saved_plan RUN_DIR [TIMES].

The model of a run is made again and called once, then the run's plan is read and put in place, the first fused step runs, and all
is taken out: TIMES times, of which only the first has everything to load. Beside each stands how fast Python was on the core then
(:mod:`tools.host_cores`), for what a plan waits for is Python.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from fusion_advisor import load_plan
from fusion_advisor.cli.common.core import load_request
from fusion_advisor.fuse.live.fused_model import FusedModel
from fusion_advisor.fuse.live.restore_plan import apply_plan
from fusion_advisor.fuse.live.saved_plan import SavedPlan
from fusion_advisor.fuse.plan.progress import PhaseClock, Progress
from fusion_advisor.workload.load import LoadedWorkload, load_workload
from fusion_advisor.workload.request import WorkloadRequest
from tools.host_cores import loop_ms


def lines(
    run_dir: Path,
    times: int,
    *,
    load: Callable[[WorkloadRequest], LoadedWorkload] = load_workload,
    put_in: Callable[[LoadedWorkload, SavedPlan, PhaseClock], FusedModel] = apply_plan,
) -> Iterator[str]:
    """A line for each time the plan was put in place.

    Args:
        run_dir: of the run.
        times: how often.
        load: makes the model of a request.
        put_in: puts a plan into a model.
    """
    path = run_dir / "request.json"
    loaded = load(load_request(path.read_bytes(), str(path)))
    wait = torch.cuda.synchronize if torch.device(loaded.record.device).type == "cuda" else _nothing
    with torch.no_grad():
        loaded.model(*loaded.args, **loaded.kwargs)
        wait()
        for _ in range(times):
            before_ms, clock, started = loop_ms(), PhaseClock(Progress()), time.perf_counter()
            with clock.phase("read the plan"):
                plan = load_plan(run_dir)
            fused = put_in(loaded, plan, clock)
            with clock.phase("first step"):
                fused(*loaded.args, **loaded.kwargs)
                wait()
            taken_s = time.perf_counter() - started
            if fused.fallbacks:
                raise SystemExit(f"the first step ran the original ops: {next(iter(fused.fallbacks))}")
            fused.revert()
            phases = ", ".join(f"{name} {taken:.2f}" for name, taken in clock.durations_s)
            yield f"{taken_s:.2f} s ({phases}). {fused.started} Loop in Python {before_ms:.0f} ms before, {loop_ms():.0f} behind"


def _nothing() -> None:
    pass


if __name__ == "__main__":
    for line in lines(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
