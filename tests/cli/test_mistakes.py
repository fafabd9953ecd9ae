"""Mistakes in what a user passes: a model or kernel that does not run is said to be theirs, with the place, and early."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Ran

Run = Callable[..., Ran]
ROOT = Path(__file__).parents[2]

MODEL = """
import torch
from torch import nn

class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        h = self.up(x)
        return x + self.down(0.5 * h * (1 + torch.tanh(0.7978845608 * (h + 0.044715 * h**3))))

class Wrong(nn.Module):
    def forward(self, x):
        return x @ x

def make():
    torch.manual_seed(0)
    return Tiny().eval(), torch.randn(4, 32, 64)

def wrong():
    return Wrong().eval(), torch.randn(2, 4)

class Tired(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls > 2:
            raise LookupError("no more numbers")
        return torch.tanh(x) * 2

def tired():
    return Tired().eval(), torch.randn(2, 4)

class Leaving(nn.Module):
    def forward(self, x):
        raise SystemExit("enough")

def leaving():
    return Leaving().eval(), torch.randn(2, 4)

def done():
    raise SystemExit("usage: m.py --data FILE")

def broken():
    raise ValueError("not today")

class Speechless(Exception):
    def __str__(self):
        raise RuntimeError

def speechless():
    raise Speechless
"""

MANIFEST = """
name = "mine"
summary = "a test"
source = "a test"
backends = ["cpp"]
dtypes = ["float32"]
constraints = []
has_backward = false
outputs = ["out"]
[inputs]
x = ["R", "C"]
[[check]]
sizes = { R = 7, C = 129 }
[[bench]]
sizes = { R = 7, C = 129 }
"""


@pytest.fixture(autouse=True)
def files(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(MODEL)


def kernel(folder: Path, body: str, manifest: str = MANIFEST) -> str:
    (folder / "mine").mkdir(parents=True)
    (folder / "mine" / "kernel.toml").write_text(manifest)
    (folder / "mine" / "reference.py").write_text(textwrap.dedent(body))
    return str(folder)


def test_a_model_that_raises_is_no_bug_of_ours(run: Run) -> None:
    ran = run("apply", "m.py:wrong")
    assert ran.code == 4
    assert "error[FA307]: `m.py:wrong` raised RuntimeError when it was called: mat1 and mat2 shapes" in ran.err
    assert "note: at m.py:" in ran.err
    assert "Traceback" not in ran.err
    assert "bug" not in ran.err


def test_a_factory_that_raises(run: Run) -> None:
    ran = run("apply", "m.py:broken")
    assert ran.code == 4
    assert "error[FA302]: `m.py:broken` raised ValueError: not today" in ran.err
    assert "Traceback" in run("apply", "m.py:broken", "-vv").err


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("done", "error[FA302]: `m.py:done` raised SystemExit: usage: m.py --data FILE"),
        ("leaving", "error[FA307]: `m.py:leaving` raised SystemExit when it was called: enough"),
        ("speechless", "error[FA302]: `m.py:speechless` raised Speechless: <exception str() failed>"),
    ],
)
def test_a_users_exit_is_no_success(run: Run, name: str, says: str) -> None:
    ran = run("profile", f"m.py:{name}")
    assert ran.code == 4
    assert says in ran.err


def test_a_model_that_raises_in_a_later_call_is_no_bug_of_ours(run: Run) -> None:
    ran = run("profile", "m.py:tired")
    assert ran.code == 4
    assert "error[FA317]: `m.py:tired` raised LookupError in a later call: no more numbers" in ran.err
    assert "note: at m.py:" in ran.err
    assert "bug" not in ran.err


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("import nosuch\n", "does not import: ModuleNotFoundError: No module named 'nosuch'"),
        ("def reference_a(x):\n    return x.nosuch()\n", "cannot be traced: AttributeError"),
        ("def reference_a(y):\n    return y\n", "takes (y), the manifest says (x)"),
    ],
)
def test_a_broken_reference_is_told_before_the_model_is_loaded(run: Run, tmp_path: Path, body: str, says: str) -> None:
    ran = run("apply", "m.py:make", "--kernels", kernel(tmp_path / "own", body))
    assert ran.code == 9
    assert "error[FA412]" in ran.err
    assert says in ran.err
    assert "load …" not in ran.err


def test_a_broken_manifest(run: Run, tmp_path: Path) -> None:
    own = kernel(tmp_path / "own", "", manifest="name = [")
    for command in (("apply", "m.py:make"), ("kernels", "list"), ("kernels", "show", "mine")):
        ran = run(*command, "--kernels", own)
        assert ran.code == 9
        assert "mine/kernel.toml" in ran.err


def test_a_kernel_folder_that_is_not_there(run: Run) -> None:
    ran = run("apply", "m.py:make", "--kernels", "nowhere")
    assert ran.code == 2
    assert "nowhere" in ran.err


def test_own_kernels_are_found_and_the_shipped_folder_is_not_found_twice(run: Run, tmp_path: Path) -> None:
    own = kernel(tmp_path / "own", "def reference_a(x):\n    return x.sin() * x\n")
    assert "mine" in run("kernels", "list", "--kernels", own).out
    assert "mine" not in run("kernels", "list").out
    assert "reference_a" in run("kernels", "show", "mine", "--kernels", own).out
    shipped = run("kernels", "list", "--kernels", str(ROOT / "kernels"))
    assert shipped.code == 0
    assert shipped.out == run("kernels", "list").out


def test_a_new_kernel_where_nothing_can_be_written(run: Run) -> None:
    Path("file").write_text("")
    ran = run("kernels", "new", "mine", "-o", "file/below")
    assert ran.code == 5
    assert "error[FA306]" in ran.err


@pytest.mark.slow
def test_the_profiler_says_nothing_in_the_terminal(tmp_path: Path) -> None:
    done = cli(tmp_path, "profile", "m.py:make", "--runs", "3", "-o", "run")
    _, err = done.communicate(timeout=120)
    assert done.returncode == 0, err
    assert "USDT" not in err
    assert "Traceback" not in err


def test_ctrl_c_keeps_what_was_found(tmp_path: Path) -> None:
    done = cli(tmp_path, "apply", "m.py:make", "-o", "run")
    report = tmp_path / "run" / "report.json"
    deadline = time.monotonic() + 120
    while not report.exists() and done.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    done.send_signal(signal.SIGINT)
    out, err = done.communicate(timeout=120)
    # Interrupted inside an exec() of torch's, Python ends itself with SIGINT after our exit code; a shell shows 130 for both.
    assert done.returncode in (130, -signal.SIGINT), err
    assert out == ""
    assert "stopping after this step; Ctrl-C again stops at once" in err
    assert err.endswith("interrupted; partial results are in run\n  next: fusion-advisor report run\n")
    assert (tmp_path / "run" / "report.html").is_file()
    assert "Traceback" not in err
    assert '"status": "interrupted"' in report.read_text()
    shown = cli(tmp_path, "report", "run")
    out, err = shown.communicate(timeout=60)
    assert shown.returncode == 0, err
    assert "The run was interrupted." in out


def cli(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start the program as a user does, with Ctrl-C working whatever the test runner does with it."""
    return subprocess.Popen(
        [sys.executable, "-m", "fusion_advisor", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # noqa: PLW1509 - no threads here
    )
