"""Every library kernel becomes machine code for three generations of GPU, none of which need be here.

All references, dtypes and sets of outputs; each distinct source once. One test per kernel and backend, so that a failure names
its source. CUDA C++ goes through NVRTC where cuda-core is installed, and through nvcc where that is found.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch

from fusion_advisor.library import backend_cuda, backend_triton
from fusion_advisor.library.build import backend as backend_of
from fusion_advisor.library.discover import list_kernels, load_references
from fusion_advisor.library.nvrtc import find_nvcc
from fusion_advisor.library.patterns import kernel_patterns, lower_reference
from fusion_advisor.library.source import Tuning
from fusion_advisor.library.source_of import header_of, named_program

ARCHITECTURES = (80, 90, 100)
SPECS = {spec.name: spec for spec in list_kernels() if spec.gemv is None}  # those: test_gemv.py
HAS_NVRTC = importlib.util.find_spec("cuda") is not None and importlib.util.find_spec("cuda.core") is not None


def sources(spec, backend):
    """Entry → (rendered, program), over references, dtypes, outputs and narrow and wide rows."""
    patterns, found = tuple(kernel_patterns(spec)), {}
    sizes = [dict(spec.bench[0].sizes)]
    sizes += [dict(case.sizes) for case in spec.check if max(size for _, size in case.sizes) > 16384]
    for _, function in load_references(spec).references:
        for dtype in spec.dtypes:
            for one in sizes:
                for lowered in lower_reference(spec, function, one, dtype=getattr(torch, dtype)):
                    program = named_program(lowered.program, patterns)
                    rendered = backend_of(backend).render(program, header_of(spec, ""), tuning=Tuning(), fast_math=False)
                    found.setdefault(rendered.entry, (rendered, program))
    return found.values()


def compiles(rendered, program, architecture, compiler):
    if compiler == "triton":
        return backend_triton.compile_for(program, rendered, architecture)
    return backend_cuda.compile_for(rendered, architecture, program=program, compiler=compiler)


@pytest.mark.parametrize("name", SPECS)
def test_triton(name):
    for rendered, program in sources(SPECS[name], "triton"):
        for architecture in ARCHITECTURES:
            assert compiles(rendered, program, architecture, "triton").startswith(b"\x7fELF")


@pytest.mark.skipif(not HAS_NVRTC, reason="compiles with NVRTC, and cuda-core is not installed")
@pytest.mark.parametrize("name", SPECS)
def test_cuda_with_nvrtc(name):
    for rendered, program in sources(SPECS[name], "cuda"):
        for architecture in ARCHITECTURES:
            assert compiles(rendered, program, architecture, "nvrtc").startswith(b"\x7fELF")


@pytest.mark.skipif(find_nvcc() is None, reason="compiles with nvcc, and there is none on PATH or in CUDA_HOME")
@pytest.mark.parametrize("name", SPECS)
def test_cuda_with_nvcc(name):
    # nvcc takes four times as long as NVRTC: where both are here, one source per kernel shows that it agrees.
    every = list(sources(SPECS[name], "cuda"))
    for rendered, program in every[:1] if HAS_NVRTC else every:
        for architecture in ARCHITECTURES[1:2] if HAS_NVRTC else ARCHITECTURES[::2]:
            assert compiles(rendered, program, architecture, "nvcc").startswith(b"\x7fELF")


def test_one_source_serves_every_size():
    """What the matrix counts on: sizes are arguments, so compiling one size compiles them all."""
    spec = SPECS["rmsnorm"]
    function = load_references(spec).references[0][1]
    entries = set()
    for sizes in ({"R": 3, "C": 100}, {"R": 4096, "C": 8192}):
        program = next(lower_reference(spec, function, sizes)).program
        entries.add(backend_of("triton").render(program, header_of(spec, ""), tuning=Tuning(), fast_math=False).entry)
    assert len(entries) == 1
