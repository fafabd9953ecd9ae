"""What plain ``pytest`` needs: threads, workers, tests that run alone, and tests that this machine cannot run.

A test that measures speed (``serial``) runs while no other worker runs a test. A test that this machine lacks something for is
deselected, and so is a ``slow`` test where no marker and no file was asked for; one line each at the end says how many and why.
Each worker has one GPU where there are several.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded: the tensors are small, and each core has a worker
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # a thread that spins while it waits takes the other worker's core

import importlib.util
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fusion_advisor.codegen.cuda.nvrtc import has_cuda_core
from tests.gpus import gpu_of_worker, has_gpu_tests, visible_gpus
from tests.running_alone import Turn
from tests.timing.planted import PlantedTimer

_GPU = gpu_of_worker(os.environ.get("PYTEST_XDIST_WORKER", ""), visible_gpus())
if _GPU is not None:  # before anything asks CUDA
    os.environ["CUDA_VISIBLE_DEVICES"] = _GPU


@pytest.fixture
def clock() -> PlantedTimer:
    """A machine's clock, which tests move themselves."""
    return PlantedTimer()


def find_chromium() -> str | None:
    """An installed Chromium; nothing is downloaded."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def _has_browser() -> bool:
    return find_chromium() is not None and all(map(importlib.util.find_spec, ("playwright", "axe_playwright_python")))


NEEDS: dict[str, tuple[Callable[[], bool], str]] = {
    "gpu": (
        torch.cuda.is_available,
        "there is no CUDA device; where there is one, run `pytest -n 8 -m gpu`",
    ),
    "nvrtc": (has_cuda_core, "cuda-core is not installed: pip install '.[test]'"),
    "browser": (_has_browser, "Chromium or Playwright is missing: apt-get install chromium; pip install '.[test]'"),
}
"""Marker: whether this machine has what the test needs, and the fix where it has not."""

_RUN = pytest.StashKey[str]()
_LEFT_OUT = pytest.StashKey[Counter[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_LEFT_OUT] = Counter()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One worker per core, and at most four: each takes about a gigabyte."""
    return min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, 4)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    missing = [name for name, (is_there, _) in NEEDS.items() if not is_there()] + (["slow"] if _is_plain(config) else [])
    wanted: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        lacks = next(filter(item.get_closest_marker, missing), None)
        (wanted if lacks is None else left_out).append(item)
        config.stash[_LEFT_OUT].update([lacks] if lacks else [])
    config.hook.pytest_deselected(items=left_out)
    items[:] = sorted(wanted, key=_is_serial)  # at the end, where the other workers have least to do
    if hasattr(config, "workeroutput"):
        config.workeroutput["left_out"] = dict(config.stash[_LEFT_OUT])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    counted = getattr(node, "workeroutput", {}).get("left_out", {})
    node.config.stash[_LEFT_OUT] = Counter(counted) | node.config.stash[_LEFT_OUT]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    for name, count in config.stash[_LEFT_OUT].items():
        reason = NEEDS[name][1] if name in NEEDS else "`pytest -m slow` runs them"
        terminalreporter.write_line(f"{count:,} tests marked `{name}` left out: {reason}")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None:
        return (yield)
    with _turn(run).take(alone=_is_serial(item)):
        return (yield)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files without GPU tests alone where only these are asked for: importing all took 26 workers five minutes."""
    return True if config.option.markexpr == "gpu" and not has_gpu_tests(collection_path) else None


def _is_plain(config: pytest.Config) -> bool:
    """Whether neither a marker nor a file was asked for: then slow tests are left out."""
    return not config.option.markexpr and all(Path(argument).is_dir() for argument in config.args)


def _is_serial(item: pytest.Item) -> bool:
    return item.get_closest_marker("serial") is not None


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.config.stash[_RUN] = node.workerinput["testrunuid"]


def pytest_unconfigure(config: pytest.Config) -> None:
    if _RUN in config.stash:
        _turn(config.stash[_RUN]).delete()


def _turn(run: str) -> Turn:
    return Turn(Path(tempfile.gettempdir()) / f"fusion-advisor-tests-{run}")
