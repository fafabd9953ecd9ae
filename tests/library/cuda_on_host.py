"""Run a rendered CUDA kernel on the host, one thread after another: everything but warps and PTX, checked without a GPU.

The launch shape is one thread per row and block, so that a row's reduction is that thread's own sum: ``row_reduce``
becomes the identity. The conversions written in PTX are replaced by C++ that rounds to nearest even as they do.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from math import ceil

from fusion_advisor.library.backend_cuda import pack_width
from fusion_advisor.library.beside import calls_of, starts

_PRELUDE = """
#include <cmath>
#include <cstring>
#include <limits>
#include <cstdint>
using namespace std;
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(n)
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct Dim { unsigned x, y, z; };
static Dim blockIdx, threadIdx, gridDim;
static float __uint_as_float(unsigned bits) { float y; memcpy(&y, &bits, 4); return y; }
static float __int_as_float(int bits) { float y; memcpy(&y, &bits, 4); return y; }
static double __longlong_as_double(long long bits) { double y; memcpy(&y, &bits, 8); return y; }
static float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static double rsqrt(double x) { return 1.0 / sqrt(x); }
#define __expf(x) exp2f((x) * 1.4426950408889634f)
__attribute__((noinline)) static float __fmul_rn(float a, float b) { return a * b; }
__attribute__((noinline)) static double __dmul_rn(double a, double b) { return a * b; }
"""
OPTIMISE = ("-O1",)
_WIDE_HALF = "    _Float16 h; memcpy(&h, &x.bits, 2); return (float)h;\n}"
_NARROW_HALF = "    const _Float16 h = (_Float16)x; half_bits y; memcpy(&y.bits, &h, 2); return y;\n}"
_NARROW_BFLOAT16 = """    unsigned bits; memcpy(&bits, &x, 4);
    bits = x != x ? 0x7fc00000u : bits + 0x7fffu + (bits >> 16 & 1);
    return bfloat16_bits{(unsigned short)(bits >> 16)};
}"""


def run(rendered, program, tensors, outputs, folder, width=0):
    """Compile with the system's compiler and run; outputs are written in place.

    ``width`` is the columns of a pack; the widest that the program allows by default.
    """
    calls = calls_of(program, flatten_rows=True)
    plans = [call.plan for call in calls]
    if all(plan.is_empty for plan in plans):
        return
    kind = plans[0].kind
    width = width or min(pack_width(plan)[0] for plan in plans)
    packs = [max(1, ceil(plan.program.dims[-1] / width)) for plan in plans]
    is_looped = "index_t start = 0" in rendered.source
    each = packs[0] if kind == "rows" and not is_looped else 3
    if kind == "tiled":
        heights = [plan.program.dims[-2] for plan in plans if len(plan.sizes) > 2]
        each = max(count for count in (1, 2, 3) if all(height % count == 0 for height in heights))
    rows = [plan.row_count for plan in plans]
    blocks = {"flat": [ceil(n / each) for n in packs], "tiled": [ceil(n / each) for n in rows], "rows": rows}[kind]
    grid = (sum(blocks), min(max(packs), 3) if kind == "tiled" else 1)
    arguments = [*starts(blocks), *(argument for call in calls for argument in call.arguments)]
    source = _translate(rendered.source)
    entry = source[source.index(f"{rendered.entry}(") :]
    count = len(tensors) + len(outputs)
    operands = [f"({kind})args[{n}]" for n, kind in enumerate(re.findall(r"^    (.+\*) __restrict__", entry, re.MULTILINE))]
    assert len(operands) == count
    scalars = [f"(index_t)ints[{n}]" for n in range(len(arguments))]
    source = (
        source.replace("__restrict__", "")
        + f"""
extern "C" void run_all(void** args, const long long* ints) {{
    gridDim = {{{grid[0]}u, {grid[1]}u, 1u}};
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x)
        for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y)
            {rendered.entry}({", ".join([*operands, *scalars])});
}}
"""
    )
    path = folder / "kernel.cpp"
    path.write_text(source)
    wide = ["-DWIDE_INDEX"] if any(plan.needs_int64 for plan in plans) else []
    macros = ["-DTHREADS=1", "-DROWS=1", f"-DPACKS={each}", f"-DVEC={width}", "-DFULL=0", *wide]
    command = [
        "g++",
        *OPTIMISE,
        "-fno-strict-aliasing",
        "-std=c++17",
        "-fPIC",
        "-shared",
        "-w",
        *macros,
        "-o",
        str(folder / "kernel.so"),
        str(path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:3000]
    library = ctypes.CDLL(str(folder / "kernel.so"))
    pointers = (ctypes.c_void_p * count)(*(t.data_ptr() for t in (*tensors, *outputs)))
    integers = (ctypes.c_longlong * max(1, len(arguments)))(*(value for _, value in arguments))
    library.run_all(pointers, integers)


def _translate(source):
    source = re.sub(r"    float y;\n    asm\(\"cvt\.f32\.f16.*?\n}", _WIDE_HALF, source, flags=re.DOTALL)
    source = re.sub(r"    half_bits y;\n    asm\(.*?\n}", _NARROW_HALF, source, flags=re.DOTALL)
    source = re.sub(r"    bfloat16_bits y;\n    asm\(.*?\n}", _NARROW_BFLOAT16, source, flags=re.DOTALL)
    source = re.sub(r'asm\("ex2\.approx[.\w]*.*? : "=f"\((\w+)\) : "f"\((.*)\)\);', r"\1 = exp2f(\2);", source)
    source = re.sub(r'asm\("rcp\.approx[.\w]*.*? : "=f"\((\w+)\) : "f"\((.*)\)\);', r"\1 = 1.0f / (\2);", source)
    source = re.sub(r"(T row_reduce\(T value\) \{\n).*?\n}", r"\1    return value;\n}", source, flags=re.DOTALL)
    return _PRELUDE + source
