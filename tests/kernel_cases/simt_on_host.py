"""Run a CUDA kernel on the host with all threads of a block: warp shuffles, tensor cores and barriers, checked without a GPU.

Threads are fibers that take turns, those of all blocks of a cluster together. Where the lanes of a warp meet (a shuffle, an mma)
each leaves its operands, lets all others run up to the same point, and goes on with what they left: lanes must meet equally
often, as they must on a GPU. Fragments of an mma are laid out as the PTX ISA says.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from fusion_advisor.codegen.common.interface import Rendered
from tests.kernel_cases.cuda_on_host import without_approximations

_PRELUDE = r"""
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <ucontext.h>
#include <vector>
using namespace std;
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(n)
#define __cluster_dims__(n)
#define __cvta_generic_to_shared(place) 0
#define __shared__ static
#define __restrict__
#define __builtin_assume(condition) if (!(condition)) __builtin_trap()
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct Dim { unsigned x, y, z; };
static Dim blockIdx, threadIdx;
static float __uint_as_float(unsigned bits) { float y; memcpy(&y, &bits, 4); return y; }
static float __int_as_float(int bits) { float y; memcpy(&y, &bits, 4); return y; }
static int min(int a, int b) { return a < b ? a : b; }
static int __popc(unsigned bits) { return __builtin_popcount(bits); }
static float rsqrtf(float x) { return 1.0f / sqrtf(x); }
#define __expf(x) exp2f((x) * 1.4426950408889634f)

static ucontext_t scheduler;
static vector<ucontext_t> fibers;
static vector<bool> is_done;
static unsigned self, threads;  // number of the fiber among those of the cluster; threads of a block
static unsigned meetings[8192];
static unsigned slots[2][8192][6];
static void meet() { swapcontext(&fibers[self], &scheduler); }  // the scheduler says again who goes on
static unsigned (*leave(const unsigned (&operands)[6]))[6] {
    unsigned (*slot)[6] = slots[meetings[self]++ % 2];
    memcpy(slot[self], operands, sizeof operands);
    meet();
    return slot;
}
static unsigned barriers[8192];
static void wait_for(unsigned first, unsigned end) {
    const unsigned own = ++barriers[self];
    for (bool is_alone = true; is_alone;) {
        meet();
        is_alone = false;
        for (unsigned n = first; n < end; ++n) is_alone |= !is_done[n] && barriers[n] < own;
    }
}
static void __syncthreads() { wait_for(self / threads * threads, (self / threads + 1) * threads); }

// What the blocks of a cluster send one another.
struct Arrival { bool is_ready, is_expected; long expected, received; };
static Arrival arrived[8][16];
static const char* failure;
extern "C" inline void __assertfail(const char* message, const char*, unsigned, const char*, size_t) { failure = message; }
static void host_cluster_wait() {
    for (auto& arrival : arrived[self / threads]) arrival.is_ready = true;
    wait_for(0, fibers.size());
}
static void host_expect(int number, long bytes) {
    Arrival& own = arrived[self / threads][number];
    if (own.is_expected) failure = "a barrier is armed twice";
    own.is_expected = true;
    own.expected = bytes;
}
template <typename T>
static void host_send(T& there, T value, int number, unsigned block) {
    if (!arrived[block][number].is_ready) failure = "sent to a block whose barriers are not ready";
    for (unsigned n = block * threads; n < (block + 1) * threads; ++n)
        if (is_done[n]) failure = "sent to a block that has ended";
    there = value;
    arrived[block][number].received += sizeof(T);
}
static void host_receive(int number) {
    const Arrival& own = arrived[self / threads][number];
    for (int turns = 0; !own.is_expected || own.received < own.expected; ++turns) {
        if (turns > 1000) { failure = "what is expected never comes"; return; }
        meet();
    }
    if (own.received > own.expected) failure = "more comes than is expected";
}
static float __shfl_xor_sync(unsigned, float value, int distance) {
    unsigned bits; memcpy(&bits, &value, 4);
    return __uint_as_float(leave({bits})[self ^ distance][0]);
}
static double __shfl_xor_sync(unsigned, double value, int distance) {
    unsigned bits[2]; memcpy(bits, &value, 8);
    unsigned (*slot)[6] = leave({bits[0], bits[1]});
    memcpy(&value, slot[self ^ distance], 8);
    return value;
}
static double rsqrt(double x) { return 1.0 / sqrt(x); }
__attribute__((noinline)) static float __fmul_rn(float a, float b) { return a * b; }
__attribute__((noinline)) static double __dmul_rn(double a, double b) { return a * b; }
static float of_half(unsigned bits) { _Float16 h; const unsigned short b = bits; memcpy(&h, &b, 2); return (float)h; }
static float of_bfloat16(unsigned bits) { return __uint_as_float(bits << 16); }
template <float (*WIDE)(unsigned)>
static void host_mma(float (&sums)[4], const unsigned (&operands)[6]) {
    unsigned (*slot)[6] = leave(operands);
    const int warp = self / 32 * 32, g = self % 32 / 4, q = self % 4;
    for (int place = 0; place < 4; ++place) {
        const int row = g + place / 2 * 8, col = 2 * q + place % 2;
        for (int k = 0; k < 16; ++k) {
            const int shift = k % 2 * 16;
            const unsigned a = slot[warp + row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2] >> shift & 0xffff;
            const unsigned b = slot[warp + col * 4 + k % 8 / 2][4 + k / 8] >> shift & 0xffff;
            sums[place] += WIDE(a) * WIDE(b);
        }
    }
}
static unsigned short to_bfloat16(float x) {
    unsigned bits; memcpy(&bits, &x, 4);
    return (x != x ? 0x7fc00000u : bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
}
"""
_BODIES = {
    "float to_float32(half_bits x) {": "return of_half(x.bits);",
    "half_bits from_float32(float x) {": "const _Float16 h = (_Float16)x; half_bits y; memcpy(&y.bits, &h, 2); return y;",
    "bfloat16_bits from_float32(float x) {": "return bfloat16_bits{to_bfloat16(x)};",
    "unsigned long long stream_policy() {": "return 0;",
    "void cluster_start() {": "",
    "unsigned from_float32_pair(float low, float high) {": "return to_bfloat16(high) << 16 | to_bfloat16(low);",
}


_DRIVER = """
static void** arguments;
static void (*kernel)();
static void fiber() {
    kernel();
    is_done[self] = true;
    meet();
}
static const char* walk(void** given, unsigned grid, unsigned each, unsigned cluster, unsigned across) {
    arguments = given;
    threads = each;
    failure = 0;
    const size_t bytes = 1 << 17;
    vector<char> stacks(bytes * threads * cluster);
    for (unsigned first = 0; first < grid; first += cluster) {
        fibers.assign(threads * cluster, ucontext_t{});
        is_done.assign(fibers.size(), false);
        memset(meetings, 0, sizeof meetings);
        memset(barriers, 0, sizeof barriers);
        memset(arrived, 0, sizeof arrived);
        for (size_t n = 0; n < fibers.size(); ++n) {
            getcontext(&fibers[n]);
            fibers[n].uc_stack.ss_sp = &stacks[n * bytes];
            fibers[n].uc_stack.ss_size = bytes;
            makecontext(&fibers[n], fiber, 0);
        }
        for (bool is_left = true; is_left;) {
            is_left = false;
            for (self = 0; self < fibers.size(); ++self)
                if (!is_done[self]) {
                    is_left = true;
                    threadIdx.x = self % threads % across;
                    threadIdx.y = self % threads / across;
                    blockIdx.x = first + self / threads;
                    swapcontext(&scheduler, &fibers[self]);
                }
        }
    }
    return failure;
}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A rendered kernel, its launch shape, and the tensors of one or more calls; what it writes is written in place."""

    rendered: Rendered
    calls: Sequence[Sequence[torch.Tensor]]
    grid: int
    threads: int
    """Of a block: as many along a row as ROWS, one of the macros, leaves."""
    scalars: Sequence[int] = ()
    """The arguments after the tensors."""
    macros: Mapping[str, int] = field(default_factory=dict)


def run(rendered, tensors, grid, threads, folder, *, scalars=(), macros=()):
    """Compile one kernel and run it once; ``macros`` are (name, value) pairs."""
    launch = Launch(rendered=rendered, calls=[tensors], grid=grid, threads=threads, scalars=scalars, macros=dict(macros))
    run_all([launch], folder)


def run_all(launches, folder):
    """Compile many kernels as one file, each in a namespace of its own, and run them: the headers are read once."""
    path, library = folder / "kernels.cpp", folder / "kernels.so"
    units = [_unit(number, launch) for number, launch in enumerate(launches)]
    path.write_text("\n".join([_PRELUDE, _DRIVER, *units]), encoding="utf-8")
    command = ["g++", "-O1", "-fno-strict-aliasing", "-std=c++17", "-fPIC", "-shared", "-w", "-o", str(library), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:3000]
    handle = ctypes.CDLL(str(library))
    for number, launch in enumerate(launches):
        for tensors in launch.calls:
            pointers = (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
            run_one = handle[f"run_{number}"]
            run_one.restype = ctypes.c_char_p
            across = launch.threads // launch.macros.get("ROWS", 1)
            failure = run_one(pointers, launch.grid, launch.threads, launch.macros.get("CLUSTER", 1), across)
            assert failure is None, f"{launch.rendered.entry}: {failure.decode()}"


def _unit(number, launch):
    rendered = launch.rendered
    source = rendered.source
    for head, body in _BODIES.items():
        source = re.sub(rf"({re.escape(head)}\n).*?\n}}", rf"\1    {body}\n}}", source, flags=re.DOTALL)
    source = source.replace(next((line for line in source.splitlines() if "void __assertfail(" in line), "\0"), "")
    source = source.replace("extern __shared__ uint4 staged[]", "alignas(16) static uint4 staged[1 << 14]")
    source = re.sub(r"asm volatile\(\"ld\.global.*?\);", "word = *(const uint4*)from;", source, flags=re.DOTALL)
    source = _with_a_cluster(without_approximations(source))
    source = re.sub(r"#if defined\(__CUDA_ARCH__\).*?#endif\n", "", source, flags=re.DOTALL)
    kind = "of_half" if ".f16.f16" in source else "of_bfloat16"
    mma = rf"    host_mma<{kind}>(sums, {{a0, a1, a2, a3, b0, b1}});\n}}"
    source = re.sub(r"    asm\(\"mma\.sync.*?\n}", mma, source, flags=re.DOTALL)
    assert not re.search(r"asm\(|asm volatile\(\"(?!griddep)", source.replace('asm("" :', "")), "PTX that the host does not know"
    signature = source[source.index(f"{rendered.entry}(") :]
    kinds = re.findall(r"^    ((?:const )?[\w ]+\*) (?:__restrict__ )?\w+[,)]", signature, re.MULTILINE)
    assert all(len(kinds) == len(tensors) for tensors in launch.calls)
    given = [*(f"({kind})arguments[{n}]" for n, kind in enumerate(kinds)), *map(str, launch.scalars)]
    before = "\n".join(f"#define {name} {value}" for name, value in launch.macros.items())
    # The next kernel must see none of this one's macros.
    defined = dict.fromkeys([*launch.macros, *re.findall(r"^ *#define (\w+)", source, re.MULTILINE)])
    after = "\n".join(f"#undef {name}" for name in defined)
    return f"""{before}
namespace kernel_{number} {{
#line 1 "{rendered.entry}.cu"
{source.replace('extern "C" ', "")}
static void call() {{
    {rendered.entry}({", ".join(given)});
}}
extern "C" const char* run_{number}(void** given, int grid, int threads, int cluster, int across) {{
    kernel = call;
    return walk(given, grid, threads, cluster, across);
}}
}}
{after}
"""


def _with_a_cluster(source):
    """The same with shared memory for each block of a cluster, and barriers that notice what must not happen."""
    source = re.sub(r"// Writes to the same place of another block's.*?\n}\n(?=\n)", "", source, flags=re.DOTALL)
    for call, host in (
        ("__shared__ T partial[partials];",
         "static T all_partial[CLUSTER][partials]; T (&partial)[partials] = all_partial[blockIdx.x % CLUSTER];"),
        ("send(&partial[own], value, &arrivals[NUMBER], lane)", "host_send(all_partial[lane][own], value, NUMBER, lane)"),
        ("expect(&arrivals[NUMBER], ", "host_expect(NUMBER, "),
        ("receive(&arrivals[NUMBER])", "host_receive(NUMBER)"),
    ):  # fmt: skip
        assert call in source or "CLUSTER" not in source
        source = source.replace(call, host)
    return re.sub(r"void cluster_wait\(\) {.*}", "void cluster_wait() { host_cluster_wait(); }", source)
