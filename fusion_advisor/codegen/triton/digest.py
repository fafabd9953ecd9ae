"""The digest of Triton itself, which is part of the key of every kernel that Triton keeps on disk.

The first kernel of a process waits for it, also one that was compiled long ago: 400 MB are read, which takes a core 0.3 s where
its processor has instructions for SHA-256, and 1.1 s where it has none (torch 2.11, Triton 3.6, the file in memory). Most of that
time no other thread of the process waits for it. So it is begun ahead of the imports and traces that come before that kernel.
"""

from __future__ import annotations

import contextlib
import importlib
import threading


def digest_compiler() -> None:
    """Have Triton compute its digest, which it keeps for the process."""
    with contextlib.suppress(ImportError, OSError):  # another version of Triton: the first kernel waits for it
        from triton.runtime.cache import triton_key

        triton_key()


def digest_in_background() -> None:
    """Begin to compute the digest in a thread.

    Triton is imported here and not there: no import is under way in a thread while others import what needs the same modules.
    """
    with contextlib.suppress(ImportError):  # without Triton no kernel of its is built
        importlib.import_module("triton.compiler")
        threading.Thread(target=digest_compiler, name="fusion-advisor-digest", daemon=True).start()
