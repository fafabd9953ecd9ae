"""Which device and dtype a request means on this machine, and what memory it has."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from fusion_advisor.errors import KernelFaulted, NoCudaDevice, OutOfMemory
from fusion_advisor.workload.request import WorkloadRequest

TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_SHORT_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuda:
    """What PyTorch says of CUDA on this machine.

    Attributes:
        built_for: version that this build of PyTorch is for; None: it is a CPU build.
        is_available: whether a device is visible.
        device_count: how many are.
        current_device: index of the current one.
        init: raises with the driver's reason where there is none.
    """

    built_for: str | None = torch.version.cuda or torch.version.hip
    is_available: Callable[[], bool] = torch.cuda.is_available
    device_count: Callable[[], int] = torch.cuda.device_count
    current_device: Callable[[], int] = torch.cuda.current_device
    init: Callable[[], object] = torch.cuda.init


_THIS_MACHINE = Cuda()


def resolve_device(name: str, cuda: Cuda = _THIS_MACHINE) -> torch.device:
    """Turn ``auto``, ``cpu``, ``cuda`` or ``cuda:N`` into a device with an index.

    Args:
        name: of the device.
        cuda: of this machine.

    Raises:
        NoCudaDevice: CUDA was named and PyTorch sees no such device.
    """
    if name == "cpu" or (name == "auto" and not cuda.is_available()):
        return torch.device("cpu")
    if not cuda.is_available():
        reason, advice = _why_no_cuda(cuda)
        raise NoCudaDevice(index="", reason=reason, advice=advice)
    index = int(name.partition(":")[2] or cuda.current_device())
    count = cuda.device_count()
    if index >= count:
        reason = f"PyTorch sees {count}: cuda:0{f' to cuda:{count - 1}' if count > 1 else ''}"
        raise NoCudaDevice(index=f" {index}", reason=reason, advice="pass one of those")
    return torch.device("cuda", index)


def current_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a device the current one: kernels are compiled for, streams and graphs belong to, and clocks are read of that."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def resolve_dtype(name: str, device: torch.device, config_dtype: torch.dtype | None) -> torch.dtype:
    """Pick the dtype of weights.

    ``auto`` is the configuration's own dtype where that is a 16-bit one and the device is CUDA, else fp32: 16-bit arithmetic is
    slow or emulated on most CPUs, and a model published in fp32 is not silently run in less.
    """
    if name != "auto":
        return TORCH_DTYPES[name]
    if device.type == "cuda" and config_dtype in (torch.float16, torch.bfloat16):
        return config_dtype
    return torch.float32


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``fp32``, ``fp16``, ``bf16``, or torch's own name for other dtypes."""
    return _SHORT_NAMES.get(dtype, str(dtype).removeprefix("torch."))


def memory_bytes(device: torch.device) -> tuple[int, int]:
    """Return (free, total) bytes of the device; (0, 0) where it cannot be known."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        # What torch's allocator holds and does not use is free to us.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device), total
    info = Path("/proc/meminfo")
    if not info.is_file():
        return 0, 0
    rows = dict(re.findall(r"^(\w+):\s+(\d+) kB", info.read_text(), re.MULTILINE))
    return int(rows.get("MemAvailable", 0)) * 1024, int(rows.get("MemTotal", 0)) * 1024


def out_of_memory(
    *,
    stage: str,
    device: torch.device,
    request: WorkloadRequest,
    wanted_bytes: int | None = None,
    error: BaseException | None = None,
) -> OutOfMemory:
    """Phrase an allocation failure.

    Args:
        stage: What was being done, as in ``timing the baseline``.
        device: Where memory ran out.
        request: What was being run; its batch and sequence length decide the advice.
        wanted_bytes: What was needed; read from ``error``'s text when None.
        error: torch's own exception, if one was raised.
    """
    free, total = memory_bytes(device)
    wanted = _gib(wanted_bytes) if wanted_bytes is not None else _wanted_in(str(error or ""))
    ways = []
    if request.batch > 1:
        ways.append(f"--batch {request.batch // 2}")
    if request.input is not None or request.factory is not None:
        ways.append("smaller example inputs")
    elif request.seq_len is not None and request.seq_len > 1:
        ways.append(f"--seq-len {request.seq_len // 2}")
    elif request.seq_len is None:
        ways.append("a shorter --seq-len")
    if wanted_bytes is not None:
        # The weights alone do not fit: a smaller input cannot help.
        ways = ["--dtype bf16"] if request.dtype in ("auto", "fp32") else []
        ways.append("--layers N for a part of the model")
    others = ""
    if device.type == "cuda":
        elsewhere = total - free - torch.cuda.memory_allocated(device)
        others = f"{_gib(elsewhere)} belongs to other processes" if elsewhere > _GIB else ""
    return OutOfMemory(
        kind="GPU" if device.type == "cuda" else "host",
        stage=stage,
        wanted=wanted,
        free=_gib(free),
        total=_gib(total),
        others=others,
        advice=f"try {' or '.join(ways)}" if ways else "a larger device is needed",
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an exception is an allocation failure; torch's CPU allocator raises a bare RuntimeError."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def fault_of(kernel: str, error: Exception) -> KernelFaulted:
    """Return the error for a kernel that faulted on a GPU.

    Args:
        kernel: its name, as ``--skip`` takes it.
        error: torch's, of which the first line is kept.
    """
    return KernelFaulted(kernel=kernel, detail=(str(error).splitlines() or ["no message"])[0])


def first_fault(error: BaseException) -> KernelFaulted | None:
    """Return the kernel's fault that was being handled when an error of torch's came up; None where there was none."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, KernelFaulted):
        seen = seen.__context__
    return seen if isinstance(error, torch.AcceleratorError) else None


def _gib(count: int) -> str:
    return f"{count / _GIB:.1f} GiB" if count >= _GIB // 10 else f"{count / 2**20:.1f} MiB"


def _wanted_in(text: str) -> str:
    if found := re.search(r"Tried to allocate ([\d.]+ [KMGT]iB)", text):
        return found[1]
    if found := re.search(r"allocate (\d+) bytes", text):
        return _gib(int(found[1]))
    return "an unknown amount"


def _why_no_cuda(cuda: Cuda) -> tuple[str, str]:
    """Return why CUDA is absent and what would bring it."""
    if cuda.built_for is None:
        return f"torch {torch.__version__} is a CPU build", "install a CUDA build: https://pytorch.org/get-started/locally"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return f'CUDA_VISIBLE_DEVICES="{visible}" hides every device', "unset CUDA_VISIBLE_DEVICES"
    try:
        cuda.init()
    except (RuntimeError, AssertionError) as error:
        # torch's own first sentence tells a missing driver from one that is too old for this build's CUDA.
        first = str(error).strip().splitlines()[0].partition(". ")[0].rstrip(".")
        return f"{first} (torch is built for CUDA {cuda.built_for})", "install or update the NVIDIA driver"
    return "the driver reports no device", "check `nvidia-smi`"
