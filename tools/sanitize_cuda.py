"""CUDA C++ and Triton kernels under compute-sanitizer's four tools, on a CUDA machine: ``python -m tools.sanitize cuda``.

Small cases of every manifest by default, with the first spelling in one dtype or two; all of them with ``--all``. The rows that a
cluster of blocks shares too, for such a launch is chosen by timing only. Jobs are spread over the GPUs that there are. Only our
kernels (``fa_*``) are instrumented, but for initcheck, which has to see who wrote what they read. The caching allocator is off,
so that a byte past a tensor is a byte past an allocation. A fault for each tool is planted first: a tool that does not see it has
seen nothing.
"""

from __future__ import annotations

import importlib
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PLANTED = """
extern "C" __global__ void fa_planted_memcheck(int* out) { out[blockIdx.x * 32 + threadIdx.x] = 1; }
extern "C" __global__ void fa_planted_racecheck(int* out) {
    __shared__ int all[64];
    all[threadIdx.x] = threadIdx.x;
    out[threadIdx.x % 8] = all[63 - threadIdx.x];
}
extern "C" __global__ void fa_planted_initcheck(int* out) { out[threadIdx.x % 8] += 1; }
extern "C" __global__ void fa_planted_synccheck(int* out) {
    __shared__ int all[64];
    all[threadIdx.x] = threadIdx.x;
    if (threadIdx.x < 48) __syncthreads();
    if (threadIdx.x <= 16) {
        __syncwarp(0xffffu);
        out[threadIdx.x % 8] = all[threadIdx.x];
    }
}
"""
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
CLUSTERS = "clusters"
LIMIT_S = 500
PLANTED_LIMIT_S = 120
EACH = 2
"""Kernels per process with ``--all``: few, so that processors are busy to the end and what is found is said early. GEMVs, which
take minutes under racecheck, have one each."""
EACH_SMALL = 4
"""Kernels per process of small cases: starting one takes 10 s."""
SMALL_ELEMENTS = 2**16
"""The looped kernels, whose rows are wider than the registers hold, have cases below it."""
SMALL_DTYPES = {
    "memcheck": ("float32", "bfloat16"), "initcheck": ("float32", "bfloat16"),
    "racecheck": ("bfloat16",), "synccheck": ("bfloat16",),
}  # fmt: skip
"""By tool: a dtype changes what is read and written, but neither barriers nor shared memory."""
SMALL_CONFIGS = 2
"""Configurations of a GEMV in small cases, of each backend: its own choice and the next."""
FAULT = 66
_OURS = re.compile(r"^========= (Uninitialized [^\n]*)\n=========\s+at [^\n]*\bfa_[^\n]*", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What one process under one tool came to.

    Attributes:
        tool: of compute-sanitizer.
        kernels: names of manifests that were asked for.
        cases: that ran and were right.
        failed: cases with wrong numbers.
        said: the tool's last line.
        output: the end of what was printed; empty where all is well.
    """

    tool: str
    kernels: tuple[str, ...]
    cases: int
    failed: tuple[str, ...]
    said: str
    output: str

    @property
    def is_clean(self) -> bool:
        """Whether the tool found nothing and every case was right."""
        return not self.output


def find_sanitizer() -> str | None:
    """The path of compute-sanitizer, which is part of the CUDA toolkit."""
    usual = Path("/usr/local/cuda/bin/compute-sanitizer")
    return shutil.which("compute-sanitizer") or (str(usual) if usual.exists() else None)


# ---------------------------------------------------------------------- inside a process under the sanitizer


def launch_planted(tool: str) -> None:
    """Launch a kernel with the fault that the tool is for."""
    import torch
    from cuda.core import Device, LaunchConfig, Stream, launch

    from fusion_advisor.codegen.common.interface import Rendered
    from fusion_advisor.codegen.cuda.nvrtc import compile_loaded

    kernel = compile_loaded(Rendered(backend="cuda", entry=f"fa_planted_{tool}", source=PLANTED, suffix=".cu"), {})
    out = torch.empty(8, dtype=torch.int32, device="cuda")
    if tool != "initcheck":
        out.zero_()
    stream = Stream.from_handle(torch.cuda.current_stream().cuda_stream)
    blocks, threads = {"memcheck": (4096, 32), "initcheck": (1, 8)}.get(tool, (1, 64))
    launch(stream, LaunchConfig(grid=blocks, block=threads), kernel, out.data_ptr())
    Device().sync()


def check(names: Sequence[str], tool: str, *, is_small: bool) -> None:
    """Check kernels in this process; say one line of JSON each.

    Under initcheck, which looks at torch's kernels too, the ops that a kernel is compared with run on the host. Those of a GEMV
    always do: where cuBLAS multiplies 33 rows in 16 bits, racecheck ends in an exception of its own, whichever of our kernels
    were launched before (compute-sanitizer of CUDA 13.0, H200).

    Args:
        names: of manifests.
        tool: that this process runs under.
        is_small: only small cases of normal numbers, the first spelling, few dtypes and few configurations of a GEMV.
    """
    library_check: Any = importlib.import_module("fusion_advisor.evaluate.check")
    from fusion_advisor.library.discover import load_kernel

    original, configurations = library_check.eager, library_check.candidates

    def on_host(graph: Any, inputs: Any) -> Any:
        return [result.to(inputs[0].device) for result in original(graph, [tensor.cpu() for tensor in inputs])]

    class Silent:
        def step(self, done: int, total: int, text: str) -> None:
            pass

    if is_small:
        library_check.KINDS = {"normal": 1.0}
        library_check.candidates = lambda problem, backends: configurations(problem, backends)[:SMALL_CONFIGS]
    for name in names:
        kernel = load_kernel(name)
        library_check.eager = on_host if tool == "initcheck" or kernel.spec.gemv is not None else original
        if is_small:
            kernel = replace(kernel, spec=small(kernel.spec, SMALL_DTYPES[tool]), references=kernel.references[:1])
        backends = [backend for backend in kernel.spec.backends if backend != "cpp"]
        rows = library_check._Checker(kernel, (), Silent()).run(backends, with_patterns=not is_small)
        failed = [f"{row.backend} {row.case} {row.dtype}: {row.detail}" for row in rows if row.result == "failed"]
        skipped = sum(row.result == "skipped" for row in rows)  # what cuBLAS computes
        say(json.dumps({"kernel": name, "cases": len(rows) - skipped, "failed": failed}))


def small(spec: Any, dtypes: Sequence[str]) -> Any:
    """Keep a manifest's small cases, or the smallest where all are large; in some dtypes, or the first where it has none."""

    def elements(case: Any) -> int:
        return max(int(math.prod(spec.shape_of(tensor, case))) for tensor in spec.inputs)

    cases = [case for case in spec.check if elements(case) <= SMALL_ELEMENTS] or [min(spec.check, key=elements)]
    found = []
    for case in cases:
        found.append(replace(case, dtypes=tuple(dtype for dtype in case.dtypes if dtype in dtypes) or case.dtypes[:1]))
    return replace(spec, check=tuple(found))


# ---------------------------------------------------------------------- outside


def run(tool: str, arguments: Sequence[str], device: str, limit_s: int = LIMIT_S) -> tuple[str, int]:
    """Return what one process under the sanitizer printed on one GPU, and its exit code."""
    sanitizer = find_sanitizer()
    assert sanitizer is not None
    # A tool that sees our kernels alone would take what torch's kernels wrote for memory that nobody wrote.
    chosen = ["--print-limit", "0"] if tool == "initcheck" else ["--kernel-name", "kernel_substring=fa_"]
    command = [sanitizer, "--tool", tool, *chosen, "--report-api-errors", "no"]
    command += ["--error-exitcode", str(FAULT), sys.executable, *arguments]
    environment = {
        **os.environ,
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": str(device),
    }
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return f"not finished in {limit_s} s", 124
    return done.stdout + done.stderr, done.returncode


def sees_planted(tool: str, device: str) -> bool:
    """Whether a tool finds the fault that is planted for it."""
    output, code = run(tool, ["-m", "tools.sanitize_cuda", "--planted", tool], device, PLANTED_LIMIT_S)
    is_seen = code == FAULT and (tool != "initcheck" or _OURS.search(output) is not None)
    if not is_seen:
        say(f"{tool} does not see a planted fault (exit code {code}): {output[-2000:]}")
    return is_seen


def verdict(tool: str, names: Sequence[str], options: Sequence[str], device: str) -> Verdict:
    """Run some kernels in one process under the sanitizer."""
    output, code = run(tool, ["-m", "tools.sanitize_cuda", "--check", tool, *options, *names], device)
    rows = [json.loads(line) for line in output.splitlines() if line.startswith('{"kernel"')]
    failed = [f"{row['kernel']}: {failure}" for row in rows for failure in row["failed"]]
    is_complete = [row["kernel"] for row in rows] == list(names)
    return judged(tool, names, output, code, sum(row["cases"] for row in rows), failed, is_complete=is_complete)


def clusters(tool: str, device: str) -> Verdict:
    """Run the tests of rows that a cluster of blocks shares under the sanitizer."""
    tests = ["tests/codegen/cuda/test_clusters.py", "-k", "on_the_device", "-m", "gpu", "-n", "0", "-q", "-p", "no:cacheprovider"]
    output, code = run(tool, ["-m", "pytest", *tests], device)
    found = re.search(r"^(\d+) passed", output, re.MULTILINE)
    failed = re.findall(r"^(?:FAILED|ERROR) .*", output, re.MULTILINE)
    return judged(tool, [CLUSTERS], output, code, int(found[1]) if found else 0, failed, is_complete=found is not None)


def judged(
    tool: str, names: Sequence[str], output: str, code: int, cases: int, failed: Sequence[str], *, is_complete: bool
) -> Verdict:
    """Judge what a process under a tool printed.

    Args:
        tool: of compute-sanitizer.
        names: of what ran.
        output: of the process and the tool.
        code: its exit code.
        cases: that ran.
        failed: those with wrong numbers.
        is_complete: whether all that was asked for ran.
    """
    summary = re.search(r"(ERROR|RACECHECK) SUMMARY: .*", output)
    is_silent = code == 0 and summary is not None and re.search(r": 0 (errors|hazards)", summary[0]) is not None
    if tool == "initcheck":  # torch's own kernels are looked at too; what they read is not ours
        is_silent = code in (0, FAULT) and summary is not None and not _OURS.search(output)
    is_clean = is_silent and is_complete and not failed
    first = "\n".join(found[0] for found in itertools.islice(_OURS.finditer(output), 3))
    return Verdict(
        tool=tool, kernels=tuple(names), cases=cases, failed=tuple(failed), said=summary[0] if summary else "",
        output="" if is_clean else first + output[-4000:] or "no output",
    )  # fmt: skip


def record(names: Sequence[str], *, is_small: bool, progress: Callable[[str], None]) -> dict[str, Any]:
    """Run everything; return a flat record.

    Args:
        names: of manifests; all, and the rows that clusters share, by default.
        is_small: see :func:`check`.
        progress: takes a line for each process.
    """
    import torch

    from fusion_advisor.library.discover import list_kernels

    started = time.perf_counter()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    devices = itertools.cycle(visible.split(","))
    specs = [spec for spec in list_kernels() if not names or spec.name in names]
    slow, quick = ([spec.name for spec in specs if (spec.gemv is not None) == is_gemv] for is_gemv in (True, False))
    each = EACH_SMALL if is_small else EACH
    groups = [[name] for name in slow] + [quick[first : first + each] for first in range(0, len(quick), each)]
    options = ["--small"] if is_small else []
    verdicts: list[Verdict] = []
    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) - 1)) as pool:
        planted = {tool: pool.submit(sees_planted, tool, next(devices)) for tool in TOOLS}
        missed = [tool for tool, future in planted.items() if not future.result()]
        jobs = [pool.submit(clusters, tool, next(devices)) for tool in TOOLS if not names or CLUSTERS in names]
        jobs += [pool.submit(verdict, tool, group, options, next(devices)) for group in groups for tool in TOOLS]
        for future in as_completed(jobs):
            verdicts.append(future.result())
            progress(line_of(verdicts[-1]))
    return summed(verdicts, missed, [spec.name for spec in specs], time.perf_counter() - started)


def line_of(one: Verdict) -> str:
    """One line about a process, and its output where something was found."""
    state = "clean" if one.is_clean else "NOT CLEAN"
    wrong = "".join(f"\n  {failure}" for failure in one.failed)
    return f"{one.tool}, {' '.join(one.kernels)}: {one.cases} cases, {state}, {one.said}{wrong}\n{one.output}".rstrip()


def summed(verdicts: Sequence[Verdict], missed: Sequence[str], kernels: Sequence[str], seconds: float) -> dict[str, Any]:
    """Return the flat record of all processes.

    Args:
        verdicts: one for each process.
        missed: tools that did not see their planted fault.
        kernels: names of manifests.
        seconds: that all took.
    """
    details = [f"planted and not seen: {tool}" for tool in missed]
    details += [line_of(one)[:1000] for one in verdicts if not one.is_clean]
    return {
        "name": "CUDA and Triton kernels under compute-sanitizer's memcheck, racecheck, initcheck and synccheck",
        "tried": sum(one.cases for one in verdicts), "kernels": len(kernels), "planted": len(TOOLS), "failed": len(details),
        "seconds": round(seconds, 1), "details": details,
    }  # fmt: skip


def say(text: str) -> None:
    """One line on stdout, at once."""
    print(text, flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--planted":
        launch_planted(sys.argv[2])
    else:
        assert sys.argv[1] == "--check", "python -m tools.sanitize cuda"
        wanted = [argument for argument in sys.argv[3:] if argument != "--small"]
        check(wanted, sys.argv[2], is_small="--small" in sys.argv)
