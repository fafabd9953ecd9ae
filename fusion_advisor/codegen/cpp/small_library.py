"""Compiles C++ that is no kernel: a few functions that the host calls, with the compiler and the cache that kernels have."""

from __future__ import annotations

import ctypes
import hashlib
import tempfile
from pathlib import Path

from fusion_advisor.codegen.common.interface import KernelBuildFailed
from fusion_advisor.codegen.cpp.backend import compiler_identity, find_compiler, load_library

_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared")


def small_library(entry: str, source: str) -> ctypes.PyDLL:
    """Compile a source, unless the cache has it, and load it so that Python's lock is held while its functions run.

    Args:
        entry: one of its functions, which must be in the library.
        source: with plain C functions.

    Raises:
        KernelBuildFailed: there is no compiler, or it refused the source.
    """
    compiler = find_compiler()
    if compiler is None:
        raise KernelBuildFailed(kernel=entry, target="cpp", cause="no C++ compiler found")
    key = hashlib.sha256("\0".join((source, compiler_identity(compiler), *_FLAGS)).encode()).hexdigest()[:32]
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{entry}.cpp"
            path.write_text(source)
            library, _ = load_library(entry, f"{entry}_{key}", (*compiler, *_FLAGS), path)
            return ctypes.PyDLL(str(library))
    except OSError as error:
        raise KernelBuildFailed(kernel=entry, target="cpp", cause=str(error)) from error
