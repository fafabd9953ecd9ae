"""Times alone on a machine that several runs share: the others stand still meanwhile.

Runs that name one folder in ``FA_ALONE`` take turns while they time. The folder has a file ``lock``, and a file for
each run that is named by its process group. Who times holds the lock and stops the other groups, compilers among them; between
its measurements all of them work. ``tools/lanes.py`` starts runs so. A run of several ranks cannot be one of them: ranks time
together, and one would wait for the lock of another.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
FOLDER = "FA_ALONE"
_DRAIN_S = 0.02
"""For kernels that a stopped process had queued: about as many launches as fit into CUDA's queue, of 20 us each."""


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Let no other run of the folder work while the context lasts; nothing to do without ``FA_ALONE``.

    Inside, the environment names no folder: what is timed there, or by a process that starts there, does not wait for this lock.
    """
    folder = os.environ.get(FOLDER)
    if not folder:
        yield
        return
    with (Path(folder) / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        others = [group for group in groups_in(Path(folder)) if group != os.getpgrp()]
        os.environ[FOLDER] = ""
        try:
            if others:
                signal_all(others, signal.SIGSTOP)
                time.sleep(_DRAIN_S)
            yield
        finally:
            os.environ[FOLDER] = folder
            signal_all(others, signal.SIGCONT)


def timed_alone(measure: Callable[P, T]) -> Callable[P, T]:
    """Have a function that times something run alone."""

    @functools.wraps(measure)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with alone():
            return measure(*args, **kwargs)

    return run


def groups_in(folder: Path) -> list[int]:
    """Return the process groups of the runs that share a folder."""
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())


def signal_all(groups: list[int], number: signal.Signals) -> None:
    """Send a signal to process groups; one that has ended meanwhile gets none."""
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, number)
