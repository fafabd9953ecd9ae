"""Every library kernel becomes machine code for three generations of GPU, none of which need be here.

All references and sets of outputs in bfloat16 for one generation; the first reference in every dtype and for every generation
too. A dtype adds two conversions to a source and a generation other instructions for the same ops, whichever way a formula is
spelled: so each is tried once with all ops, not with all spellings. Each distinct source once. One test per kernel and backend,
so that a failure names its source. CUDA C++ goes through NVRTC where cuda-core is installed, through nvcc where that is found.
"""

from __future__ import annotations

import pytest
import torch

from fusion_advisor.codegen.common.interface import Tuning
from fusion_advisor.codegen.cuda import backend as backend_cuda
from fusion_advisor.codegen.cuda.nvrtc import find_nvcc, has_cuda_core
from fusion_advisor.codegen.registry import backend as backend_of
from fusion_advisor.codegen.triton import backend as backend_triton
from fusion_advisor.evaluate.kinds import header_of, named_program
from fusion_advisor.evaluate.render import render_kernel
from fusion_advisor.library.discover import list_kernels, load_references
from fusion_advisor.library.patterns import kernel_patterns, lower_reference

ARCHITECTURES = (80, 90, 100)
MIDDLE = ARCHITECTURES[1:2]
pytestmark = pytest.mark.slow  # a compiler runs for each source
SPECS = {spec.name: spec for spec in list_kernels() if spec.gemv is None}  # those: gemm/test_problem.py


def is_wide(case):
    """Whether its rows are walked in a loop."""
    return max(size for _, size in case.sizes) > 16384


LIGHT = Tuning(block_rows=1, block_cols=1024, num_warps=16)
"""For Triton, which unrolls a tile over its threads and takes as much longer to compile: few elements for each thread."""


def sources(spec, backend):
    """(dtype, rendered, program, architectures), over references, dtypes, outputs and narrow and wide rows."""
    patterns, found = kernel_patterns(spec), {}
    sizes = [dict(spec.bench[0].sizes), *(dict(case.sizes) for case in spec.check if is_wide(case))]
    main = "bfloat16" if "bfloat16" in spec.dtypes else spec.dtypes[0]
    others = tuple(architecture for architecture in ARCHITECTURES if architecture not in MIDDLE)
    light = LIGHT if backend == "triton" else Tuning()
    for number, (_, function) in enumerate(load_references(spec).references):
        chosen = [(main, Tuning(), MIDDLE)]
        if number == 0:
            chosen += [(main, light, others), *((dtype, light, MIDDLE) for dtype in spec.dtypes if dtype != main)]
        for dtype, tuning, architectures in chosen:
            for one in sizes:
                for lowered in lower_reference(spec, function, one, dtype=getattr(torch, dtype)):
                    program = named_program(lowered.program, patterns)
                    rendered = backend_of(backend).render(program, header_of(spec, ""), tuning=tuning, fast_math=False)
                    found.setdefault((rendered.entry, architectures), (dtype, rendered, program, architectures))
    return list(found.values())


def compiles(rendered, program, architecture, compiler):
    if compiler == "triton":
        return backend_triton.compile_for(program, rendered, architecture)
    return backend_cuda.compile_for(rendered, architecture, program=program, compiler=compiler)


def compile_all(found, compiler):
    for _, rendered, program, architectures in found:
        for architecture in architectures:
            assert compiles(rendered, program, architecture, compiler).startswith(b"\x7fELF")


@pytest.mark.parametrize("name", SPECS)
def test_triton(name):
    compile_all(sources(SPECS[name], "triton"), "triton")


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", SPECS)
def test_cuda_with_nvrtc(name):
    compile_all(sources(SPECS[name], "cuda"), "nvrtc")


@pytest.mark.skipif(find_nvcc() is None, reason="compiles with nvcc, and there is none on PATH or in CUDA_HOME")
@pytest.mark.parametrize("name", SPECS)
def test_cuda_with_nvcc(name):
    # nvcc takes ten times as long as NVRTC: where both are here, one source per kernel shows that it agrees, and where it is
    # alone, each spelling is compiled once, for one generation: the next test says why for one.
    first, *rest = sources(SPECS[name], "cuda")
    for dtype, rendered, program, architectures in [first] if has_cuda_core() else [first, *rest]:
        if dtype == first[0] and architectures == MIDDLE:
            assert compiles(rendered, program, *MIDDLE, "nvcc").startswith(b"\x7fELF")


def test_cuda_sources_are_the_same_for_every_generation():
    asked = set()
    for spec in SPECS.values():
        for dtype in ("float32", "bfloat16"):
            source = render_kernel(load_references(spec), "cuda", dtype).source
            asked |= {line for line in source.splitlines() if "__CUDA_ARCH__" in line}
    assert asked == {f"#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= {10 * ARCHITECTURES[0]}"}


def test_one_source_serves_every_size():
    """What the matrix counts on: sizes are arguments, so compiling one size compiles them all."""
    spec = SPECS["rmsnorm"]
    function = load_references(spec).references[0][1]
    entries = set()
    for sizes in ({"R": 3, "C": 100}, {"R": 4096, "C": 8192}):
        program = next(lower_reference(spec, function, sizes)).program
        entries.add(backend_of("triton").render(program, header_of(spec, ""), tuning=Tuning(), fast_math=False).entry)
    assert len(entries) == 1
