"""Which GPUs there are, told without CUDA: a process that has asked CUDA once sees the same ones for good."""

from __future__ import annotations

import os
import re
from pathlib import Path


def visible_gpus() -> list[str]:
    """Return what ``CUDA_VISIBLE_DEVICES`` may be set to for each GPU that this process would see."""
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    if asked is not None:
        named = [gpu.strip() for gpu in asked.split(",") if gpu.strip()]
        return named[: named.index("-1")] if "-1" in named else named  # CUDA sees none from there on
    return [str(n) for n, _ in enumerate(path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))]


def gpu_of_worker(worker: str, gpus: list[str]) -> str | None:
    """Return the GPU of one of pytest-xdist's workers (``gw3``), which take turns; None where there is nothing to share out."""
    found = re.fullmatch(r"gw(\d+)", worker)
    return gpus[int(found[1]) % len(gpus)] if found and len(gpus) > 1 else None


def has_gpu_tests(path: Path) -> bool:
    """Whether a test file, or one in a folder, has the marker of GPU tests."""
    files = path.rglob("test_*.py") if path.is_dir() else [path]
    return any("pytest.mark.gpu" in file.read_text(encoding="utf-8") for file in files)
