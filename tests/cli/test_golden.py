"""What people see, kept as text: ``ACCEPT_GOLDEN=1 pytest tests/cli/test_golden.py`` writes the files again."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.cells import cell_len

from tests.cli.conftest import Ran
from tests.cli.test_commands import ROOT, put_run

Run = Callable[..., Ran]
GOLDEN = Path(__file__).parent / "golden"
WIDTHS = (40, 60, 80, 100, 120)
COMMANDS = {
    "profile": ("report", "@last", "--format", "md"),
    "apply": ("report", "2029", "--format", "md"),
    "sizes": ("report", "2028", "--format", "md"),
    "compare": ("compare", "2029:eager", "2029:applied", "--fail-on", "speedup<1.05"),
}


@pytest.mark.parametrize("color", ["never", "always"])
@pytest.mark.parametrize("name", COMMANDS)
def test_tables(run: Run, monkeypatch: pytest.MonkeyPatch, name: str, color: str) -> None:
    put_run("20300102-030405-7f3a9c", "profiled")
    put_run("20290102-030405-aaaaaa", "applied")
    put_run("20280102-030405-bbbbbb", "sized")
    pages = []
    for width in WIDTHS:
        monkeypatch.setenv("COLUMNS", str(width))
        ran = run(*COMMANDS[name], "--color", color)
        assert ran.code == 0, ran.err
        assert ran.err == ""
        pages.append(f"== {width} columns\n{ran.out}")
    shown = "\n".join(pages).replace("\x1b", "␛")
    path = GOLDEN / f"{name}.{'ansi' if color == 'always' else 'txt'}"
    if os.environ.get("ACCEPT_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(shown, encoding="utf-8")
    assert shown == path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("env", "is_coloured"),
    [({"TERM": "xterm-256color"}, True), ({"TERM": "xterm", "NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)],
)
def test_a_real_terminal(env: dict[str, str], is_coloured: bool) -> None:
    directory = put_run("20300102-030405-7f3a9c", "hostile")
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 72, 0, 0))
    command = [sys.executable, "-m", "fusion_advisor", "report", str(directory), "--format", "json"]
    clean = {name: value for name, value in os.environ.items() if name not in ("TERM", "NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    done = subprocess.Popen(command, stdout=theirs, stderr=theirs, env={**clean, **env, "PYTHONPATH": str(ROOT)})
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # Linux ends a terminal whose other side is closed with an error
        while part := os.read(ours, 65536):
            shown += part
    os.close(ours)
    assert done.wait(timeout=60) == 0
    text = shown.decode()
    assert ("\x1b[" in text) == is_coloured
    lines = re.sub(r"\x1b\[[\d;]*m", "", text).split("\r\n")
    assert not [char for line in lines for char in line if not char.isprintable()]
    assert max(cell_len(line) for line in lines) <= 72


def test_colour_adds_nothing_but_colour() -> None:
    """Whoever cannot see colours reads the same words in the same places."""
    for name in COMMANDS:
        coloured = (GOLDEN / f"{name}.ansi").read_text(encoding="utf-8")
        assert "␛[" in coloured
        assert re.sub(r"␛\[[\d;]*m", "", coloured) == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")
