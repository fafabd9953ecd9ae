"""Trace the library's patterns in a process of their own while the model is loaded, which keeps one core busy and no other.

A user's first run would trace them itself, for 6 s of CPU time (``docs/measurements/first_minutes.md``); later runs read them
(``library.kept_patterns``). Nothing waits for the process. It ends when the model is there, because whatever runs then disturbs
what is timed: what it has traced is kept, and the rest is traced where it is needed.

This module loads no torch before the process of its own does: it is asked while torch is not there yet.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from fusion_advisor.content import content_dir, package_digest
from fusion_advisor.files.private_folder import cache_folder

_log = logging.getLogger(__name__)
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from fusion_advisor.library.trace_ahead import trace_all; trace_all()"
)
_QUIET = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
"""One thread: the other core has the model to load. No GPU: a CUDA context takes half a gigabyte of it."""


@contextlib.contextmanager
def traced_ahead() -> Iterator[None]:
    """Trace patterns that are not kept yet for as long as the block runs.

    Nothing is started where torch is loaded already, where all patterns are kept, or where there is one core. Where no process
    can be started, the log says why, and the patterns are traced when they are needed.
    """
    try:
        process = _start() if "torch" not in sys.modules and sys.executable and _cores() > 1 and not _mark().is_file() else None
    except OSError as error:
        _log.warning("patterns are not traced ahead: %s", error)
        process = None
    try:
        yield
    finally:
        if process is not None:
            process.terminate()
            process.wait()


def trace_all() -> None:
    """Trace the shipped kernels: first what each run reads of all of them, then what it reads of the kernels that match."""
    from fusion_advisor.library.discover import list_kernels
    from fusion_advisor.library.patterns import first_patterns, kernel_patterns

    specs = list_kernels()
    for trace in (first_patterns, kernel_patterns):
        for spec in specs:
            trace(spec)
    _mark().touch()


def _start() -> subprocess.Popen[bytes]:
    # The search path is this process's own: a folder that is the working directory by chance has no say.
    command = [sys.executable, "-P", "-c", _PROGRAM, json.dumps(sys.path)]
    nothing = subprocess.DEVNULL
    return subprocess.Popen(command, env={**os.environ, **_QUIET}, stdin=nothing, stdout=nothing, stderr=nothing)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _mark() -> Path:
    """The empty file that says that all patterns of these versions are kept."""
    digest = hashlib.sha256(f"{package_digest()} {_torch_version()} {sys.version}".encode())
    for path in sorted(content_dir("kernels").glob("*/*.*")):
        if path.suffix in (".toml", ".py"):
            digest.update(f"{path.parent.name}/{path.name}:".encode() + path.read_bytes())
    return cache_folder("patterns") / f"all-{digest.hexdigest()[:32]}"


def _torch_version() -> str:
    with contextlib.suppress(PackageNotFoundError):
        return version("torch")
    return ""
