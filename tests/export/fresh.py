"""An environment that has the exported packages and no fusion_advisor, and what they do there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("without_us.py")


def environment(folder):
    """Make a virtual environment that finds torch, pytest and setuptools where this one does; return its Python.

    A path in a ``.pth`` file is not searched for other ``.pth`` files: an editable install of this project is not found.
    """
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    places = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "theirs.pth").write_text("\n".join(places))
    return python


def in_a_fresh_environment(folder, runs):
    """Install packages into a new environment, run their tests there, and compare them with the fused models.

    Args:
        folder: with the exported packages.
        runs: model, inputs and fused model by the package's name.

    Returns:
        what ``without_us.py`` says, by the package's name.
    """
    for name, (model, inputs, fused) in runs.items():
        with torch.no_grad():
            outputs = {key: value for key, value in fused(**inputs).items() if isinstance(value, torch.Tensor)}
        assert not fused.fallbacks
        torch.save({"state": model.state_dict(), "inputs": inputs, "outputs": outputs}, folder / f"{name}.pt")
    python = environment(folder / "env")
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", *(str(folder / name) for name in runs)]
    ran([python, "-I", "-m", "pip", "--disable-pip-version-check", "install", *words], folder, outside)
    printed = ran([python, "-I", SCRIPT, folder, *runs], folder, outside)
    return json.loads(printed.strip().splitlines()[-1])


def ran(command, folder, outside):
    """Run a command outside of this checkout; return what it printed."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False, cwd=folder, env=outside)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_shown(shown):
    """Fail where a package differs from its fused model or fails one of its own tests, which compile it as one graph."""
    assert shown["equal"]
    assert all(shown["equal"])
    assert shown["fallbacks"] == {}
    assert shown["is_installed"]
    assert shown["loaded"] == []
    assert shown["tests"] == pytest.ExitCode.OK, shown["printed"]
