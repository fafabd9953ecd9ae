"""Run a rendered CUDA kernel on the host, one thread after another: everything but warps and PTX, checked without a GPU.

The launch shape is one thread per row and block, so that a row's reduction is that thread's own sum: ``row_reduce``
becomes the identity. The conversions written in PTX are replaced by C++ that rounds to nearest even as they do.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import torch

from fusion_advisor.codegen.common.horizontal_fusion import calls_of, starts
from fusion_advisor.codegen.common.interface import Rendered
from fusion_advisor.codegen.cuda.tiling import pack_width, shared_bytes_of
from fusion_advisor.ir.program import Program

_PRELUDE = """
#include <cmath>
#include <cstring>
#include <limits>
#include <cstdint>
using namespace std;
#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__
#define __launch_bounds__(n)
#define __builtin_assume(condition) if (!(condition)) __builtin_trap()
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct Dim { unsigned x, y, z; };
static Dim blockIdx, threadIdx, gridDim;
static float __uint_as_float(unsigned bits) { float y; memcpy(&y, &bits, 4); return y; }
static float __int_as_float(int bits) { float y; memcpy(&y, &bits, 4); return y; }
static double __longlong_as_double(long long bits) { double y; memcpy(&y, &bits, 8); return y; }
static int wrong_positions;
extern "C" inline void __assertfail(const char*, const char*, unsigned, const char*, size_t) { ++wrong_positions; }
extern "C" int count_wrong_positions() { return wrong_positions; }
static int __popc(unsigned bits) { return __builtin_popcount(bits); }
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
_ROUND_BFLOAT16 = """    unsigned bits; memcpy(&bits, &x, 4);
    bits = x != x ? 0x7fc00000u : bits + 0x7fffu + (bits >> 16 & 1);
    return __uint_as_float(bits & 0xffff0000u);
}"""


class DeviceAssertion(Exception):
    """A kernel found a position out of range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A rendered kernel and what it is called with; outputs are written in place."""

    rendered: Rendered
    program: Program
    inputs: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]
    width: int = 0
    """Columns of a pack; the widest that the program allows by default."""
    staged: int | None = None
    """Columns that stay in shared memory, where the row is walked in parts; half of them by default."""


def run(rendered, program, tensors, outputs, folder, width=0):
    """Compile with the system's compiler and run one kernel."""
    run_all([Launch(rendered=rendered, program=program, inputs=tensors, outputs=outputs, width=width)], folder)


def run_all(launches, folder, flags=()):
    """Compile many kernels as one file, each in a namespace of its own, and run them: the headers are read once.

    Args:
        launches: what runs.
        folder: for the source and the library.
        flags: further ones of the compiler.

    Raises:
        DeviceAssertion: one of them found a position out of range.
    """
    stopped = run_until_end(launches, folder, flags)
    if stopped:
        raise DeviceAssertion([launches[number].rendered.entry for number in stopped])


def run_until_end(launches, folder, flags=()):
    """The same; returns the numbers of those that found a position out of range."""
    launches = [one for one in launches if not all(call.plan.is_empty for call in calls_of(one.program, flatten_rows=True))]
    if not launches:
        return []
    stopped = []
    units = [_unit(number, launch) for number, launch in enumerate(launches)]
    path, library = folder / "kernels.cpp", folder / "kernels.so"
    path.write_text("\n".join([_PRELUDE, *(source for source, _ in units)]))
    command = [
        "g++",
        *OPTIMISE,
        *flags,
        "-fno-strict-aliasing",
        "-std=c++17",
        "-fPIC",
        "-shared",
        "-w",
        "-o",
        str(library),
        str(path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:3000]
    handle = ctypes.CDLL(str(library))
    for number, (launch, (_, arguments)) in enumerate(zip(launches, units, strict=True)):
        tensors = (*launch.inputs, *launch.outputs)
        pointers = (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
        integers = (ctypes.c_longlong * max(1, len(arguments)))(*(value for _, value in arguments))
        before = handle.count_wrong_positions()
        handle[f"run_{number}"](pointers, integers)
        stopped += [number] if handle.count_wrong_positions() != before else []
    return stopped


def _unit(number, launch):
    """A kernel's source between its macros with the function that walks its grid, and the numbers that it takes."""
    rendered = launch.rendered
    calls = calls_of(launch.program, flatten_rows=True)
    plans = [call.plan for call in calls]
    kind = plans[0].kind
    width = launch.width or min(pack_width(plan, rendered.form)[0] for plan in plans)
    form = rendered.form
    packs = [max(1, ceil((plan.program.dims[-1] + form.is_shifted * (width - 1)) / width)) for plan in plans]
    each = packs[0] if kind == "rows" and not form.is_looped else 3
    if kind == "tiled":
        heights = [plan.program.dims[-2] for plan in plans if len(plan.sizes) > 2]
        each = max(count for count in (1, 2, 3) if all(height % count == 0 for height in heights))
    rows = [plan.row_count for plan in plans]
    blocks = {"flat": [ceil(n / each) for n in packs], "tiled": [ceil(n / each) for n in rows], "rows": rows}[kind]
    is_once = max(packs) % 2 == 0  # both ways over the columns: all blocks there are, or a loop
    grid = (sum(blocks), max(packs) if is_once else 1) if kind == "tiled" else (sum(blocks), 1)
    arguments = [*starts(blocks), *(argument for call in calls for argument in call.arguments)]
    source = _translate(rendered.source)
    entry = source[source.index(f"{rendered.entry}(") :]
    operands = [f"({kind})args[{n}]" for n, kind in enumerate(re.findall(r"^    (.+\*) __restrict__", entry, re.MULTILINE))]
    assert len(operands) == len(launch.inputs) + len(launch.outputs)
    scalars = [f"(index_t)ints[{n}]" for n in range(len(arguments))]
    macros = {"THREADS": 1, "ROWS": 1, "PACKS": each, "VEC": width, "FULL": 0, "ONCE": int(is_once)}
    if len(plans) == 1 and kind == "tiled":
        macros |= {name.upper(): plans[0].program.dims[number] for number, name in enumerate(plans[0].sizes[1:-1], start=1)}
    if any(plan.needs_int64 for plan in plans):
        macros["WIDE_INDEX"] = 1
    if "STAGED" in source:
        macros["STAGED"] = min(plan.program.dims[-1] for plan in plans) // 32 * 16 if launch.staged is None else launch.staged
    staged_bytes = max(shared_bytes_of(plan, macros) for plan in plans)
    # The source may define more of them, and the next kernel must see none.
    defined = {**macros, **dict.fromkeys(re.findall(r"^ *#define (\w+)", source, re.MULTILINE), 1)}
    before = "\n".join(f"#define {name} {value}" for name, value in macros.items())
    after = "\n".join(f"#undef {name}" for name in defined)
    source = f"""{before}
namespace kernel_{number} {{
#line 1 "{rendered.entry}.cu"
{source.replace('extern "C" ', "").replace("__restrict__", "")}
alignas(16) uint4 staged[{staged_bytes // 16 + 1}];  // the block's dynamic shared memory
extern "C" void run_{number}(void** args, const long long* ints) {{
    gridDim = {{{grid[0]}u, {grid[1]}u, 1u}};
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x)
        for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y)
            {rendered.entry}({", ".join([*operands, *scalars])});
}}
}}
{after}"""
    return source, arguments


def _translate(source):
    source = source.replace(next((line for line in source.splitlines() if "void __assertfail(" in line), "\0"), "")
    source = re.sub(r"    float y;\n    asm\(\"cvt\.f32\.f16.*?\n}", _WIDE_HALF, source, flags=re.DOTALL)
    source = re.sub(r"    half_bits y;\n    asm\(.*?\n}", _NARROW_HALF, source, flags=re.DOTALL)
    source = re.sub(r"    bfloat16_bits y;\n    asm\(.*?\n}", _NARROW_BFLOAT16, source, flags=re.DOTALL)
    source = re.sub(r"    unsigned bits;\n    asm\(\"cvt\.rn\.bf16x2.*?\n}", _ROUND_BFLOAT16, source, flags=re.DOTALL)
    source = without_approximations(source)
    return re.sub(r"(T row_reduce\(T value\) \{\n).*?\n}", r"\1    return value;\n}", source, flags=re.DOTALL)


def without_approximations(source):
    """Exact functions for the PTX that approximates them."""
    source = re.sub(r'asm\("ex2\.approx[.\w]*.*? : "=f"\((\w+)\) : "f"\((.*)\)\);', r"\1 = exp2f(\2);", source)
    source = re.sub(r'asm\("rcp\.approx[.\w]*.*? : "=f"\((\w+)\) : "f"\((.*)\)\);', r"\1 = 1.0f / (\2);", source)
    source = re.sub(r'asm\("lg2\.approx[.\w]*.*? : "=f"\((\w+)\) : "f"\((.*)\)\);', r"\1 = log2f(\2);", source)
    source = re.sub(r'asm\("sqrt\.approx[.\w]*.*? : "=f"\((\w+)\) : "f"\((.*)\)\);', r"\1 = sqrtf(\2);", source)
    source = re.sub(r'asm\("div\.full[.\w]*.*? : "=f"\((\w+)\) : "f"\((\w+)\), "f"\((\w+)\)\);', r"\1 = \2 / \3;", source)
    return re.sub(r'asm\("rsqrt\.approx[.\w]*.*? : "=f"\((\w+)\) : "f"\((.*)\)\);', r"\1 = 1.0f / sqrtf(\2);", source)
