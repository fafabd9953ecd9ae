"""Library kernels in C++ on special values: each at one case of its manifest, in three dtypes, checked as `apply` does.

Run as a script it prints what the verifier says of each.
"""

from __future__ import annotations

import math
import sys
import tempfile
from pathlib import Path

import torch

from fusion_advisor.codegen.common.interface import Header, Tuning
from fusion_advisor.codegen.cpp.backend import CppBackend
from fusion_advisor.evaluate.check_inputs import make_inputs
from fusion_advisor.library.discover import list_kernels, load_kernel
from fusion_advisor.library.patterns import trace_reference
from tests.hostile.planted import Case
from tests.kernel_cases.cpp_at_once import build_all

DTYPES = ("float32", "bfloat16", "float16")
HEADER = Header(title="case", summary="a test", origin="a test")


def cases(names=()):
    """Return (kernel, variant, dtype) → the case; kernels of linear layers, and those that draw random numbers, are left out."""
    found = {}
    for spec in list_kernels(()):
        if spec.gemv is not None or "cpp" not in spec.backends or (names and spec.name not in names) or "dropout" in spec.name:
            continue
        kernel = load_kernel(spec.name, ())
        small = min(spec.check, key=lambda case: sum(size for _, size in case.sizes))
        for dtype in [name for name in DTYPES if name in small.dtypes]:
            for variant, function in kernel.references[:1]:
                inputs = make_inputs(spec.laid_out(small), small, dtype, "normal")
                graph = trace_reference(spec.laid_out(small), function, dict(small.sizes), dtype=getattr(torch, dtype))
                found[spec.name, variant, dtype] = Case(graph, inputs)
    return found


def _chosen(cases):
    """Return the largest case of up to 2^14 combinations of sizes, for many rows of special values; else the smallest."""
    counts = {math.prod(size for _, size in case.sizes): case for case in cases}
    few = [count for count in counts if count <= 2**14]
    return counts[max(few) if few else min(counts)]


def verdicts(folder, names=()):
    """Return (kernel, variant, dtype) → numerics."""
    work = cases(names)
    render = CppBackend().render
    rendered = {key: render(case.program, HEADER, tuning=Tuning(), fast_math=False) for key, case in work.items()}
    built = build_all(list(rendered.values()), folder)
    return {key: case.check(built[rendered[key].entry].bind(case.program)) for key, case in work.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        for key, numerics in verdicts(Path(name), sys.argv[1:]).items():
            print(*key, "passed" if numerics.is_passed else "FAILED", *numerics.faults, *numerics.declared, sep=" | ")  # noqa: T201
