"""Every library kernel becomes machine code for three generations of GPU, none of which need be here.

All references, dtypes and sets of outputs; each distinct source once. What a dtype adds to a source (two conversions) is the same
on every GPU, so all dtypes are compiled for one generation and bfloat16 for the others too. One test per kernel and backend, so
that a failure names its source. CUDA C++ goes through NVRTC where cuda-core is installed, and through nvcc where that is found.
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
MIDDLE = ARCHITECTURES[1:2]
SPECS = {spec.name: spec for spec in list_kernels() if spec.gemv is None}  # those: test_gemv.py
HAS_NVRTC = importlib.util.find_spec("cuda") is not None and importlib.util.find_spec("cuda.core") is not None


def sources(spec, backend):
    """(dtype, rendered, program), over references, dtypes, outputs and narrow and wide rows."""
    patterns, found = tuple(kernel_patterns(spec)), {}
    sizes = [dict(spec.bench[0].sizes)]
    sizes += [dict(case.sizes) for case in spec.check if max(size for _, size in case.sizes) > 16384]
    for _, function in load_references(spec).references:
        for dtype in spec.dtypes:
            for one in sizes:
                for lowered in lower_reference(spec, function, one, dtype=getattr(torch, dtype)):
                    program = named_program(lowered.program, patterns)
                    rendered = backend_of(backend).render(program, header_of(spec, ""), tuning=Tuning(), fast_math=False)
                    found.setdefault(rendered.entry, (dtype, rendered, program))
    return list(found.values())


def compiles(rendered, program, architecture, compiler):
    if compiler == "triton":
        return backend_triton.compile_for(program, rendered, architecture)
    return backend_cuda.compile_for(rendered, architecture, program=program, compiler=compiler)


def compile_all(found, compiler):
    for dtype, rendered, program in found:
        for architecture in ARCHITECTURES if dtype == "bfloat16" else MIDDLE:
            assert compiles(rendered, program, architecture, compiler).startswith(b"\x7fELF")


@pytest.mark.parametrize("name", SPECS)
def test_triton(name):
    compile_all(sources(SPECS[name], "triton"), "triton")


@pytest.mark.skipif(not HAS_NVRTC, reason="compiles with NVRTC, and cuda-core is not installed")
@pytest.mark.parametrize("name", SPECS)
def test_cuda_with_nvrtc(name):
    compile_all(sources(SPECS[name], "cuda"), "nvrtc")


@pytest.mark.skipif(find_nvcc() is None, reason="compiles with nvcc, and there is none on PATH or in CUDA_HOME")
@pytest.mark.parametrize("name", SPECS)
def test_cuda_with_nvcc(name):
    # nvcc takes ten times as long as NVRTC: where both are here, one source per kernel shows that it agrees, and where it is
    # alone, one source for every generation and the rest of its dtype for one.
    first, *rest = [one for one in sources(SPECS[name], "cuda") if one[0] == "bfloat16"]
    for _, rendered, program in [first] if HAS_NVRTC else [first, *rest]:
        for architecture in ARCHITECTURES if rendered is first[1] and not HAS_NVRTC else MIDDLE:
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
