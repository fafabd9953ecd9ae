"""C++ kernels: compiled by the system's compiler at their first use, kept in the package or the user's cache, called through ctypes.

torch.utils.cpp_extension would take half a minute for each, since it compiles torch's headers; these kernels need none.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from ._kept import digest
from ._launch import BINARIES

_FOLDER = Path(__file__).parent / "kernels"
_NAME = __package__.rpartition(".")[2]
FLAGS = {
    "fa_transformer_cb45c7.cpp": (
        "-std=c++17",
        "-O3",
        "-march=native",
        "-fopenmp",
        "-ffp-contract=off",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-fPIC",
        "-shared",
    ),
    "fa_add_layernorm_4c0549.cpp": (
        "-std=c++17",
        "-O3",
        "-march=native",
        "-fopenmp",
        "-ffp-contract=off",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-fPIC",
        "-shared",
    ),
    "fa_gelu_tanh_c3eea0.cpp": (
        "-std=c++17",
        "-O3",
        "-march=native",
        "-fopenmp",
        "-ffp-contract=off",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-fPIC",
        "-shared",
    ),
    "fa_add_layernorm_f75e15.cpp": (
        "-std=c++17",
        "-O3",
        "-march=native",
        "-fopenmp",
        "-ffp-contract=off",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-fPIC",
        "-shared",
    ),
}
"""What each kernel is compiled with; with other flags its numbers may differ from those that were checked."""
_waiting: list[Callable[[], object]] = []  # builds that prepare() runs side by side


def cpp_launcher(file: str, integers: tuple[int, ...], checks: int) -> Callable[..., None]:
    """Return the launch of a C++ kernel.

    Args:
        file: of the kernel; its name is that of the entry point.
        integers: sizes, strides and extents of its site, in elements.
        checks: how many of its loop nests check positions that they read from a tensor.
    """
    fixed = [ctypes.c_int64(value) for value in integers]

    @functools.cache
    def built() -> ctypes._CFuncPtr:
        function = getattr(_loaded(_FOLDER / file), file.removesuffix(".cpp"))
        function.restype = None
        return function

    def launch(*tensors: torch.Tensor) -> None:
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
        wrong = (ctypes.c_int64 * (2 * checks))()
        own = [wrong] if checks else []
        built()(*pointers, *fixed, *own, ctypes.c_int(torch.get_num_threads()))
        if any(wrong[2 * place] for place in range(checks)):
            raise IndexError("index out of range in self")

    _waiting.append(built)
    return launch


def prepare() -> None:
    """Compile every kernel that no earlier process has compiled, as many at a time as there are cores."""
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(lambda build: build(), _waiting))


def _compiler() -> list[str]:
    wanted = os.environ.get("CXX", "").split()
    for name in [wanted[0]] if wanted else ["c++", "g++", "clang++"]:
        if found := shutil.which(name):
            return [found, *wanted[1:]]
    raise RuntimeError(f"{_NAME} needs a C++ compiler: install g++ or clang++, or set CXX")


@functools.cache
def _processor() -> str:
    """What -march=native stands for: a shared home, and a package, may serve several machines."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.exists() else []
    flags = [next((line for line in lines if line.startswith(word)), "") for word in ("flags", "Features")]
    return " ".join([platform.machine(), os.environ.get("CXX", ""), *flags])


def _loaded(source: Path) -> ctypes.CDLL:
    flags = FLAGS[source.name]
    name = f"{source.stem}_{digest(source.read_text(encoding='utf-8'), _processor(), *flags)}.so"

    def make(path: Path) -> None:
        command = [*_compiler(), *flags, str(source), "-o", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode:
            raise RuntimeError(f"{source.name} did not compile:\n{done.stderr[-2000:]}")

    try:
        return ctypes.CDLL(str(BINARIES.kept(name, make)))
    except OSError:  # the system lacks a library of the machine that compiled it
        return ctypes.CDLL(str(BINARIES.own(name, make, is_broken=True)))
