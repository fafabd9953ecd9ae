"""Stages of an export: announced, interrupted where the time is up, and no process is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from fusion_advisor.errors import CannotExport
from fusion_advisor.export.aot_package.stages import Stages


class Told:
    """Notes what it is told."""

    def __init__(self):
        self.lines = []

    def phase(self, name):
        self.lines.append(name)

    def note(self, text):
        self.lines.append(f"- {text}")


def test_stages_are_announced_with_what_they_found():
    told = Told()
    with Stages(told) as stages:
        with stages.stage("trace"):
            pass
        with stages.stage("compile"):
            stages.note("3 files")
    assert told.lines == ["trace", "compile", "- 3 files"]


def test_a_stage_that_takes_too_long_is_interrupted_and_named():
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(CannotExport, match=r"longer than 0\.2 s; \d of \d s went into `compile`"), Stages(None, 0.2) as stages:
        with stages.stage("trace"):
            pass
        with stages.stage("compile"):
            with contextlib.suppress(Exception):  # as compilers do: the interruption is not theirs to take
                time.sleep(60)
            pytest.fail("it was taken for an error")
    assert signal.getsignal(signal.SIGALRM) is before and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_what_ends_in_time_is_not_interrupted():
    with Stages(None, 0.2) as stages, stages.stage("trace"):
        pass
    time.sleep(0.3)


def test_in_another_thread_the_next_stage_does_not_begin():
    clock = iter([0.0, 0.0, 1.0, 1.0, 12.0, 12.0])

    def export():
        assert threading.current_thread() is not threading.main_thread()
        with Stages(None, 5, now=lambda: next(clock)) as stages:
            with stages.stage("trace"):
                pass
            with stages.stage("compile"):
                pytest.fail("it began")

    with ThreadPoolExecutor(1) as pool, pytest.raises(CannotExport, match="11 of 12 s went into `trace`"):
        pool.submit(export).result()


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_process_meanwhile_is_ended_with_the_block(tmp_path):
    command = [sys.executable, "-c", "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(60)"]
    stages = Stages()
    with pytest.raises(RuntimeError, match="planted"), stages.meanwhile(command, tmp_path):
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            time.sleep(0.01)
        pid = int((tmp_path / "pid").read_text())
        assert is_alive(pid)
        raise RuntimeError("planted")
    assert not is_alive(pid)


def test_a_process_that_waits_goes_on_when_it_is_waited_for(tmp_path):
    command = [sys.executable, "-c", "import sys, os; sys.stdin.read(); print(os.path.exists('ready')); sys.exit(3)"]
    stages = Stages()
    with stages.meanwhile(command, tmp_path, waits=True) as finished:
        (tmp_path / "ready").touch()
        done = finished()
    assert (done.returncode, done.stdout) == (3, "True\n")
