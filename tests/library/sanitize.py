"""Every kernel under compute-sanitizer, on a CUDA machine: ``python3 tests/library/sanitize.py [TOOL] [KERNEL|clusters ...]``.

``kernels check`` runs every case of every manifest, and the tests of rows that a cluster of blocks shares run beside it, for such
a launch is chosen by timing only; jobs are spread over the GPUs that there are. Only our kernels (``fa_*``) are instrumented, and
the caching allocator is off, so that a byte past a tensor is a byte past an allocation. Two faults are planted first, one for
each tool: a tool that does not see them has seen nothing.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLANTED = """
extern "C" __global__ void fa_planted_memcheck(int* out) { out[blockIdx.x * 32 + threadIdx.x] = 1; }
extern "C" __global__ void fa_planted_racecheck(int* out) {
    __shared__ int all[64];
    all[threadIdx.x] = threadIdx.x;
    out[threadIdx.x % 8] = all[63 - threadIdx.x];
}
"""
TOOLS = ["memcheck", "racecheck"]
CLUSTERS = "clusters"
LIMIT_S = 500
EACH = 2
"""Kernels per process: few, so that processors are busy to the end and what is found is said early; starting one takes 10 s.
GEMVs, which take minutes under racecheck, have one each."""
FAULT = 66


def planted(tool):
    """Launch a kernel with the fault that the tool is for."""
    import torch
    from cuda.core import Device, LaunchConfig, Stream, launch

    from fusion_advisor.library.nvrtc import compile_loaded
    from fusion_advisor.library.source import Rendered

    kernel = compile_loaded(Rendered(backend="cuda", entry=f"fa_planted_{tool}", source=PLANTED, suffix=".cu"), {})
    out = torch.zeros(8, dtype=torch.int32, device="cuda")
    stream = Stream.from_handle(torch.cuda.current_stream().cuda_stream)
    blocks, threads = (4096, 32) if tool == "memcheck" else (1, 64)
    launch(stream, LaunchConfig(grid=blocks, block=threads), kernel, out.data_ptr())
    Device().sync()


def run(tool, arguments, device="0"):
    """Return what one process under the sanitizer printed on one GPU, and its exit code."""
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    command = [sanitizer, "--tool", tool, "--kernel-name", "kernel_substring=fa_", "--report-api-errors", "no"]
    command += ["--error-exitcode", str(FAULT), sys.executable, *arguments]
    environment = {
        **os.environ,
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": str(device),
    }
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"not finished in {LIMIT_S} s", 124
    return done.stdout + done.stderr, done.returncode


def check(names):
    """Check kernels in this process; one line of JSON each.

    The products that a GEMV is compared with run on the host: where cuBLAS multiplies 33 rows in 16 bits, racecheck ends in an
    exception of its own, whichever of our kernels were launched before (compute-sanitizer of CUDA 13.0, H200).
    """
    from fusion_advisor.library import check as library_check
    from fusion_advisor.library.discover import load_kernel

    original = library_check.eager

    def on_host(graph, inputs):
        return [result.to(inputs[0].device) for result in original(graph, [tensor.cpu() for tensor in inputs])]

    class Silent:
        def step(self, done, total, text):
            pass

    for name in names:
        library_check.eager = original if load_kernel(name).spec.gemv is None else on_host
        rows = library_check.check_kernel(name, Silent(), backends=["triton", "cuda"])
        failed = [f"{row.backend} {row.case} {row.dtype}: {row.detail}" for row in rows if row.result == "failed"]
        skipped = sum(row.result == "skipped" for row in rows)  # what cuBLAS computes
        say(json.dumps({"kernel": name, "cases": len(rows) - skipped, "failed": failed}))


def verdict(tool, names, device):
    """Run some kernels in one process under the sanitizer; return whether all is well, and what was said."""
    output, code = run(tool, [__file__, "--check", *names], device)
    rows = [json.loads(line) for line in output.splitlines() if line.startswith('{"kernel"')]
    return judged(tool, output, code, rows, [row["kernel"] for row in rows] == names)


def clusters(tool, device):
    """Run the tests of shared rows under the sanitizer; likewise."""
    tests = ["tests/library/test_clusters.py", "-k", "on_the_device", "-m", "gpu", "-q", "-p", "no:cacheprovider"]
    output, code = run(tool, ["-m", "pytest", *tests], device)
    found = re.search(r"^(\d+) passed", output, re.MULTILINE)
    failed = re.findall(r"^(?:FAILED|ERROR) .*", output, re.MULTILINE)
    row = {"kernel": CLUSTERS, "cases": int(found[1]) if found else 0, "failed": failed}
    return judged(tool, output, code, [row], found is not None)


def judged(tool, output, code, rows, is_complete):
    """Whether the sanitizer found nothing and every case was right, and the line that says so."""
    summary = re.search(r"(ERROR|RACECHECK) SUMMARY: .*", output)
    is_right = is_complete and not any(row["failed"] for row in rows)
    is_clean = code == 0 and is_right and summary is not None and re.search(r": 0 (errors|hazards)", summary[0]) is not None
    said = summary[0] if summary else ""
    return is_clean, {"tool": tool, "said": said, "kernels": rows, "output": "" if is_clean else output[-4000:]}


def main(arguments):
    import torch

    from fusion_advisor.library.discover import list_kernels

    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    devices = itertools.cycle(visible.split(","))
    tools = [tool for tool in TOOLS if tool in arguments] or TOOLS
    wanted = {*arguments} - {*TOOLS}
    specs = [spec for spec in list_kernels() if not wanted or spec.name in wanted]
    slow, names = ([spec.name for spec in specs if (spec.gemv is not None) == is_gemv] for is_gemv in (True, False))
    groups = [[name] for name in slow] + [names[first : first + EACH] for first in range(0, len(names), EACH)]
    for tool in tools:
        output, code = run(tool, [__file__, "--planted", tool], next(devices))
        assert code == FAULT, f"{tool} does not see a planted fault: {output[-2000:]}"
    jobs = [(clusters, tool) for tool in tools if not wanted or CLUSTERS in wanted]
    jobs += [(verdict, tool, group) for group in groups for tool in tools]
    results = []
    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) - 1)) as pool:
        for future in as_completed([pool.submit(*job, next(devices)) for job in jobs]):
            results.append(future.result())
            say(json.dumps(results[-1][1]))
    clean = sum(is_clean for is_clean, _ in results)
    cases = sum(kernel["cases"] for _, row in results for kernel in row["kernels"])
    say(f"{clean} of {len(results)} processes clean; {len(specs)} kernels, {cases} cases over {' and '.join(tools)}")
    return int(clean < len(results))


def say(text):
    """One line on stdout, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    if sys.argv[1:2] == ["--planted"]:
        planted(sys.argv[2])
    elif sys.argv[1:2] == ["--check"]:
        check(sys.argv[2:])
    else:
        sys.exit(main(sys.argv[1:]))
