"""An end to what may never end: Python code of others, a compiler's, is left after a given time."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_AGAIN_S = 1.0
"""Between two interruptions: the code left first may catch one and go on."""


class TimeIsUp(BaseException):
    """Raised where the code happens to be. No ``Exception``: compilers catch those, and write out what they were at."""


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Leave the code inside after some seconds; it is not watched outside the main thread, nor where there is no such signal.

    Raises:
        TimeIsUp: from within that code, at its next Python instruction.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    is_open = True

    def leave(_signal: int, _frame: FrameType | None) -> None:
        if is_open:
            raise TimeIsUp

    before = signal.signal(signal.SIGALRM, leave)
    signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_S)
    try:
        yield
    finally:
        is_open = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
