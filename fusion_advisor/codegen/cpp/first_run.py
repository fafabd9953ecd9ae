"""A C++ kernel's first run takes place in a child process, so that a crash or an endless loop cannot end the user's process.

The child imports ctypes and mmap alone and starts in about 30 ms. It gets the kernel's library, the sizes and strides of the
call, and copies of the input tensors, each in memory that ends at a page which nobody may touch: a kernel that reads or writes
past the end of a tensor crashes there. Sizes are those of the call, because a kernel's loops depend on them. The child gets the
first 64 MiB of the inputs and zeros for the rest, so that no large tensor is copied; zero is in range for every index.

A run that ended well leaves an empty file next to the library in the cache. The library's name holds its digest and the file's
name that of the sizes: a saved plan that is loaded again runs nothing in a child.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fusion_advisor.codegen.common.interface import KernelCrashed

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)
_MOST_COPIED_BYTES = 64 << 20
LEAST_S = 10.0
"""A child may take as long on a busy machine, whatever the kernel does …"""
_SLOWEST_BYTES_PER_S = 50e6
"""… and this much longer for each byte of its tensors: a fiftieth of what one slow core reads."""
_MAIN = Path(__file__).with_name("child_main.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a kernel's entry point, without its tensors."""

    library: Path
    entry: str
    integers: tuple[int, ...]
    """Sizes, strides and offsets."""
    wrong: int
    """Integers that the kernel may write about positions out of range."""
    threads: int

    @property
    def mark(self) -> Path:
        """The file that says that this call ended well before."""
        text = json.dumps([self.entry, self.integers, self.threads])
        return self.library.with_name(f"{self.library.name}.{hashlib.sha256(text.encode()).hexdigest()[:16]}.ran")


def run_first(call: Call, tensors: Sequence[torch.Tensor]) -> None:
    """Run a kernel once in a child process, unless the same call ended well before; the tensors stay as they are.

    Args:
        call: the library and the sizes.
        tensors: inputs, then outputs, on the CPU.

    Raises:
        KernelCrashed: the kernel ended the child, or did not end in time.
    """
    if call.mark.exists():
        return
    if not sys.executable:
        _log.warning("%s runs without a first run in a child process: this process does not know its Python", call.entry)
        return
    sizes = [_bytes_of(tensor) for tensor in tensors]
    left, given, parts = _MOST_COPIED_BYTES, [], []
    for tensor, size in zip(tensors, sizes, strict=True):
        count = min(size, left) // tensor.element_size() * tensor.element_size()
        left -= count
        given.append(count)
        parts.append(ctypes.string_at(tensor.data_ptr(), count) if count else b"")
    order = {
        "preload": _openmp(), "library": str(call.library), "entry": call.entry, "integers": call.integers, "wrong": call.wrong,
        "threads": call.threads, "tensors": list(zip(sizes, given, strict=True)),
    }  # fmt: skip
    allowed_s = LEAST_S + sum(sizes) / _SLOWEST_BYTES_PER_S
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", str(_MAIN)], input=b"".join((json.dumps(order).encode(), b"\n", *parts)),
            capture_output=True, check=False, timeout=allowed_s,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise KernelCrashed(kernel=call.entry, target="cpp", cause=f"did not end within {allowed_s:.0f} s") from error
    if done.stdout.endswith(b"done\n"):
        _remember(call.mark)
    elif done.stdout.startswith(b"ready\n"):
        raise KernelCrashed(kernel=call.entry, target="cpp", cause=_end(done.returncode))
    else:
        words = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit status {done.returncode}"]
        _log.warning("%s runs without a first run in a child process: %s", call.entry, words[-1])


def _bytes_of(tensor: torch.Tensor) -> int:
    """The bytes from a tensor's first element to its last."""
    if not tensor.numel():
        return 0
    reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (1 + reach) * tensor.element_size()


def _openmp() -> list[str]:
    """The OpenMP runtime of this process: another directory than the loader's own may hold the only one there is."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return []
    paths = [line.split(maxsplit=5)[5] for line in maps.read_text(errors="replace").splitlines() if "libgomp" in line]
    return list(dict.fromkeys(path for path in paths if Path(path).exists()))


def _end(status: int) -> str:
    if status >= 0:
        return f"ended its process with exit status {status}"
    try:
        return f"crashed ({signal.Signals(-status).name})"
    except ValueError:
        return f"crashed (signal {-status})"


def _remember(mark: Path) -> None:
    try:
        mark.touch(mode=0o600)
    except OSError as error:  # the next process runs it in a child again
        _log.warning("%s cannot be written: %s", mark, error.strerror)
