"""``kernels bench``: every contender of a kernel, side by side, against what the device's memory allows.

A row is one reference at one shape and dtype. Its contenders compute it once, are compared with fp64, and only those whose
numbers are right are timed, together: replays take turns, so a drift of clocks affects all equally.
"""

from __future__ import annotations

import importlib.metadata
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch

from fusion_advisor.evaluate.bench import peers
from fusion_advisor.evaluate.bench.records import BenchRun
from fusion_advisor.evaluate.bench.row import ERROR_FACTOR, BenchOptions, Ceilings, bench_row, makers, set_up
from fusion_advisor.library.discover import load_references
from fusion_advisor.library.spec import Case, KernelSpec
from fusion_advisor.records import Bandwidth
from fusion_advisor.runtime.environment import describe_environment, measure_bandwidth
from fusion_advisor.timing.kernel_timer import cache_bytes, make_clock
from fusion_advisor.workload.device import current_device


class Progress(Protocol):
    """What a bench says while it works."""

    def step(self, done: int, total: int, text: str) -> None:
        """How far it has come."""


def measure_ceilings(device: torch.device) -> Ceilings:
    """Measure a large copy and an empty launch."""
    return Ceilings(bandwidth=measure_bandwidth(device), cache_bytes=cache_bytes(device), clock=make_clock(device))


def bench(
    jobs: Sequence[tuple[KernelSpec, Case]],
    options: BenchOptions,
    progress: Progress,
    *,
    on_progress: Callable[[BenchRun], None] = lambda _: None,
) -> BenchRun:
    """Measure kernels at the given sizes and dtypes.

    Args:
        jobs: manifests with their cases.
        options: what takes part, and for how long.
        progress: gets a step for each row.
        on_progress: gets what is done so far after each row, so that a run that is cut short has left its rows.
    """
    with current_device(options.device):
        ceilings = measure_ceilings(options.device)
    todo = [
        (spec, variant, case, dtype) for spec, case in jobs for variant in variants_of(spec, options) for dtype in case.dtypes
    ]
    run = BenchRun(
        environment=describe_environment(options.device),
        bandwidth=ceilings.bandwidth,
        cache_bytes=ceilings.cache_bytes,
        method=method_sentences(options.device.type),
        peers=tuple((name, version) for name in ("torch", "liger-kernel") if (version := _version(name))),
        rows=(),
    )
    for number, (spec, variant, case, dtype) in enumerate(todo):
        sizes = " ".join(f"{letter}={size}" for letter, size in case.sizes)
        progress.step(number, len(todo), f"{spec.name} {variant} {dtype} {sizes}")
        with current_device(options.device):
            row = bench_row(spec, variant, case, dtype, options, ceilings)
        run = replace(run, rows=(*run.rows, row))
        on_progress(run)
    return run


def run_alone(spec: KernelSpec, variant: str, case: Case, dtype: str, options: BenchOptions, name: str, iterations: int) -> str:
    """Run one contender in a loop, for a profiler to be pointed at; return what was run.

    The loop lies between ``cudaProfilerStart`` and ``cudaProfilerStop``, so compiling and tuning can be left out of a trace.
    """
    ceilings = Ceilings(
        bandwidth=Bandwidth(copy_bytes_per_s=10**12, launch_ns=1000),
        cache_bytes=cache_bytes(options.device),
        clock=make_clock(options.device),
    )
    with tempfile.TemporaryDirectory() as folder:
        bed = set_up(spec, variant, case, dtype, options, ceilings, Path(folder))
        make = dict(makers(spec, options)).get(name)
        contender = make(bed.work) if make else peers.Contender(name=name, note=f"{name} does not run on this device")
        if contender.call is None:
            return contender.note
        on_cuda = options.device.type == "cuda"
        with torch.no_grad():
            contender.call(0)
            if on_cuda:
                torch.cuda.synchronize()
                torch.cuda.profiler.start()
            for number in range(iterations):
                contender.call(number % bed.rotation.sets)
            if on_cuda:
                torch.cuda.synchronize()
                torch.cuda.profiler.stop()
    return f"{name} ran {iterations:,} times over {bed.rotation.sets} sets of inputs {contender.tuning}".rstrip()


def run_first(jobs: Sequence[tuple[KernelSpec, Case]], options: BenchOptions, name: str, iterations: int) -> str:
    """Run one contender of the first job; see :func:`run_alone`."""
    spec, case = jobs[0]
    with current_device(options.device):
        return run_alone(spec, variants_of(spec, options)[0], case, case.dtypes[0], options, name, iterations)


def variants_of(spec: KernelSpec, options: BenchOptions) -> list[str]:
    """The references of a kernel that take part: the first, or those that were asked for."""
    known = [variant for variant, _ in load_references(spec).references]
    return [variant for variant in known if variant in options.variants] if options.variants else known[:1]


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def method_sentences(device_type: str) -> tuple[str, ...]:
    """How the figures came about."""
    if device_type == "cuda":
        how = (
            "Each contender is one CUDA graph of calls over several sets of inputs, together more than three times the L2 cache; "
            "rows marked as in cache are too small for that within 512 sets.",
            "Peers allocate their results inside the graph, ours write into preallocated ones; no two calls share a result.",
        )
    else:
        how = (
            "Each contender is called from Python over several sets of inputs, timed by the host's clock: dispatch is included.",
            "Peers allocate their results; ours write into preallocated ones.",
        )
    return (
        *how,
        "Contenders take turns; figures are the median of the repetitions and the 95% interval of that median.",
        "Limit: bytes moved (each input read once, each output written once) over the rate of a large copy, plus one empty "
        "launch, both measured in this run.",
        f"Only numbers within {ERROR_FACTOR:g} times the reference's own error against fp64 (or one unit in the last place) are "
        "timed. Where users run an op that draws random numbers of its own (dropout), eager and compile run that, and its "
        "results are compared with fp64 in mean and mean square.",
    )
