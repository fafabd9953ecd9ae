"""Describes the machine of a run and measures the device's ceilings."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch

from fusion_advisor.content import content_dir, tool_version
from fusion_advisor.records import Bandwidth, Environment
from fusion_advisor.runtime.graph_capture import recording_into

_CUDA_COPY_BYTES = 2**30
_CPU_COPY_BYTES = 2**28
_CUDA_COPIES = 4
_CUDA_LAUNCHES = 200
_CPU_LAUNCHES = 2000
# One measurement must not be felt: five repeats, or what fits into this.
_BUDGET_S = 0.6
_REPEATS = 5


def describe_environment(device: torch.device | str) -> Environment:
    """Describe the device and the versions in use; no host name, user or variable is read into it."""
    device = torch.device(device)
    name, capability, memory = _cuda_device(device) if device.type == "cuda" else (_cpu_name(), "", _host_memory_bytes())
    return Environment(
        device_name=name,
        device_kind=device.type,
        capability=capability,
        device_memory_bytes=memory,
        python=platform.python_version(),
        torch=str(torch.__version__),
        triton=_version("triton"),
        transformers=_version("transformers"),
        cuda=str(torch.version.cuda or torch.version.hip or "") if device.type == "cuda" else "",
        driver=_driver() if device.type == "cuda" else "",
        compiler=_compiler(),
        os=_operating_system(),
        cores=_cores(),
        tool=tool_version(),
        commit=checkout_commit(content_dir("templates").parent),
        templates=content_digest(),
        container=_container(),
    )


def checkout_commit(root: Path) -> str:
    """Return the commit of a git checkout, and whether tracked files differ from it; empty where ``root`` is none."""
    if not (root / ".git").exists() or shutil.which("git") is None:
        return ""

    def git(*words: str) -> str | None:
        command = ["git", "-C", str(root), *words]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=10, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit, changed = git("rev-parse", "--short=12", "HEAD"), git("status", "--porcelain", "--untracked-files=no")
    return f"{commit}, changed" if commit and changed else commit or ""


def content_digest() -> str:
    """Return a digest that differs between versions of the templates and kernels."""
    digest = hashlib.sha256()
    for name in ("templates", "kernels"):
        folder = content_dir(name)
        for path in sorted(path for path in folder.rglob("*") if path.suffix in (".jinja", ".toml", ".py")):
            digest.update(f"{path.relative_to(folder).as_posix()}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _container() -> str:
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    marks = {"docker": Path("/.dockerenv"), "podman": Path("/run/.containerenv")}
    return next((name for name, path in marks.items() if path.exists()), "")


def measure_bandwidth(device: torch.device | str) -> Bandwidth:
    """Measure a large copy and the smallest kernel on this device; takes less than a second.

    On CUDA both are replayed from a CUDA graph between two events, so the host's launch overhead is in neither. The copy uses
    1 GiB buffers (less where memory is short), larger than any cache. On a CPU the copy is 256 MiB and the smallest op is an
    in-place add on one element, called from Python as a model calls it. The best of several repeats counts: these are ceilings.
    """
    device = torch.device(device)
    return _measure_cuda(device) if device.type == "cuda" else _measure_cpu()


def _measure_cpu() -> Bandwidth:
    source = torch.ones(_CPU_COPY_BYTES // 4)
    target = torch.empty_like(source)
    copy_ns = _best_ns(lambda: target.copy_(source))
    one = torch.zeros(1)

    def small_ops() -> None:
        for _ in range(_CPU_LAUNCHES):
            one.add_(1)

    launch_ns = _best_ns(small_ops) // _CPU_LAUNCHES
    return Bandwidth(copy_bytes_per_s=2 * _CPU_COPY_BYTES * 10**9 // copy_ns, launch_ns=max(launch_ns, 1))


def _best_ns(action: Callable[[], object]) -> int:
    """Return the shortest of several runs; the first one, which touches fresh pages, is not counted."""
    action()
    times: list[int] = []
    deadline = time.perf_counter() + _BUDGET_S / 2
    while len(times) < _REPEATS and (not times or time.perf_counter() < deadline):
        start = time.perf_counter_ns()
        action()
        times.append(time.perf_counter_ns() - start)
    return max(min(times), 1)


def _measure_cuda(device: torch.device) -> Bandwidth:
    with torch.cuda.device(device), torch.no_grad():
        copy, read, write, triad = _cuda_bytes_per_s(device)
        one = torch.zeros(1, device=device)
        launch_ns = _replay_ns(lambda: one.add_(1), _CUDA_LAUNCHES)
        # The buffers are gone by now; what comes next is the model, which wants that memory in other sizes.
        torch.cuda.empty_cache()
    return Bandwidth(
        copy_bytes_per_s=copy,
        launch_ns=max(round(launch_ns), 1),
        read_bytes_per_s=read,
        write_bytes_per_s=write,
        triad_bytes_per_s=triad,
    )


def _cuda_bytes_per_s(device: torch.device) -> tuple[int, int, int, int]:
    """Return the speeds of a copy, a read, a write and a triad; which mix is fastest differs between devices."""
    free, _ = torch.cuda.mem_get_info(device)
    # Two buffers, and half of what is free stays free.
    source = torch.ones(min(_CUDA_COPY_BYTES, free // 4) // 4, device=device)
    target = torch.empty_like(source)
    size = source.numel() * source.element_size()
    half = source.numel() // 2
    first, second, third = source[:half], source[half : 2 * half], target[:half]
    sink = source.sum()

    def speed(moved: int, action: Callable[[], object]) -> int:
        return int(moved * 1e9 / _replay_ns(action, _CUDA_COPIES))

    # A copy kernel, not a memcpy node: inside a CUDA graph the latter reached 2714 GB/s where kernels reach 4.2 TB/s (H200).
    copy = speed(2 * size, lambda: torch.mul(source, 1.0, out=target))
    read = speed(size, lambda: torch.sum(source, dim=0, out=sink))
    write = speed(size, lambda: target.fill_(1.0))
    triad = speed(3 * half * source.element_size(), lambda: torch.add(first, second, out=third))
    return copy, read, write, triad


def _replay_ns(action: Callable[[], object], count: int) -> float:
    """Return the nanoseconds of one ``action`` in a CUDA graph of ``count`` of them, best of several replays."""
    # Capture needs a first run outside of it: kernels are loaded then.
    action()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with recording_into(graph):
        for _ in range(count):
            action()
    graph.replay()
    torch.cuda.synchronize()
    best = float("inf")
    for _ in range(_REPEATS):
        start = torch.cuda.Event(enable_timing=True)
        stop = torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        best = min(best, start.elapsed_time(stop) * 1e6 / count)
    return max(best, 1.0)


def _cuda_device(device: torch.device) -> tuple[str, str, int]:
    properties = torch.cuda.get_device_properties(device)
    return properties.name, f"{properties.major}.{properties.minor}", int(properties.total_memory)


def _driver() -> str:
    """Return the kernel driver's version; where it is not published, the newest CUDA version it supports."""
    published = Path("/proc/driver/nvidia/version")
    if published.is_file() and (found := re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", published.read_text(errors="replace"))):
        return found[1]
    ask = getattr(torch._C, "_cuda_getDriverVersion", None)
    try:
        version = int(ask()) if ask is not None else 0
    except RuntimeError:
        return ""
    return f"CUDA {version // 1000}.{version % 1000 // 10}" if version else ""


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file() and (found := re.search(r"^model name\s*:\s*(.+)$", info.read_text(errors="replace"), re.MULTILINE)):
        return " ".join(found[1].split())
    return platform.processor() or platform.machine()


def _host_memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0


def _cores() -> int:
    # What this process may use: a container's limit is not os.cpu_count().
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _compiler() -> str:
    """Return the first line of ``c++ --version``; empty where there is no compiler."""
    path = shutil.which(os.environ.get("CXX") or "c++")
    if path is None:
        return ""
    try:
        answer = subprocess.run([path, "--version"], capture_output=True, text=True, errors="replace", timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = answer.stdout.strip().splitlines()
    return lines[0].strip() if lines else ""


def _operating_system() -> str:
    # The kernel's release is left out: cloud and WSL kernels carry names of where they run.
    try:
        name = platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:
        name = f"{platform.system()} {platform.mac_ver()[0]}".strip()
    return f"{name} ({platform.machine()})"


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""
