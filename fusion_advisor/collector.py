"""Python's collector of cycles, which walks every object each time that some more have been made."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Stop looking for cycles where many objects are made and kept.

    Tracing and rewriting graphs takes a fifth less time so (GPT-2: 2.7 s instead of 3.4), a trace of a million events half
    (processor time of 11 s instead of 21).
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
