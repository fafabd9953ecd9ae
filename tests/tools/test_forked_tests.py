"""Tests in forked processes: each is run once, a crash is a failure of one test, and the time ends the run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.forked_tests import Next, outcomes, summary

ROOT = Path(__file__).parents[2]
FILE = """
import os, time
import pytest

@pytest.mark.parametrize("number", range(20))
def test_right(number):
    assert number >= 0

def test_wrong():
    assert 1 == 2

def test_ends_its_process():
    os._exit(9)

@pytest.mark.skip(reason="no")
def test_skipped():
    pass

@pytest.fixture
def broken():
    raise ValueError

def test_with_a_fixture_that_fails(broken):
    pass
"""


def run(folder, text, *arguments):
    (folder / "test_it.py").write_text(text)
    (folder / "conftest.py").write_text("")
    ours = [sys.executable, "-m", "tools.forked_tests", "--workers", "2", "--results", str(folder / "found"), *arguments]
    command = [*ours, "--rootdir", str(folder), "-c", "/dev/null", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    return done, {name.partition("::")[2]: outcome for name, outcome in outcomes(folder / "found").items()}


@pytest.mark.slow
def test_each_test_is_run_and_a_crash_costs_one(tmp_path):
    done, found = run(tmp_path, FILE)
    bad = {"test_wrong": "failed", "test_ends_its_process": "crashed", "test_with_a_fixture_that_fails": "failed"}
    assert found == {**{f"test_right[{n}]": "passed" for n in range(20)}, "test_skipped": "skipped", **bad}
    assert done.returncode == 1, done.stdout
    assert "1 crashed, 2 failed, 20 passed, 1 skipped of 24 tests" in done.stdout
    assert "CRASHED test_it.py::test_ends_its_process" in done.stdout


def test_right_tests_end_with_0(tmp_path):
    done, found = run(tmp_path, "def test_one(): pass\n")
    assert (done.returncode, found) == (0, {"test_one": "passed"}), done.stdout


def test_workers_that_find_no_test_left_are_no_fault(tmp_path):
    text = "import time, pytest\n@pytest.mark.parametrize('n', range(12))\ndef test_it(n):\n    time.sleep(0.3)\n"
    done, found = run(tmp_path, text, "--workers", "12")
    assert done.returncode == 0, done.stdout
    assert len(found) == 12


def test_workers_that_end_with_their_first_test_end_the_run(tmp_path):
    text = "import os, pytest\n@pytest.mark.parametrize('n', range(60))\ndef test_it(n):\n    print('no GPU')\n    os._exit(3)\n"
    done, found = run(tmp_path, text)
    assert done.returncode != 0 and "workers in turn ended with their first test" in done.stderr + done.stdout
    assert len(found) < 60


@pytest.mark.slow
def test_no_test_is_begun_after_the_time(tmp_path):
    text = "import time, pytest\n@pytest.mark.parametrize('n', range(60))\ndef test_it(n):\n    time.sleep(1)\n"
    done, found = run(tmp_path, text, "--seconds", "4")
    assert 0 < len(found) < 60 and f"{60 - len(found)} not begun of 60" in done.stdout


def test_numbers_are_given_once(tmp_path):
    shared = Next(tmp_path / "next")
    assert [shared.take(4), shared.take(4), shared.take(1)] == [0, 4, 8]


@pytest.mark.parametrize(
    ("found", "said"), [({}, "none run, 3 not begun of 3 tests in 2 s"), ({"a": "passed"}, "1 passed, 2 not begun")]
)
def test_a_summary_says_what_was_not_begun(found, said):
    assert said in summary(found, 3, 2.0)
