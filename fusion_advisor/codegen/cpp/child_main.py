"""The program of the child process that runs a C++ kernel once (see ``first_run``): nothing but the standard library is imported.

It reads one line of JSON and then the bytes of the tensors from its standard input. It writes ``ready`` before the kernel runs
and ``done`` after it.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import resource
import sys
from typing import Any, BinaryIO


def main() -> None:
    """Load the library and call its entry point once."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    source = sys.stdin.buffer
    order: dict[str, Any] = json.loads(source.readline())
    for library in order["preload"]:
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    function = getattr(ctypes.CDLL(order["library"]), order["entry"])
    kept = [_placed(size, given, source) for size, given in order["tensors"]]
    pointers = [ctypes.c_void_p(address) for _, address in kept]
    integers = [ctypes.c_int64(value) for value in order["integers"]]
    wrong = [(ctypes.c_int64 * order["wrong"])()] if order["wrong"] else []
    os.write(1, b"ready\n")
    function(*pointers, *integers, *wrong, ctypes.c_int(order["threads"]))
    os.write(1, b"done\n")
    os._exit(0)


def _placed(size: int, given: int, source: BinaryIO) -> tuple[mmap.mmap, int]:
    """Return memory that ends where a page begins that nobody may touch, and the address of the tensor in it.

    Args:
        size: of the tensor in bytes.
        given: how many of them follow in ``source``; the others are zero.
        source: is read.
    """
    page = mmap.PAGESIZE
    body = -(-size // page) * page
    memory = mmap.mmap(-1, body + 2 * page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    start = page + body - size
    if given:
        view = memoryview(memory)[start : start + given]
        while len(view):
            count = source.readinto(view)  # type: ignore[attr-defined]
            if not count:
                raise EOFError("the tensors' bytes are missing")
            view = view[count:]
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for address in (base, base + page + body):
        if protect(address, page, 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    return memory, base + start


if __name__ == "__main__":
    main()
