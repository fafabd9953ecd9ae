"""The committed package of a small GPT-2: what export writes today, but for times, versions and the machine's name."""

from __future__ import annotations

import io
import os
import re
import shutil
from pathlib import Path

import torch
import transformers

FOLDER = Path(__file__).parents[2] / "reports" / "examples" / "gpt2-package-cpu"
VERSIONS = ("2.13.0+cpu", "5.24.0")
"""Of torch and transformers: others trace other ops and have other configurations."""
_VARYING = (
    (re.compile(r"[-\u2212+]?[\d,.]+(?:\s)?(?:ns|µs|ms|s)\b"), "TIME"),
    (re.compile(r"[\d.]+ times as fast"), "RATIO times as fast"),
    (re.compile(r"(?<=run `)[^`]*(?=`)|(?<=from run )\S+"), "RUN"),
    (re.compile(r"(?<=Measured on ).*?(?= with torch)"), "DEVICE"),
    (re.compile(r"not timed"), "TIME"),
    (re.compile(r"(?<=^\| )F\d+(?= \|)|(?<=^# )F\d+(?=:)", re.MULTILINE), "F"),  # numbered by time
)


def masked(text):
    """Return a text without what differs from run to run."""
    for pattern, word in _VARYING:
        text = pattern.sub(word, text)
    return text


def content(path):
    """Return a file as what it is compared by."""
    if path.suffix == ".pt":
        tensors = torch.load(io.BytesIO(path.read_bytes()), weights_only=True)
        return {name: value.tolist() for name, value in tensors.items()}
    text = path.read_text(encoding="utf-8")
    return masked(text) if path.name in ("README.md", "forward.py", "ops.py") else text


def files(folder):
    found = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {path.relative_to(folder).as_posix(): path for path in sorted(found)}


def check_committed(exported):
    """Compare an export with the committed one; ``ACCEPT_GOLDEN=1`` replaces it."""
    if os.environ.get("ACCEPT_GOLDEN") == "1":
        shutil.rmtree(FOLDER, ignore_errors=True)
        for name, path in files(exported).items():
            (FOLDER / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, FOLDER / name)
    committed, found = files(FOLDER), files(exported)
    assert sum(path.stat().st_size for path in committed.values()) < 1_000_000
    if (torch.__version__, transformers.__version__) == VERSIONS:
        assert list(committed) == list(found)
        for name, path in committed.items():
            assert content(path) == content(found[name]), (
                f"{name}: ACCEPT_GOLDEN=1 pytest {Path(__file__).parent}/test_package.py"
            )
