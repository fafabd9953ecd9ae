"""Runs a function over traces in a process pool on the cores of this machine.

A worker that dies (killed for its memory, say) breaks the pool, and the pool does not tell which task it was. The tasks that were
in flight are then run again, one at a time: the one that breaks the pool alone is given up.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool

from fusion_advisor.fleet.task import WORKER_DIED, Reduce, Reduced, Task

_PER_WORKER = 2
"""Tasks in flight for each process: one runs, one waits."""
_TASKS_PER_PROCESS = 200
"""After so many a process is replaced, so that its heap does not grow without end."""


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run(tasks: Sequence[Task], reduce: Reduce, *, processes: int = 0) -> Iterator[Reduced]:
    """Reduce traces on this machine.

    Args:
        tasks: largest first, so that none is left alone at the end.
        reduce: runs for each, in a process of the pool.
        processes: 0: one for each core.

    Raises:
        CannotWrite: a part could not be written.
    """
    processes = processes or cores()
    waiting = iter(tasks)
    while suspects := (yield from _until_broken(waiting, processes, reduce)):
        for task in suspects:
            yield from _alone(task, reduce)


def _until_broken(waiting: Iterator[Task], processes: int, reduce: Reduce) -> Generator[Reduced, None, list[Task]]:
    """Run tasks until there are none, or until a worker dies; returns the tasks that were in flight then."""
    flying: dict[Future[Reduced], Task] = {}
    pool = _pool(processes)
    try:
        while True:
            for task in itertools.islice(waiting, _PER_WORKER * processes - len(flying)):
                try:
                    flying[pool.submit(reduce, task)] = task
                except BrokenProcessPool:
                    return [task, *flying.values()]
            if not flying:
                return []
            done, _ = wait(flying, return_when=FIRST_COMPLETED)
            for future in done:
                if isinstance(future.exception(), BrokenProcessPool):
                    continue
                yield future.result()
                del flying[future]
            if any(isinstance(future.exception(), BrokenProcessPool) for future in done & flying.keys()):
                return list(flying.values())
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _alone(task: Task, reduce: Reduce) -> Iterator[Reduced]:
    with _pool(1) as pool:
        try:
            yield pool.submit(reduce, task).result()
        except BrokenProcessPool:
            error = "the process that read it died twice (out of memory?)"
            yield Reduced(source=task.source, digest="", error_code=WORKER_DIED, error=error)


def _pool(processes: int) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(processes, mp_context=context, initializer=_begin, max_tasks_per_child=_TASKS_PER_PROCESS)


def _begin() -> None:
    """Leave Ctrl-C to the parent process, and keep each worker to one thread; torch reads the variable when it is imported."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["OMP_NUM_THREADS"] = "1"
