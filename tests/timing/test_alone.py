"""Runs of one folder take turns: who times holds the lock, and the others stand still."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusion_advisor.timing import alone
from fusion_advisor.timing.wall_timer import wall_times
from tools import lanes

COUNTS = "import pathlib, sys\nwhile True:\n    pathlib.Path(sys.argv[1]).open('a').write('.')\n"
"""A run that works without end: its file grows while it does."""


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Start a run beside this one and return the file that grows while it works."""
    folder, grows = tmp_path / "turns", tmp_path / "grows"
    folder.mkdir()
    monkeypatch.setenv(alone.FOLDER, str(folder))
    process = lanes.start([sys.executable, "-c", COUNTS, str(grows)], os.environ)
    try:
        wait_for(lambda: grows.exists() and grows.stat().st_size > 0)
        yield grows
    finally:
        lanes.end(process, os.environ)


def wait_for(found: object, seconds: float = 20.0) -> None:
    """Wait until something is so."""
    assert callable(found)
    end = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)


def grows_within(path: Path, seconds: float) -> bool:
    """Whether a run works within so many seconds."""
    before, end = path.stat().st_size, time.monotonic() + seconds
    while time.monotonic() < end:
        if path.stat().st_size > before:
            return True
        time.sleep(0.01)
    return False


def test_the_others_stand_still_while_one_times(worker: Path) -> None:
    with alone.alone():
        time.sleep(0.05)  # what it was writing when it was stopped
        assert not grows_within(worker, 0.3)
    assert grows_within(worker, 20.0)


def test_what_times_steps_stops_the_others(worker: Path) -> None:
    seen: list[bool] = []
    wall_times(lambda: seen.append(grows_within(worker, 0.05)), runs=1, budget_s=0.0, on_cuda=False)
    assert not any(seen[1:])
    assert grows_within(worker, 20.0)


def test_they_go_on_after_an_error(worker: Path) -> None:
    with pytest.raises(ZeroDivisionError), alone.alone():
        raise ZeroDivisionError
    assert grows_within(worker, 20.0)


def test_inside_nothing_waits_for_its_own_lock(worker: Path) -> None:
    with alone.alone(), alone.alone():
        inner = subprocess.run(
            [sys.executable, "-c", "from fusion_advisor.timing.alone import alone\nwith alone():\n    print('in')"],
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
    assert inner.stdout == "in\n"


def test_two_that_time_take_turns(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = (
        "import sys, time\nfrom fusion_advisor.timing.alone import alone\n"
        "for _ in range(5):\n    with alone():\n        for word in ('in', 'out'):\n"
        "            open(sys.argv[1], 'a').write(word + '\\n')\n            time.sleep(0.02)\n"
    )
    (tmp_path / "code.py").write_text(code)
    assert lanes.run([f"{sys.executable} {tmp_path}/code.py {log}"] * 2, os.environ, 60.0) == [0, 0]
    assert log.read_text().split() == ["in", "out"] * 10


def test_a_run_that_dies_while_it_times_leaves_nobody_stopped(worker: Path) -> None:
    code = "import os\nfrom fusion_advisor.timing.alone import alone\nwith alone():\n    os.kill(os.getpid(), 9)\n"
    process = lanes.start([sys.executable, "-c", code], os.environ)
    process.wait(60)
    assert not grows_within(worker, 0.3)
    lanes.end(process, os.environ)
    assert grows_within(worker, 20.0)
    assert len(alone.groups_in(Path(os.environ[alone.FOLDER]))) == 1


def test_without_a_folder_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(alone.FOLDER, raising=False)
    with alone.alone():
        assert alone.FOLDER not in os.environ


def test_lanes_end_at_their_time() -> None:
    began = time.monotonic()
    assert lanes.run(["sleep 60", "exit 3"], os.environ, 1.0) == [-9, 3]
    assert time.monotonic() - began < 30
