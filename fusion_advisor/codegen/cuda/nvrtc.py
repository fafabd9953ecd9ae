"""Compiling CUDA C++ to machine code: NVRTC through cuda-core in this process, or nvcc in another one."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from fusion_advisor.codegen.common.interface import KernelBuildFailed, Rendered
from fusion_advisor.codegen.cuda.shared_memory import SharedMemory
from fusion_advisor.files.kept_code import KeptCode
from fusion_advisor.files.private_folder import cache_folder

_log = logging.getLogger(__name__)


def has_cuda_core() -> bool:
    """Whether kernels can be compiled and launched in this process."""
    return all(importlib.util.find_spec(name) is not None for name in ("cuda", "cuda.core", "cuda.bindings"))


def compile_loaded(rendered: Rendered, macros: dict[str, int]) -> Any:
    """Compile for torch's current device and return cuda-core's kernel.

    Raises:
        KernelBuildFailed: the compiler's first error, or what is missing.
    """
    import torch

    if not torch.cuda.is_available():
        raise KernelBuildFailed(kernel=rendered.entry, target="cuda", cause="this machine has no CUDA device")
    try:
        from cuda.core import Device
    except ImportError as error:
        cause = f"cuda-core is not installed ({error}); pip install 'fusion-advisor[cuda]'"
        raise KernelBuildFailed(kernel=rendered.entry, target="cuda", cause=cause) from error
    torch.cuda.current_stream()  # makes the primary context that both sides share
    device = Device(torch.cuda.current_device())
    device.set_current()
    major, minor = torch.cuda.get_device_capability()
    return _nvrtc(rendered, target_of(rendered, 10 * major + minor), macros).get_kernel(rendered.entry)


def target_of(rendered: Rendered, arch: int) -> str:
    """Name a compute capability (80, 90, 100) as compilers do."""
    return f"sm_{arch}{'a' * rendered.is_for_one_arch}"


def device_shared_memory() -> SharedMemory:
    """The shared memory of torch's current device."""
    import torch
    from cuda.core import Device

    found = Device(torch.cuda.current_device()).properties
    return SharedMemory(
        block_bytes=found.max_shared_memory_per_block_optin, sm_bytes=found.max_shared_memory_per_multiprocessor,
        reserved_bytes=found.reserved_shared_memory_per_block,
        is_distributed=torch.cuda.get_device_capability() >= (9, 0),
    )  # fmt: skip


def allow_shared_memory(kernel: Any, size: int, device: int) -> None:
    """Let a kernel's blocks have as much dynamic shared memory as they are launched with; 48 KiB is what they have unasked.

    cuda-core 1.2 tells this attribute but does not set it.

    Args:
        kernel: cuda-core's.
        size: bytes.
        device: the device's number.

    Raises:
        RuntimeError: the driver refuses.
    """
    from cuda.bindings import driver

    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    (error,) = driver.cuKernelSetAttribute(attribute, size, kernel.handle, driver.CUdevice(device))
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"a block cannot have {size} bytes of shared memory: {error.name}")


def compile_cubin(rendered: Rendered, target: str, macros: dict[str, int], *, compiler: str = "") -> bytes:
    """Compile for a named architecture; no device is needed.

    Raises:
        KernelBuildFailed: the compiler's first error, or that there is no compiler.
    """
    if compiler in ("", "nvrtc"):
        try:
            import cuda.core  # noqa: F401
        except ImportError:
            if compiler:
                raise KernelBuildFailed(kernel=rendered.entry, target=target, cause="cuda-core is not installed") from None
        else:
            return bytes(_nvrtc(rendered, target, macros).code)
    nvcc = find_nvcc()
    if nvcc is None:
        raise KernelBuildFailed(kernel=rendered.entry, target=target, cause="neither cuda-core nor nvcc was found")
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder) / f"{rendered.entry}.cu", Path(folder) / "kernel.cubin"
        source.write_text(rendered.source, encoding="utf-8")
        options = [f"-D{name}={value}" for name, value in macros.items()]
        command = [str(nvcc), "-cubin", f"-arch={target}", "-std=c++17", *options, "-o", str(cubin), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode:
            raise KernelBuildFailed(kernel=rendered.entry, target=target, cause=first_error(done.stderr))
        return cubin.read_bytes()


def find_nvcc() -> Path | None:
    """The CUDA compiler: in CUDA_HOME, on PATH, or where the toolkit installs itself."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    on_path = shutil.which("nvcc")
    candidates = [Path(home) / "bin/nvcc" if home else None, Path(on_path) if on_path else None, Path("/usr/local/cuda/bin/nvcc")]
    return next((path for path in candidates if path is not None and path.is_file()), None)


def first_error(log: str) -> str:
    """The first error of a compiler's log, short."""
    found = re.search(r"error\s*:\s*(.+)", log)
    return found[1].strip()[:200] if found else (log.strip().splitlines() or ["no message"])[-1][:200]


def _program_cache() -> Any:
    """Machine code of earlier runs, under what it was compiled from and with; each is checked before it is loaded.

    cuda-core makes the key and has a cache of its own, which checks neither who may write into it nor what it reads. None where
    cuda-core is too old to take a cache, or no folder takes files.
    """
    try:
        from cuda.core.utils import ProgramCacheResource
    except ImportError:
        return None

    class Cubins(ProgramCacheResource):  # type: ignore[misc] # cuda-core may be missing
        def __init__(self, kept: KeptCode) -> None:
            self._kept = kept

        def __getitem__(self, key: bytes | str) -> bytes:
            found = self._kept.find(_named(key))
            if found is None:
                raise KeyError(key)
            return found.read_bytes()

        def __setitem__(self, key: bytes | str, value: Any) -> None:
            try:
                self._kept.keep_bytes(_named(key), bytes(getattr(value, "code", value)))
            except OSError as error:
                _log.warning("%s keeps no machine code: %s", self._kept.folder, error.strerror or error)

        def __delitem__(self, key: bytes | str) -> None:
            found = self._kept.find(_named(key))
            if found is None:
                raise KeyError(key)
            found.unlink()

        def __len__(self) -> int:
            return sum(1 for _ in self._kept.folder.glob(f"[!.]*{self._kept.suffix}"))

        def clear(self) -> None:
            for path in self._kept.folder.glob(f"[!.]*{self._kept.suffix}"):
                path.unlink()

    try:
        return Cubins(KeptCode(folder=cache_folder("cubin"), suffix=".cubin"))
    except OSError as error:
        _log.warning("no machine code is kept: %s", error.strerror or error)
        return None


def _named(key: bytes | str) -> str:
    return hashlib.sha256(key.encode() if isinstance(key, str) else key).hexdigest()[:32]


def _nvrtc(rendered: Rendered, target: str, macros: dict[str, int]) -> Any:
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(
        arch=target, std="c++17", define_macro=[(name, str(value)) for name, value in macros.items()] or None
    )
    try:
        program = Program(rendered.source, code_type="c++", options=options)
        cache = _program_cache()
        return program.compile("cubin") if cache is None else program.compile("cubin", cache=cache)
    except Exception as error:
        raise KernelBuildFailed(kernel=rendered.entry, target=target, cause=first_error(str(error))) from error
