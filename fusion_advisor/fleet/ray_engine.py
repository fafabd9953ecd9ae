"""Runs a function over traces on a Ray cluster, with Ray's retries and memory limits, and two tasks for each core in flight."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

from fusion_advisor.errors import AdvisorError, EngineLost, MissingExtra
from fusion_advisor.fleet.task import WORKER_DIED, Reduce, Reduced, Task

_RETRIES = 2
_PATCHES_PRINT = "RAY_TQDM_PATCH_PRINT"
"""Unless it is 0, Ray replaces the built-in ``print`` of the whole process."""
_PER_CORE = 2
_BASE_BYTES = 500_000_000
"""torch alone takes half of it."""
_BYTES_PER_BYTE = 12
"""Memory of a worker for a byte of a packed trace: gzip packs them ten times, and events take the size of their text again."""
_MOST_BYTES = 1_000_000_000


def run(tasks: Sequence[Task], reduce: Reduce, *, address: str = "") -> Iterator[Reduced]:
    """Reduce traces on a running cluster, or on one that is started here and stopped again.

    Args:
        tasks: their parts' folder and their files must be reachable from every worker.
        reduce: runs for each, in a task of Ray.
        address: of the cluster (``auto``, ``ray://host:10001``); empty: this machine alone.

    Raises:
        MissingExtra: ray is not installed.
        EngineLost: the cluster went away.
        CannotWrite: a part could not be written.
    """
    try:
        ray = importlib.import_module("ray")
    except ImportError as error:
        raise MissingExtra(command="--engine ray", library="ray", extra="fleet-ray") from error
    is_ours = not ray.is_initialized()
    done = 0
    try:
        if is_ours:
            os.environ.setdefault(_PATCHES_PRINT, "0")
            ray.init(address=address or "local", log_to_driver=False, include_dashboard=False, logging_level="ERROR")
        for result in _results(ray, tasks, reduce):
            done += 1
            yield result
    except (ray.exceptions.RaySystemError, ray.exceptions.RpcError, ConnectionError) as error:
        raise EngineLost(done=f"{done:,}", all=f"{len(tasks):,}", detail=str(error).splitlines()[0]) from error
    finally:
        if is_ours:
            ray.shutdown()


def _results(ray: Any, tasks: Sequence[Task], reduce: Reduce) -> Iterator[Reduced]:
    remote = ray.remote(_call)
    room = _PER_CORE * max(1, int(ray.cluster_resources().get("CPU", 1)))
    flying: dict[Any, Task] = {}
    waiting = list(reversed(tasks))
    while waiting or flying:
        while waiting and len(flying) < room:
            task = waiting.pop()
            needed = min(_MOST_BYTES, _BASE_BYTES + _BYTES_PER_BYTE * task.source.size_bytes)
            flying[remote.options(max_retries=_RETRIES, memory=needed, num_cpus=1).remote(reduce, task)] = task
        ready, _ = ray.wait(list(flying), num_returns=1)
        for reference in ready:
            task = flying.pop(reference)
            yield _result(ray, reference, task)


def _call(reduce: Reduce, task: Task) -> Reduced:
    return reduce(task)


def _result(ray: Any, reference: Any, task: Task) -> Reduced:
    try:
        result: Reduced = ray.get(reference)
    except (ray.exceptions.WorkerCrashedError, ray.exceptions.OutOfMemoryError) as error:
        return Reduced(source=task.source, digest="", error_code=WORKER_DIED, error=f"its worker died: {type(error).__name__}")
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, AdvisorError):
            raise error.cause from error
        raise
    return result
