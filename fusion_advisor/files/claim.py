"""A folder that one process writes at a time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from fusion_advisor.errors import RunInUse


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Hold a folder for the time of a block, so that no other run writes into it.

    The system lets go of it when the process ends, however it ends: a run that was killed stops no later one.

    Args:
        folder: that is there.

    Raises:
        RunInUse: another process holds it.
    """
    with contextlib.ExitStack() as held:
        try:
            import fcntl

            handle = os.open(folder, os.O_RDONLY)
            held.callback(os.close, handle)
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held.callback(fcntl.flock, handle, fcntl.LOCK_UN)  # a forked child may outlive the run, and has the handle too
        except BlockingIOError as error:
            raise RunInUse(path=folder) from error
        except (ImportError, OSError):
            pass  # a system or file system without such locks
        yield
