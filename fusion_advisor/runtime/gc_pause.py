"""Python's collector of cycles, which walks every object each time that some more have been made."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_OF_PYTHON = 2_000
"""Python 3.12 starts with 375 objects frozen; whoever freezes after an import of torch freezes a hundred times as many."""


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Stop looking for cycles where many objects are made and kept.

    Tracing and rewriting graphs takes a fifth less time so (GPT-2: 2.7 s instead of 3.4), a trace of a million events half
    (processor time of 11 s instead of 21). What was made counts as old afterwards. As young objects all of it would be walked as
    soon as the collector is on again (a quarter of a second after a capture of 32 layers); so it is in the next full collection,
    which that does not hasten. Cycles from before are looked for once more ahead of the pause.
    """
    was_on = gc.isenabled()
    if was_on:
        gc.collect(1)
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if not _has_frozen():
                gc.freeze()
                gc.unfreeze()
            gc.enable()


@contextlib.contextmanager
def old_objects_left_out() -> Iterator[None]:
    """Look for cycles once among all objects, and from then on, inside, only among those that are made inside.

    With torch, dynamo and a captured model loaded, a full collection walks millions of objects that stay (0.3 to 1 s). What
    measures memory asks for one each time.
    """
    gc.collect()
    is_ours = not _has_frozen()
    if is_ours:
        gc.freeze()
    try:
        yield
    finally:
        if is_ours:
            gc.unfreeze()


def _has_frozen() -> bool:
    """Whether the user froze objects, which are to stay so."""
    return gc.get_freeze_count() > _OF_PYTHON
