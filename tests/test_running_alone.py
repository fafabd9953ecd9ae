"""Tests that share run at once; a test that runs alone waits for them, and nobody overtakes it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.running_alone import Turn

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no flock")


def start(turn: Turn, said: list[str], name: str, *, alone: bool) -> tuple[threading.Thread, threading.Event]:
    leave = threading.Event()

    def run() -> None:
        with turn.take(alone=alone):
            said.append(name)
            leave.wait(30)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, leave


def wait_for(said: list[str], count: int) -> None:
    end = time.monotonic() + 30
    while len(said) < count and time.monotonic() < end:
        time.sleep(0.01)


def test_some_share_and_one_that_runs_alone_is_not_overtaken(tmp_path: Path) -> None:
    turn, said = Turn(tmp_path / "run"), []
    first, second = (start(turn, said, name, alone=False) for name in "ab")
    wait_for(said, 2)
    assert sorted(said) == ["a", "b"]
    alone = start(turn, said, "alone", alone=True)
    time.sleep(0.3)
    late = start(turn, said, "late", alone=False)
    first[1].set()
    time.sleep(0.3)
    assert len(said) == 2  # one of the sharing tests still runs
    second[1].set()
    wait_for(said, 3)
    time.sleep(0.3)
    assert said[2:] == ["alone"]
    alone[1].set()
    wait_for(said, 4)
    assert said[3:] == ["late"]
    late[1].set()
    for thread, _ in (first, second, alone, late):
        thread.join(30)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_does_not_keep_the_turn(tmp_path: Path) -> None:
    turn, (reads, writes) = Turn(tmp_path / "run"), os.pipe()
    with turn.take(alone=True):
        child = os.fork()
        if child == 0:
            os.close(writes)
            os.read(reads, 1)
            os._exit(0)
    with turn.take(alone=True):
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
    os.close(writes)
    os.waitpid(child, 0)
    os.close(reads)
    turn.delete()
    assert not list(tmp_path.iterdir())


def test_plain_pytest_sets_threads_before_torch_is_loaded() -> None:
    code = "import tests.conftest, os, torch; print(os.environ['OMP_NUM_THREADS'], torch.get_num_threads())"
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/tmp"}
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "1"]


def test_slow_tests_are_left_out_only_where_no_marker_and_no_file_was_asked_for() -> None:
    from tests.conftest import _is_plain

    def plain(marker: str, *arguments: str) -> bool:
        return _is_plain(SimpleNamespace(option=SimpleNamespace(markexpr=marker), args=list(arguments)))  # type: ignore[arg-type]

    folder, file = str(Path(__file__).parent), __file__
    assert plain("", folder) and not plain("slow", folder)
    assert not plain("", file) and not plain("", f"{file}::test_name") and not plain("", folder, file)
