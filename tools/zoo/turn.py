"""Turns on a GPU: several workloads build their models on the CPU, and one at a time uses the GPU.

``ZOO_TURN`` names a file of the GPU and ``ZOO_TURN_STARTED`` a file of the workload. Once its model is built, the factory locks
the first. The lock lasts until its process ends, however it ends. Into the second it writes when its turn began.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Mapping
from pathlib import Path

FILE, STARTED = "ZOO_TURN", "ZOO_TURN_STARTED"


def wait_for_turn(environment: Mapping[str, str]) -> None:
    """Wait until no other process has the turn, and keep it until this one ends; nothing to do without ``ZOO_TURN``."""
    if FILE not in environment:
        return
    # Left open on purpose: the lock ends with the process. It is ``lockf``'s, which a process shares with none that it forks.
    fcntl.lockf(os.open(environment[FILE], os.O_RDWR | os.O_CREAT, 0o644), fcntl.LOCK_EX)
    written = Path(environment[STARTED])
    unfinished = written.with_suffix(".part")
    unfinished.write_text(str(time.monotonic()), encoding="utf-8")
    unfinished.replace(written)


def started_at(environment: Mapping[str, str]) -> float | None:
    """Return when a workload's turn began, by ``time.monotonic`` (one clock for all processes); None: it still waits."""
    written = Path(environment[STARTED])
    return float(written.read_text(encoding="utf-8")) if written.is_file() else None
