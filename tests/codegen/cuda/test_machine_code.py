"""What nvcc makes of kernels for a GPU that need not be here, and how near their short functions come to the true ones."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from fusion_advisor.codegen.common.interface import Header, Tuning
from fusion_advisor.codegen.cuda.backend import CudaBackend, compile_for
from fusion_advisor.library.discover import load_kernel
from fusion_advisor.library.patterns import lower_reference
from tests.kernel_cases.cuda_on_host import without_approximations
from tests.kernel_cases.lowered import lower_function

HEADER = Header(title="case", summary="a test", origin="a test")
FUNCTIONS = {"tanh": torch.tanh, "expm1": torch.expm1, "log1p": torch.log1p}
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="compiles C++, and there is no g++")


def program_of(function, *dtypes):
    return lower_function(function, *(torch.zeros(512, 1024, dtype=dtype) for dtype in dtypes))[0].program


def lowered(name, **sizes):
    kernel = load_kernel(name)
    return next(lower_reference(kernel.spec, kernel.references[0][1], sizes, dtype=torch.bfloat16)).program


def source_of(program):
    return CudaBackend().render(program, HEADER, tuning=Tuning(), fast_math=False).source


def sass(program, folder):
    """The machine code, by Triton's own disassembler."""
    triton = pytest.importorskip("triton")
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        pytest.skip("Triton was built without NVIDIA's tools")
    rendered = CudaBackend().render(program, HEADER, tuning=Tuning(), fast_math=False)
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compile_for(rendered, 90, program=program))
    return subprocess.run([tool, "-sass", cubin], capture_output=True, text=True, check=True).stdout


@needs_compiler
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_16_bits_is_good_to_1e_5_of_itself(name, tmp_path):
    function = FUNCTIONS[name]

    def own(x):  # tracing asks for a function of Python's
        return function(x)

    source = source_of(program_of(own, torch.bfloat16))
    helpers = re.findall(rf"(?:exp2|{name})_16bit\(float x\) {{.*?\n}}", source, re.DOTALL)
    text = without_approximations("\n".join(f"static float {helper}" for helper in helpers))
    (tmp_path / "short.cpp").write_text(f"""
#include <cmath>
using namespace std;
{text}
extern "C" void run(const float* x, float* out, int count) {{ for (int n = 0; n < count; ++n) out[n] = {name}_16bit(x[n]); }}
""")
    library = tmp_path / "short.so"
    subprocess.run(["g++", "-O1", "-fPIC", "-shared", "-o", library, tmp_path / "short.cpp"], check=True)

    def run(x):
        out = torch.empty_like(x)
        ctypes.CDLL(str(library)).run(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr()), len(x))
        return out

    x = torch.cat([torch.linspace(-12, 12, 200_001), torch.linspace(-0.1, 0.1, 20_001), torch.logspace(-38, -1, 500)])
    wanted = function(x.double())
    is_number = (x != 0) & wanted.isfinite()
    assert ((run(x) - wanted) / wanted)[is_number].abs().max() < 1e-5
    edges = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3e38, -3e38, 1e-40, -1.0])
    torch.testing.assert_close(run(edges), function(edges), rtol=1e-5, atol=0, equal_nan=True)
    assert torch.equal(run(edges).signbit()[:2], function(edges).signbit()[:2])
    assert f"{name}_16bit" not in source_of(program_of(own, torch.float32))


BY_DIVISION = {
    "quotient": lambda x, y: x / y,
    "softmax": lambda x, y: (x + y).softmax(-1),
    "root": lambda x, y: (x * x).sqrt() + y,
    "reciprocal": lambda x, y: x.reciprocal() + y,
}


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", BY_DIVISION)
def test_divisions_and_roots_of_16_bits_have_no_slow_path(name, tmp_path):
    assert "CALL" not in sass(program_of(BY_DIVISION[name], torch.bfloat16, torch.bfloat16), tmp_path)
    assert "CALL" in sass(program_of(BY_DIVISION[name], torch.float32, torch.float32), tmp_path)


@pytest.mark.parametrize("function", [lambda x, y: torch.round(x / y), lambda x, y: torch.where(x / y > 0.5, x, y)])
def test_a_quotient_that_decides_something_is_rounded(function):
    assert "quotient_16bit" not in source_of(program_of(function, torch.bfloat16, torch.bfloat16))


@pytest.mark.nvrtc
def test_a_rounding_to_bfloat16_is_one_instruction(tmp_path):
    """Llama's norm rounds before it multiplies by the weight; F2F has an eighth of the rate of F2FP."""
    code = sass(lowered("rmsnorm", R=2048, C=4096), tmp_path)
    assert "F2F." not in code
    assert len(re.findall(r"F2FP\.BF16", code)) == 32 + 16  # elements of a thread, and the pairs that it stores
