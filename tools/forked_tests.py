"""Run tests in forked processes, which share one import and one collection: python -m tools.forked_tests [pytest's arguments].

Workers of pytest-xdist import everything themselves: 24 of them on a GPU's host took eight of nine minutes for that. Here one
process imports and collects, and forks before anything asks CUDA. Each worker has one GPU where there are several, takes a few
tests at a time in their order, and leaves a line of JSON for each, so a run that is cut off has its results. A test that ends its
process is a failure, and a worker takes its place. Tests marked ``serial`` run last, by one worker for each GPU.

    python -m tools.forked_tests --workers 24 --seconds 500 --results results -m gpu
"""

from __future__ import annotations

import argparse
import fcntl
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a pool of threads does not live on in a forked process
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # whether there is a GPU is asked without CUDA, which forbids to fork

import pytest
import torch

from tests.gpus import visible_gpus

AT_A_TIME = 4
"""Tests that a worker takes: few, because one may compile for half a minute."""
_MOST_IN_VAIN = 8
"""So many workers in turn may end with their first test. Then the fault is not a test's."""
_GRACE_S = 20.0
"""How long a test may run on when the time is over."""


@dataclass(slots=True, eq=False)
class ForkedTests:
    """A plugin of pytest whose workers are forks of the process that collected.

    Attributes:
        results: the folder of the workers' lines and of what they print.
        workers: processes at a time.
        seconds: after so many no test is begun.
    """

    results: Path
    workers: int
    seconds: float
    started: float = field(default_factory=time.monotonic)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run all tests of a session; True says that this is done."""
        if session.testsfailed or session.config.option.collectonly:
            return True
        if torch.cuda.is_initialized():
            raise pytest.UsageError("a test file asks CUDA while it is imported: no process can be forked after that")
        self.results.mkdir(parents=True, exist_ok=True)
        print(f"\n{len(session.items)} tests collected after {time.monotonic() - self.started:.0f} s", flush=True)
        first_serial = next((n for n, item in enumerate(session.items) if item.get_closest_marker("serial")), len(session.items))
        for name, items, workers in (
            ("test", session.items[:first_serial], self.workers),
            ("serial", session.items[first_serial:], max(1, len(visible_gpus()))),
        ):
            self._run(name, items, min(workers, len(items)))
        read = outcomes(self.results)
        session.testsfailed = sum(outcome in ("failed", "crashed") for outcome in read.values())
        print(summary(read, len(session.items), time.monotonic() - self.started), flush=True)
        return True

    def _run(self, name: str, items: Sequence[pytest.Item], workers: int) -> None:
        """Fork the workers of some tests, and new ones for those that a test has ended."""
        shared, gpus, forked = Next(self.results / f"{name}.next"), visible_gpus(), multiprocessing.get_context("fork")
        alive: dict[Any, tuple[str, BaseProcess]] = {}
        begun = in_vain = 0
        left = range(0)
        while begun < workers or alive:
            while begun < workers:
                gpu = gpus[begun % len(gpus)] if len(gpus) > 1 else None
                worker = forked.Process(target=self._work, args=(f"{name}-{begun}", gpu, items, shared, left))
                worker.start()
                alive[worker.sentinel] = (f"{name}-{begun}", worker)
                begun += 1
            ended, process = alive.pop(self._next_to_end(alive))
            process.join()
            lines = list(_lines(self.results, ended))
            left = left_by(lines, len(items))
            has_result = any(line["outcome"] != "crashed" for line in lines)
            in_vain = 0 if has_result else in_vain + bool(lines or process.exitcode)  # a worker may find no test left
            if in_vain > _MOST_IN_VAIN:
                said = (self.results / f"{ended}.txt").read_text(encoding="utf-8", errors="replace")
                _kill(alive)
                raise pytest.UsageError(f"{in_vain} workers in turn ended with their first test; the last one said:\n{said}")
            if process.exitcode and not self._is_over():
                workers += 1

    def _work(self, worker: str, gpu: str | None, items: Sequence[pytest.Item], shared: Next, left: range) -> None:
        """What a forked process does; its output and its lines go to files of its name."""
        if gpu is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = gpu
        printed = os.open(self.results / f"{worker}.txt", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        with (self.results / f"{worker}.jsonl").open("w", buffering=1) as lines:
            work(items, shared, Writer(lines), self._is_over, left)

    def _is_over(self) -> bool:
        return time.monotonic() - self.started > self.seconds

    def _next_to_end(self, alive: Mapping[Any, tuple[str, BaseProcess]]) -> Any:
        """Wait for a worker to end; those whose test outlasts the time are killed."""
        while not (ready := connection.wait(list(alive), timeout=1.0)):
            if time.monotonic() - self.started > self.seconds + _GRACE_S:
                _kill(alive)
        return ready[0]


def _kill(alive: Mapping[Any, tuple[str, BaseProcess]]) -> None:
    for _, worker in alive.values():
        worker.kill()


@dataclass(slots=True, eq=False)
class Next:
    """The number of the next test, in a file that all workers share."""

    path: Path

    def __post_init__(self) -> None:
        self.path.write_text("0")

    def take(self, count: int) -> int:
        """Return the first of the next so many numbers."""
        with self.path.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            number = int(file.read())
            file.seek(0)
            file.write(str(number + count))
        return number


@dataclass(slots=True, eq=False)
class Writer:
    """A plugin that writes a line when a test begins and one for each of its reports."""

    lines: Any

    def begin(self, item: pytest.Item, number: int) -> None:
        """Say which test is run, for the case that it ends the process."""
        self.write(test=item.nodeid, outcome="crashed", number=number)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write a setup, call or teardown."""
        if report.when == "call" or report.outcome != "passed":
            text = "" if report.passed else report.longreprtext
            self.write(test=report.nodeid, outcome=report.outcome, seconds=round(report.duration, 2), text=text)

    def write(self, **fields: object) -> None:
        """Write one line."""
        self.lines.write(json.dumps(fields) + "\n")


def work(items: Sequence[pytest.Item], shared: Next, writer: Writer, is_over: Callable[[], bool], left: range) -> None:
    """Run tests as long as there are some and there is time: first those that another worker has left."""
    items[0].config.pluginmanager.register(writer)
    part = left
    while part or (part := _part(shared.take(AT_A_TIME), len(items))):
        for number in part:
            if is_over():
                return
            writer.begin(items[number], number)
            following = items[number + 1] if number + 1 in part else None
            items[number].config.hook.pytest_runtest_protocol(item=items[number], nextitem=following)
        part = range(0)


def _part(first: int, count: int) -> range:
    return range(first, min(first + AT_A_TIME, count))


def left_by(lines: Sequence[dict[str, Any]], count: int) -> range:
    """Return the tests that a worker took and did not begin, by its lines."""
    begun = [line["number"] for line in lines if line["outcome"] == "crashed"]
    if not begun:
        return range(0)
    return range(begun[-1] + 1, _part(begun[-1] // AT_A_TIME * AT_A_TIME, count).stop)


def outcomes(results: Path) -> dict[str, str]:
    """Each test's outcome: the last line that speaks of it, and a failure wherever one does."""
    found: dict[str, str] = {}
    for line in _lines(results):
        if found.get(line["test"]) != "failed":
            found[line["test"]] = line["outcome"]
    return found


def _lines(results: Path, worker: str = "*") -> Iterator[dict[str, Any]]:
    for path in sorted(results.glob(f"{worker}.jsonl")):
        yield from map(json.loads, path.read_text(encoding="utf-8").splitlines())


def summary(found: dict[str, str], collected: int, seconds: float) -> str:
    """What the run came to, with the names of the tests that failed."""
    counts = Counter(found.values())
    said = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    left = f", {collected - len(found)} not begun" if len(found) < collected else ""
    bad = [f"{outcome.upper()} {test}" for test, outcome in sorted(found.items()) if outcome in ("failed", "crashed")]
    return "\n".join([*bad, f"{said or 'none run'}{left} of {collected} tests in {seconds:.0f} s"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; all that is not an option of ours goes to pytest."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes at a time")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after so many no test is begun")
    parser.add_argument("--results", type=Path, required=True, metavar="DIR", help="where each worker writes its lines")
    asked, rest = parser.parse_known_args(arguments)
    plugin = ForkedTests(results=asked.results, workers=asked.workers, seconds=asked.seconds)
    return int(pytest.main(["-p", "no:cacheprovider", "-n", "0", "-q", *rest], plugins=[plugin]))


if __name__ == "__main__":
    sys.exit(main())
