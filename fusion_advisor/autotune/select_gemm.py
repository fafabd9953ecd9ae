"""Who computes a linear layer: one of our kernels or cuBLAS, with our kernels or torch's around it, by measurement.

A choice is stored on disk with the tuned launch parameters, by kernel, dtype, shape bucket and GPU. Where nothing can be measured
the crossover that is declared in ``codegen.gemm.problem`` decides.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fusion_advisor.autotune.build_ahead import Job, LinearJob
from fusion_advisor.autotune.cache import TuningStore
from fusion_advisor.autotune.cublas_with_norm_and_gate import around_launcher, jobs_around
from fusion_advisor.autotune.tune import MUST_GAIN, Gpu, time_launchers, version
from fusion_advisor.codegen.common.interface import Header, KernelBuildFailed, Launcher
from fusion_advisor.codegen.cuda.nvrtc import has_cuda_core
from fusion_advisor.codegen.gemm.cublas import torch_launcher
from fusion_advisor.codegen.gemm.problem import (
    AROUND,
    CROSSOVER_ROWS,
    CUBLAS,
    MOST_ROWS,
    GemvConfig,
    GemvProblem,
    around,
    candidates,
    default_config,
    refusal,
)
from fusion_advisor.codegen.gemm.registry import LINEAR_BACKENDS, gemv_backend
from fusion_advisor.codegen.registry import descriptor
from fusion_advisor.content import content_dir
from fusion_advisor.ir.program import ITEM_BYTES
from fusion_advisor.timing.kernel_timer import Clock, make_clock

_WGMMA_CAPABILITY = (9, 0)
Build = Callable[[GemvConfig], Launcher]


@dataclass(frozen=True, slots=True, kw_only=True)
class GemvChoice:
    """A choice and how it was made."""

    config: GemvConfig
    source: str
    """``default``, ``stored`` or ``measured``."""
    tried: tuple[tuple[str, int], ...] = ()
    """(configuration, nanoseconds of one call) of all that were timed."""
    tune_ns: int = 0

    @property
    def text(self) -> str:
        """``cuda_mma rows=16 warps=4 unroll=4 (measured, best of 6)``."""
        how = f"measured, best of {len(self.tried)}" if self.source == "measured" else self.source
        return f"{self.config.text} ({how})"


def _capability_of(device: torch.device | str) -> tuple[int, int] | None:
    """A GPU's compute capability; None where cuda-core, which launches kernels for it, is missing."""
    return torch.cuda.get_device_capability(device) if has_cuda_core() else None


def is_served(
    problem: GemvProblem,
    device: torch.device | str,
    capability_of: Callable[[torch.device | str], tuple[int, int] | None] = _capability_of,
) -> bool:
    """Whether a device may have a kernel of ours for a problem: one for many rows needs Hopper's tensor cores, and cuda-core."""
    if problem.m <= MOST_ROWS:
        return True
    if refusal(problem, "cuda_wgmma") or torch.device(device).type != "cuda":
        return False
    return capability_of(device) == _WGMMA_CAPABILITY


def choose(
    problem: GemvProblem,
    device: torch.device | str,
    *,
    header: Header,
    backends: Sequence[str] = LINEAR_BACKENDS,
    with_cublas: bool = True,
    store: TuningStore | None = None,
    clock: Clock | None = None,
    build: Build | None = None,
    gpu: Gpu | None = None,
) -> GemvChoice:
    """Return who computes a problem: from the store, or measured now.

    Args:
        problem: at its sizes.
        device: where it will run; without CUDA nothing is measured.
        header: as it will be rendered.
        backends: in order of preference; the first that is installed takes part. No Triton
            kernel won over the CUDA kernel of the same problem on an H200, and compiling both would double the time.
        with_cublas: whether torch's own ops take part. Without them and without a kernel that serves, the choice is still cuBLAS.
        store: the user's file by default.
        clock: of the device by default.
        build: makes a launcher for a configuration; renders and compiles by default.
        gpu: that of the device by default.
    """
    started = time.perf_counter_ns()
    device = torch.device(device)
    backends = tuple(name for name in backends if descriptor(name).is_available())[:1]
    theirs, ours = _contenders(problem, backends, with_cublas=with_cublas)
    fallback = default_config(problem, backends) if with_cublas or not ours else ours[0]
    tried = [*theirs, *ours]
    if device.type != "cuda" or tried in ([], [CUBLAS]):
        return GemvChoice(config=fallback, source="default")
    store = TuningStore() if store is None else store
    contenders = (*backends, *(config.form for config in theirs))
    gpu = gpu or Gpu(device)
    key = choice_key(problem, header.title, contenders, gpu.name())
    stored = store.get_as(GemvConfig, key)
    if stored in tried:
        return GemvChoice(config=stored, source="stored")
    with tempfile.TemporaryDirectory() as folder:
        make = build or (lambda config: launcher_for(problem, config, header=header, folder=Path(folder), store=store))
        timed = _timed(problem, tried, make, gpu, clock or make_clock(device))
    if not timed:
        return GemvChoice(config=fallback, source="default", tune_ns=time.perf_counter_ns() - started)
    chosen, _, best_ns = min(timed, key=lambda item: item[2])
    fallback_ns = next((ns for config, _, ns in timed if config == fallback), 0)
    if fallback_ns and best_ns > fallback_ns * (1 - MUST_GAIN):
        chosen, best_ns = fallback, fallback_ns
    store.put(key, chosen, median_ns=best_ns, default_ns=fallback_ns)
    tried_ns = tuple((text, ns) for _, text, ns in timed)
    return GemvChoice(config=chosen, source="measured", tried=tried_ns, tune_ns=time.perf_counter_ns() - started)


def jobs_for(
    problem: GemvProblem,
    device: torch.device,
    *,
    header: Header,
    backends: Sequence[str] = LINEAR_BACKENDS,
    store: TuningStore | None = None,
    gpu: Gpu | None = None,
) -> tuple[Job | LinearJob, ...]:
    """Return what :func:`choose` will compile in CUDA C++, so that it can be compiled ahead; Triton compiles at a first launch.

    Args:
        problem: as it will be given there.
        device: the same.
        header: the same.
        backends: the same.
        store: the user's file by default.
        gpu: that of the device by default.
    """
    backends = tuple(name for name in backends if descriptor(name).is_available())[:1]
    theirs, ours = _contenders(problem, backends, with_cublas=True)
    tried = [*theirs, *ours]
    if backends != ("cuda",) or tried == [CUBLAS]:
        return ()
    store, gpu = TuningStore() if store is None else store, gpu or Gpu(device)
    key = choice_key(problem, header.title, (*backends, *(config.form for config in theirs)), gpu.name())
    stored = store.get_as(GemvConfig, key)
    wanted = [stored] if stored is not None and stored in tried else tried
    jobs: list[Job | LinearJob] = []
    for config in wanted:
        if config.form in AROUND.values():
            jobs += jobs_around(problem, backends[0], store=store, gpu=gpu)
        elif config != CUBLAS:
            jobs.append(LinearJob(problem=problem, header=header, config=config))
    return tuple(jobs)


def _contenders(
    problem: GemvProblem, backends: tuple[str, ...], *, with_cublas: bool
) -> tuple[list[GemvConfig], tuple[GemvConfig, ...]]:
    """Return torch's ways to compute a problem and ours."""
    ours = candidates(problem, backends)
    theirs = [CUBLAS] if with_cublas else []
    if with_cublas and (problem.m > CROSSOVER_ROWS or not ours):  # below, it never won, and to tune its kernels takes a while
        theirs += filter(None, (around(problem, name) for name in backends))
    return theirs, ours


def _timed(
    problem: GemvProblem, tried: Sequence[GemvConfig], make: Build, gpu: Gpu, clock: Clock
) -> list[tuple[GemvConfig, str, int]]:
    """(configuration, its text, nanoseconds of one call) of every configuration that compiles."""
    built: list[tuple[GemvConfig, str, Launcher]] = []
    for config in tried:
        try:
            built.append((config, config.text, make(config)))
        except KernelBuildFailed:
            continue
    return time_launchers(built, lambda seed: operands(problem, gpu.device, seed=seed), *_bytes(problem), gpu, clock)


def launcher_for(
    problem: GemvProblem, config: GemvConfig, *, header: Header, folder: Path, store: TuningStore | None = None
) -> Launcher:
    """Render, build and bind one configuration, or cuBLAS and what stands around it.

    Args:
        problem: at its sizes.
        config: one that serves it.
        header: for the head comment.
        folder: where the source is written.
        store: tuned launch parameters of what stands around cuBLAS; the user's file by default.

    Raises:
        KernelBuildFailed: it does not serve the problem, or does not compile.
    """
    if config == CUBLAS:
        return torch_launcher(problem)
    backend = config.form.partition("_")[0]
    if config.form in AROUND.values():
        return around_launcher(problem, backend, folder=folder, store=store)
    maker = gemv_backend(backend)
    rendered = maker.render(problem, header, config=config)
    return maker.build(rendered, folder / f"{rendered.entry}{rendered.suffix}").bind(problem, config)


def operands(problem: GemvProblem, device: torch.device, *, seed: int = 0) -> list[torch.Tensor]:
    """Random operands, the output last and empty."""
    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = getattr(torch, problem.dtype)
    *inputs, out = problem.operands
    found = [torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator) for _, shape in inputs]
    return [*found, torch.empty(out[1], dtype=dtype, device=device)]


def choice_key(problem: GemvProblem, title: str, contenders: tuple[str, ...], device_name: str) -> str:
    """Name what a choice holds for: m and n up to the next power of two, k itself; a template that changed asks again."""
    digest = hashlib.sha256()
    for backend in LINEAR_BACKENDS:
        for path in sorted((content_dir("templates") / backend).glob("*.jinja")):
            digest.update(path.read_bytes())
    bucket = f"{_up(problem.m)}x{_up(problem.n)}x{problem.k}"
    parts = (title, problem.text, digest.hexdigest()[:8], problem.dtype, bucket, "+".join(contenders), device_name, version())
    return "|".join(parts)


def _up(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()


def _bytes(problem: GemvProblem) -> tuple[int, int]:
    item = ITEM_BYTES[problem.dtype]
    sizes = [item * torch.Size(shape).numel() for _, shape in problem.operands]
    return sum(sizes[:-1]), sizes[-1]
