"""The source of every library kernel, as a reader gets it: a change of a template shows as a diff of these files.

After a change that is meant: ``ACCEPT_GOLDEN=1 pytest tests/codegen/test_golden.py``, then read the diff.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fusion_advisor.codegen.common.interface import Tuning
from fusion_advisor.evaluate.render import render_kernel
from fusion_advisor.library.discover import list_kernels, load_kernel

GOLDEN = Path(__file__).parent / "golden"
CLUSTERED = [(name, "cluster", "bfloat16") for name in ("groupnorm_silu", "log_softmax")]
"""CUDA kernels whose rows a cluster of blocks shares."""
CASES = [(spec.name, backend, dtype) for spec in list_kernels() for backend in spec.backends for dtype in ("float32", "bfloat16")
         if dtype in spec.dtypes]  # fmt: skip
CASES += CLUSTERED


def file_of(name, backend, dtype):
    return GOLDEN / f"{name}.{dtype}.{ {'triton': 'py', 'cuda': 'cu', 'cpp': 'cpp', 'cluster': 'cluster.cu'}[backend] }"


@pytest.mark.parametrize(("name", "backend", "dtype"), CASES)
def test_source_is_the_accepted_one(name, backend, dtype):
    tuning = Tuning(cluster=4) if backend == "cluster" else Tuning()
    source = render_kernel(load_kernel(name), "cuda" if backend == "cluster" else backend, dtype, tuning=tuning).source
    file = file_of(name, backend, dtype)
    if os.environ.get("ACCEPT_GOLDEN") == "1":
        GOLDEN.mkdir(exist_ok=True)
        file.write_text(source, encoding="utf-8")
    assert file.is_file(), f"{file.name} is missing: ACCEPT_GOLDEN=1 writes it"
    assert source == file.read_text(encoding="utf-8")


def test_no_golden_file_is_left_over():
    assert {path.name for path in GOLDEN.iterdir()} == {file_of(*case).name for case in CASES}


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*")), ids=lambda path: path.name)
def test_source_reads_well(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert not [line for line in lines if len(line) > 140 or line != line.rstrip()]
    assert not [n for n, line in enumerate(lines) if not line and not lines[n - 1] and path.suffix != ".py"]
    assert lines[0].startswith(("# ", "// "))
