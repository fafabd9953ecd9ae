"""CUDA C++ kernels: compiling for GPUs that are not here with NVRTC and nvcc, their arithmetic on the host (see
cuda_on_host.py), and on a CUDA device the real thing.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from dataclasses import replace

import pytest
import torch

from fusion_advisor.codegen.common.arguments import schedule
from fusion_advisor.codegen.common.horizontal_fusion import calls_of
from fusion_advisor.codegen.common.interface import Header, KernelBuildFailed, Tuning
from fusion_advisor.codegen.cuda.backend import CudaBackend, compile_for
from fusion_advisor.codegen.cuda.nvrtc import compile_cubin, find_nvcc
from fusion_advisor.codegen.cuda.shared_memory import shared_memory_of
from fusion_advisor.codegen.cuda.tiling import Form, form_for, launch_shape, launch_shapes, pack_width, shared_bytes_of
from fusion_advisor.lowering.rules import pointwise
from tests.kernel_cases import cuda_on_host
from tests.kernel_cases import programs as p
from tests.kernel_cases.cases import cases, distance, inputs
from tests.kernel_cases.evaluate import allocate, evaluate
from tests.kernel_cases.lowered import lower_function

NO_TUNING = Tuning()
HEADER = Header(title="case", summary="a test", origin="generated from the chain")
CASES = cases()
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="runs kernels, and this machine has no CUDA device")
needs_nvcc = pytest.mark.skipif(find_nvcc() is None, reason="compiles with nvcc, and there is none")


def render(program, tuning=None, fast_math=False, header=HEADER):
    return CudaBackend().render(program, header, tuning=tuning or Tuning(), fast_math=fast_math)


PARTS = 4
"""Files that all cases are compiled in on the host: one of them takes the place of many runs of the compiler."""
SINGLE_COLUMNS = ("gelu_tanh-bfloat16", "rope-bfloat16", "add_layernorm-float16", "swiglu_split-float32", "five_dims",
                  "dropout_wide", "dropout_add_rmsnorm-bfloat16", "dropout_past_32_bits", "rope_pairs-bfloat16",
                  "rope_pairs-float64", "looped_pairs", "three_of_a_kind", "beside_rope-bfloat16")  # fmt: skip


def distances_on_the_host(asked, folder):
    """Run (case, columns of a pack) on the host; return (case, columns) → the distance of its worst output."""
    launches = {}
    for name, width in asked:
        program = CASES[name]
        given, outputs = inputs(name, program), allocate(program)
        launches[name, width] = cuda_on_host.Launch(
            rendered=render(program), program=program, inputs=given, outputs=outputs, width=width
        )
    cuda_on_host.run_all(list(launches.values()), folder)
    found = {}
    for (name, width), launch in launches.items():
        pairs = zip(launch.outputs, evaluate(launch.program, *launch.inputs), strict=True)
        found[name, width] = max((distance(name, got, oracle) for got, oracle in pairs), default=0.0)
    return found


@pytest.mark.skipif(shutil.which("g++") is None, reason="runs kernels on the host, and there is no g++")
@pytest.mark.parametrize("part", range(PARTS))
def test_every_case_matches_the_float64_oracle_on_the_host(tmp_path, part):
    found = distances_on_the_host([(name, 0) for name in list(CASES)[part::PARTS]], tmp_path)
    # One thread adds up 16,385 terms in a row where a looped case has many.
    assert not {name: far for (name, _), far in found.items() if not far <= (4 if name.startswith("looped") else 1)}


@pytest.mark.skipif(shutil.which("g++") is None, reason="runs kernels on the host, and there is no g++")
def test_packs_of_any_width_do_what_the_widest_do(tmp_path):
    """Single columns; and dropout, whose four neighbours share a draw, in packs of every width."""
    found = distances_on_the_host([*((name, 1) for name in SINGLE_COLUMNS), *(("dropout_wide", n) for n in (2, 4, 8))], tmp_path)
    assert not {asked: far for asked, far in found.items() if not far <= 1}


@pytest.mark.parametrize(
    ("program", "want"),
    [
        (p.rmsnorm(4, 4096, "bfloat16"), (8, 16)),
        (p.rmsnorm(4, 4100, "bfloat16"), (4, 8)),
        (p.rmsnorm(4, 4097, "bfloat16"), (1, 1)),
        (p.rmsnorm(4, 4096, "float32"), (4, 16)),
        (p.rmsnorm(4, 24, row_stride=37), (1, 1)),
        (p.rmsnorm(1, 24, row_stride=37), (4, 16)),
        (p.swiglu(4, 33, "bfloat16", Form(is_split=True)), (1, 1)),
        (p.gelu_tanh((100,), strides=(3,)), (4, 16)),
        (p.rope(1, 2, 70, 128, "bfloat16"), (8, 16)),
        (p.rope_pairs(1, 2, 70, 64, "bfloat16"), (8, 16)),
        (p.rope_pairs(1, 2, 70, 6, "bfloat16"), (2, 8)),
        (p.rope_pairs(1, 2, 70, 64, "bfloat16", offset=1, row=130), (1, 1)),
        (p.rope_pairs(1, 2, 70, 64, "float64"), (2, 16)),
        (p.swapped_pairs(512, "bfloat16"), (4, 16)),
        (p.swapped_pairs(511, "bfloat16"), (1, 1)),
    ],
)
def test_packs_are_as_wide_as_every_address_allows(program, want):
    assert pack_width(schedule(program, flatten_rows=True)) == want


def test_a_pack_takes_whole_calls_of_the_random_numbers():
    widths = [pack_width(schedule(CASES[f"dropout_{name}"], flatten_rows=True))[0]
              for name in ("wide", "past_32_bits", "rows_off_by_2", "rows_off_by_1")]  # fmt: skip
    assert widths == [8, 4, 2, 1]


def test_a_guard_is_asked_once_for_a_pack_where_it_cannot_change_inside():
    source = render(p.rope(2, 3, 5, 128, "bfloat16")).source
    assert "load_pack(x_ptr + (x_start + first + x_offset), is_inside && first < 64)" in source
    assert "is_lt ? to_float32(x_ptr[x_start + col" in render(p.rope(2, 3, 5, 12, "bfloat16")).source


@pytest.mark.parametrize("program", [p.rope(0), p.rope(seq=0), p.rmsnorm(0), p.gelu_tanh((0,))])
def test_what_is_empty_has_a_launch_shape(program):
    """`kernels check` compiles such a case too where there is no device."""
    macros, _ = launch_shape(schedule(program, flatten_rows=True), Tuning())
    assert min(value for name, value in macros.items() if name != "FULL") > 0


def test_the_rows_of_a_thread_share_what_no_head_changes():
    plan = schedule(p.rope(1, 28, 2048, 128, "bfloat16"), flatten_rows=True)
    macros, _ = launch_shape(plan, Tuning())
    assert plan.program.dims[-2] % macros["PACKS"] == 0
    source = render(p.bias_gelu_erf(4096, 4096, "bfloat16")).source
    assert source.index("bias_pack = ") > source.index("x_packs[p] = ")
    assert "bias_packs" not in source


@pytest.mark.slow
@pytest.mark.nvrtc
@pytest.mark.parametrize("fast_math", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_compiles_with_nvrtc(name, fast_math):
    program = CASES[name]
    cubin = compile_for(render(program, fast_math=fast_math), 90, program=program, compiler="nvrtc")
    assert cubin[:4] == b"\x7fELF"


@pytest.mark.nvrtc
def test_machine_code_is_kept_for_the_next_process(monkeypatch, tmp_path):
    utils = pytest.importorskip("cuda.core.utils")
    if not hasattr(utils, "ProgramCacheResource"):
        pytest.skip("this cuda-core keeps none")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def entries():
        return list((tmp_path / "fusion-advisor" / "cubin").iterdir())

    rendered = render(CASES["gelu_tanh-bfloat16"])
    first = compile_cubin(rendered, "sm_90", {}, compiler="nvrtc")
    (kept,) = entries()
    with monkeypatch.context() as patched:
        patched.setattr("fusion_advisor.files.kept_code.KeptCode.keep", lambda *_: pytest.fail("compiled again"))
        assert compile_cubin(rendered, "sm_90", {}, compiler="nvrtc") == first
    for damage in (b"", b"what another program wrote", first[:-1], bytes(len(first))):
        kept.write_bytes(damage)
        assert compile_cubin(rendered, "sm_90", {}, compiler="nvrtc") == first
        assert entries() == [kept]
        assert kept.read_bytes() == first
    for other in ({"BLOCK": 64}, {"BLOCK": 128}):
        assert compile_cubin(rendered, "sm_90", other, compiler="nvrtc")[:4] == b"\x7fELF"
    assert compile_cubin(rendered, "sm_80", {}, compiler="nvrtc")[:4] == b"\x7fELF"
    assert len(entries()) == 4


@pytest.mark.nvrtc
@pytest.mark.parametrize("capability", [80, 100])
@pytest.mark.parametrize("name", ["gelu_tanh-bfloat16", "rope-float16", "looped_softmax-1x20000", "add_layernorm-float64"])
def test_compiles_for_other_gpus(name, capability):
    assert compile_for(render(CASES[name]), capability, program=CASES[name], compiler="nvrtc")


@needs_nvcc
@pytest.mark.parametrize("name", ["bias_gelu_erf-float32", "swiglu_split-bfloat16", "add_layernorm-float16", "int_and_bool"])
def test_compiles_with_nvcc(name):
    assert compile_for(render(CASES[name]), 90, program=CASES[name], compiler="nvcc")


def test_a_float_as_a_narrow_integer_keeps_all_digits(monkeypatch, tmp_path):
    """The ends of int32 are literals of two types, between which the helpers for float would be chosen."""
    on_gpu = functools.partial(pointwise._through_int32, on_cpu=False)
    monkeypatch.setattr(pointwise, "_through_int32", lambda lowering, number, **_: on_gpu(lowering, number))
    x = torch.tensor([3e9, -3e9, 16777217.0, 2147483647.0, -5.5, 0.0, 2.0**31, 123456789.0], dtype=torch.float64)
    lowered, _ = lower_function(lambda x: x.to(torch.int32), x)
    out = torch.zeros(8, dtype=torch.int32)
    cuda_on_host.run(render(lowered.program), lowered.program, [x], [out], tmp_path)
    assert out.tolist() == [2**31 - 1, -(2**31), 16777217, 2147483647, -5, 0, 2**31 - 1, 123456789]


@pytest.mark.nvrtc
def test_the_lowest_integer_is_compared_as_a_signed_one():
    """nvcc read 2^63 as unsigned and compared unsigned: 5 was not more than -2^63."""
    source = render(lower_function(lambda x: x > -(2**63), torch.arange(8))[0].program).source
    assert "(long long)(1ULL << 63)" in source and "9223372036854775808" not in source


def test_wide_indices_compile():
    program = p.rmsnorm(3, 1024, row_stride=2**30)
    macros, _ = launch_shape(schedule(program, flatten_rows=True), Tuning())
    assert macros["WIDE_INDEX"] == 1
    assert compile_for(render(program), 90, program=program)


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", ["rope-bfloat16", "add_layernorm-float16", "gelu_tanh-bfloat16"])
def test_single_columns_compile(name):
    assert compile_for(render(CASES[name]), 90, program=CASES[name], width=1)


def test_launch_shapes_cover_every_column_once():
    for cols in (1, 31, 128, 1536, 4096, 5000, 16384):
        plan = schedule(p.rmsnorm(4096, cols, "bfloat16"), flatten_rows=True)
        macros, grid = launch_shape(plan, Tuning())
        reached = macros["PACKS"] * macros["THREADS"] * macros["VEC"]
        assert reached >= cols
        assert macros["FULL"] == (reached == cols)
        assert macros["THREADS"] * macros["ROWS"] % 32 == 0 and macros["THREADS"] * macros["ROWS"] <= 1024
        assert grid[0] * macros["ROWS"] >= 4096
        assert macros["ROWS"] == 1 or macros["THREADS"] in (1, 2, 4, 8, 16, 32)


def test_a_tiled_launch_knows_its_divisors_and_how_often_it_walks_the_columns():
    def macros_of(program, tuning=NO_TUNING):
        plans = [call.plan for call in calls_of(program, flatten_rows=True)]
        width = min(pack_width(plan)[0] for plan in plans)
        return launch_shapes(plans, tuning, form=form_for(plans), width=width)[0]

    one = macros_of(p.rope(1, 32, 2048, 128, "bfloat16"))
    assert one["SIZE1"] in (32, 2048) and "ONCE" not in one
    assert not any(name.startswith("SIZE") for name in macros_of(p.rope_qk(32, 8, 1, 64, 128, "bfloat16")))
    assert macros_of(p.bias_gelu_erf(3, 65536 * 2048 + 8, "bfloat16"), Tuning(num_warps=8))["ONCE"] == 0
    assert "ONCE" not in macros_of(p.bias_gelu_erf(3, 65535 * 2048, "bfloat16"), Tuning(num_warps=8))


def test_a_launch_knows_what_channels_take_its_rows_apart_by():
    def macros_of(program):
        plans = [call.plan for call in calls_of(program, flatten_rows=True)]
        return launch_shapes(plans, NO_TUNING, form=form_for(plans), width=pack_width(plans[0])[0])[0]

    norm = macros_of(CASES["gathered_group_norm"])
    assert norm["SIZE1"] == 3 and norm["X2_EXTENT"] == 4 * 8
    assert "__builtin_assume(x2_extent == X2_EXTENT);" in render(CASES["gathered_group_norm"]).source
    assert not any(name.startswith("SIZE") for name in macros_of(p.softmax(64, 64)))
    assert not any(name.startswith("SIZE") for name in macros_of(CASES["looped_group_norms"]))  # functions that others share


def test_what_a_channel_adds_to_an_address_counts_towards_32_bits():
    program = CASES["gathered_group_norm"]
    assert not schedule(program, flatten_rows=True).needs_int64
    (place, load) = next((n, v) for n, v in enumerate(program.values) if v.op == "load" and v.args)
    far = replace(load, steps=(2**31,))  # a channel's weight so far from the next one's
    values = (*program.values[:place], far, *program.values[place + 1 :])
    assert schedule(replace(program, values=values), flatten_rows=True).needs_int64
    assert "const index_t part = " in render(program).source


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiles C++, and there is no g++")
def test_a_mean_is_rounded_as_a_division_rounds(tmp_path):
    source = render(p.rmsnorm(4, 4096)).source
    helper = source[source.index("__device__ __forceinline__ float mean_of") : source.index("struct Sum")]
    # Counts of columns against sums of any size; infinities, NaN and zeros stay what they are.
    program = f"""
#include <cmath>
#include <cstdio>
#include <cstring>
#define __device__
#define __forceinline__
#define __fmul_rn(a, b) ((a) * (b))
using std::fmaf;
{helper}
int main() {{
    unsigned bits = 12345, wrong = 0;
    const float edges[] = {{0.0f, -0.0f, INFINITY, -INFINITY, NAN, 3.4e38f, -3.4e38f, 1.0f}};
    for (int count = 1; count < 1 << 18; count += count < 5000 ? 1 : 37) {{
        for (int n = 0; n < 400; ++n) {{
            bits = bits * 1664525u + 1013904223u;
            float total;
            const unsigned tame = (bits & 0x807fffffu) | ((64 + (bits >> 9) % 128) << 23);  // 2^-63 to 2^64
            std::memcpy(&total, &tame, 4);
            if (n < 8) total = edges[n];
            const float found = mean_of(total, (float)count), wanted = total / (float)count;
            wrong += found != wanted && !(std::isnan(found) && std::isnan(wanted));
        }}
    }}
    std::printf("%u", wrong);
}}
"""
    path = tmp_path / "mean.cpp"
    path.write_text(program, encoding="utf-8")
    command = ["g++", "-O2", "-ffp-contract=off", str(path), "-o", str(tmp_path / "mean")]
    subprocess.run(command, check=True, capture_output=True)
    assert subprocess.run([tmp_path / "mean"], check=True, capture_output=True, text=True).stdout == "0"


def test_packs_are_narrowed_to_what_is_asked():
    plan = schedule(p.gelu_tanh((4096,), "bfloat16"), flatten_rows=True)
    for asked, width in ((None, 8), (2048, 8), (8, 8), (3, 2), (1, 1)):
        macros, grid = launch_shape(plan, Tuning(packs=1, num_warps=4, block_cols=asked))
        assert macros["VEC"] == width
        assert grid[0] * macros["THREADS"] * width == 4096


def test_sources_include_nothing():
    assert not any("#include" in render(program).source for program in CASES.values())


def test_no_declaration_is_left_unused():
    for program in CASES.values():
        source = render(program).source
        body = source[source.index('extern "C"') :]
        for name in re.findall(r"const \w+(?:<\w+>)?&? (\w+) =", body):
            assert len(re.findall(rf"\b{name}\b", body)) > 1, (name, body)


def test_fast_math_shows_in_name_and_head_comment():
    rendered = render(p.gelu_tanh(), fast_math=True)
    assert "fast" in rendered.entry
    assert "fast math" in rendered.source
    assert "tanh.approx" in rendered.source
    assert "tanh.approx" not in render(p.gelu_tanh()).source


def test_tuning_is_kept_in_the_file():
    rendered = render(p.rmsnorm(4, 4096), tuning=Tuning(num_warps=4))
    assert "// Tuning: num_warps=4" in rendered.source
    rendered = render(p.rmsnorm(4, 4096), tuning=Tuning(packs=8))
    assert rendered.tuning == Tuning(packs=8)


def test_manifest_text_cannot_leave_the_comment():
    header = Header(title="k", summary="x */ \\\n#include <a>\r\u2028boom", origin="o\\", source="\x1b[31m")
    lines = render(p.gelu_tanh(), header=header).source.splitlines()
    head = lines[: lines.index("#ifndef THREADS")]
    assert all((line.startswith("//") and not line.endswith("\\")) or not line for line in head)
    assert "\x1b" not in "".join(lines)


def test_unknown_op_is_a_build_failure():
    with pytest.raises(KernelBuildFailed, match="op gamma"):
        render(p.unary("gamma"))


@pytest.mark.nvrtc
@pytest.mark.parametrize("compiler", ["nvrtc", pytest.param("nvcc", marks=needs_nvcc)])
def test_bad_source_is_a_build_failure_with_a_short_cause(compiler):
    rendered = render(p.gelu_tanh())
    broken = type(rendered)(backend="cuda", entry=rendered.entry, source=rendered.source.replace("tanhf", "tanhq"), suffix=".cu")
    with pytest.raises(KernelBuildFailed, match="tanhq") as caught:
        compile_for(broken, 90, compiler=compiler)
    assert len(str(caught.value)) < 400


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine with no CUDA device")
def test_building_without_a_device_says_so(tmp_path):
    with pytest.raises(KernelBuildFailed, match="no CUDA device"):
        CudaBackend().build(render(p.gelu_tanh()), tmp_path / "k.cu").bind(p.gelu_tanh())


@pytest.mark.gpu
@needs_gpu
@pytest.mark.nvrtc
@pytest.mark.parametrize("fast_math", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_runs_on_the_device(tmp_path, name, fast_math):
    program = CASES[name]
    launcher = CudaBackend().build(render(program, fast_math=fast_math), tmp_path / "k.cu").bind(program)
    tensors, outputs = inputs(name, program), [t.cuda() for t in allocate(program)]
    launcher(*(t.cuda() for t in tensors), *outputs)
    if fast_math and name.startswith(("special", "binary")):
        return  # approximations give up the extremes
    for got, oracle in zip(outputs, evaluate(program, *tensors), strict=True):
        assert distance(name, got.cpu(), oracle) <= (2000 if fast_math else 1)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.nvrtc
def test_unaligned_tensors_are_read_column_by_column(tmp_path):
    program = p.gelu_tanh((1000,), "bfloat16")
    launcher = CudaBackend().build(render(program), tmp_path / "k.cu").bind(program)
    x = torch.randn(1001, device="cuda").bfloat16()[1:]
    out = torch.zeros(1003, device="cuda").bfloat16()[3:]
    launcher(x, out)
    assert distance("gelu", out.cpu(), evaluate(program, x.cpu())[0]) <= 1


@pytest.mark.parametrize(
    ("name", "width"),
    [
        ("gathered_embedding", 4), ("gathered_embedding-bfloat16", 8), ("gathered_embedding_odd", 1),
        ("gathered_embedding_transposed", 4), ("gathered_group_norm", 8), ("gathered_group_norm_odd", 1),
        ("gathered_group_norm_narrow", 2),
    ],
)  # fmt: skip
def test_packs_lie_in_one_row_of_a_table_and_in_one_channel(name, width):
    assert pack_width(schedule(CASES[name], flatten_rows=True))[0] == width


def test_packs_cross_a_border_where_those_inside_a_channel_are_narrow():
    plans = {name: schedule(CASES[f"gathered_group_norm{name}"], flatten_rows=True) for name in ("_split", "", "_narrow", "_odd")}
    assert [form_for([plan]).is_split for plan in plans.values()] == [True, False, False, False]
    assert pack_width(plans["_split"])[0] == 1
    assert pack_width(plans["_split"], Form(is_split=True)) == (8, 16)
    assert pack_width(plans["_narrow"], Form(is_split=True))[0] == 2  # wider ones would meet two borders
    assert launch_shape(plans["_split"], Tuning(), form=Form(is_split=True))[0]["VEC"] == 8


def test_packs_of_wide_rows_start_where_addresses_allow():
    def forms(*programs):
        return [form_for([schedule(program, flatten_rows=True)]) for program in programs]

    odd, even = p.softmax(4, 50257, "bfloat16"), p.softmax(4, 50264, "bfloat16")
    # Narrow rows are mostly edges; a weight starts at another address than each row; dropout's numbers are counted from the row.
    others = (p.softmax(4, 4097, "bfloat16"), p.add_layernorm(2, 16385, "float16"), p.dropout_add_rmsnorm(2, 16385))
    assert [form.is_shifted for form in forms(odd, even, *others)] == [True, False, False, False, False]
    plan, shifted = schedule(odd, flatten_rows=True), Form(is_looped=True, is_shifted=True)
    assert pack_width(plan, shifted) == (8, 16)
    assert pack_width(schedule(p.rmsnorm(4, 24, row_stride=37), flatten_rows=True), shifted) == (1, 1)
    macros, _ = launch_shape(plan, Tuning(), form=shifted, shared=shared_memory_of(90))
    assert macros["STAGED"] >= 50257 + 7
    assert not macros["FULL"]
    wide = launch_shape(schedule(p.softmax(4, 8 * 8192, "float32"), flatten_rows=True), Tuning(packs=1), form=shifted)[0]
    assert "store_pack(x_staged + first + shift, x_packs[p]);" in render(odd).source  # before it is what no one may write
    assert not wide["FULL"]  # a multiple of the step, but the row may start inside of one


def test_rows_in_shared_memory_fit_beside_each_other():
    shapes = []
    for program in (p.softmax(2048, 128256, "bfloat16"), p.softmax(2048, 50264, "bfloat16"), p.softmax(16, 50264, "bfloat16"),
                    p.dropout_add_rmsnorm(4, 20000), p.normed_pairs(2, 16390, "float16"), p.logsumexp(4, 20000)):  # fmt: skip
        plan = schedule(program, flatten_rows=True)
        macros, _ = launch_shape(plan, Tuning(), form=Form(is_looped=True), shared=shared_memory_of(90))
        shapes.append((macros["THREADS"], macros.get("STAGED"), shared_bytes_of(plan, macros)))
    assert shapes == [
        (1024, 115968, 2 * 115968),  # nine tenths of a row; two rows of 50,264 are under way on a multiprocessor
        (512, 50272, 2 * 50272),
        (1024, 50272, 2 * 50272),
        (1024, 20000, (4 + 4) * 20000 + 20000 // 4),  # both operands, and a byte for the dropout of four columns
        (1024, 16400, 2 * 2 * 16400),  # two neighbours each
        (1024, None, 0),  # walked once
    ]


def test_a_device_without_room_reads_the_row_again():
    plan = schedule(p.softmax(4, 20000), flatten_rows=True)
    macros, _ = launch_shape(plan, Tuning(), form=Form(is_looped=True))
    assert macros["STAGED"] == 0 and shared_bytes_of(plan, macros) == 0
    assert [shared_memory_of(arch).block_bytes >> 10 for arch in (75, 80, 86, 90, 100, 999)] == [64, 163, 99, 227, 227, 48]


@pytest.mark.skipif(shutil.which("g++") is None, reason="runs kernels on the host, and there is no g++")
@pytest.mark.parametrize("staged", [0, 20000])
def test_what_is_held_and_what_is_read_again_are_the_same(tmp_path, staged):
    names = ("looped_softmax-1x20000", "looped_add_layernorm-1x20000", "dropout_add_rmsnorm-2x20000")
    launches = [
        cuda_on_host.Launch(
            rendered=render(CASES[name]), program=CASES[name], inputs=inputs(name, CASES[name]), outputs=allocate(CASES[name]),
            staged=staged,
        )
        for name in names
    ]  # fmt: skip
    cuda_on_host.run_all(launches, tmp_path)
    for name, launch in zip(names, launches, strict=True):
        for got, oracle in zip(launch.outputs, evaluate(launch.program, *launch.inputs), strict=True):
            assert distance(name, got, oracle) <= 4


def test_what_a_pack_shares_is_read_once_for_it():
    lines = render(CASES["gathered_group_norm"]).source.splitlines()
    lane = max(n for n, line in enumerate(lines) if "int lane = 0" in line)
    reads = [n for n, line in enumerate(lines) if "x2_ptr[" in line or "x3_ptr[" in line or "first / " in line]
    assert len(reads) == 3 and max(reads) < lane


def test_what_rows_share_is_read_late_where_rows_are_many():
    def late(program):
        return launch_shape(schedule(program, flatten_rows=True), Tuning())[0].get("LATE")

    assert late(p.add_layernorm(4096, 4096, "bfloat16")) == 1
    assert late(p.add_layernorm(8, 4096, "bfloat16")) == 0
    assert late(p.rmsnorm(4096, 4096, "bfloat16")) is None


TUNINGS = [
    Tuning(), *(Tuning(packs=count) for count in (1, 2, 3, 8)), *(Tuning(num_warps=count) for count in (1, 2, 32)),
    Tuning(num_warps=1, block_rows=2), Tuning(cluster=2), Tuning(cluster=8, packs=2),
]  # fmt: skip


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.is_reduced])
def test_rows_get_the_blocks_and_the_columns_that_their_kernels_count_on(name):
    """A block of one row does not compare it with the row count, and FULL tells the compiler how many columns there are."""
    plans = [call.plan for call in calls_of(CASES[name], flatten_rows=True)]
    for tuning in TUNINGS:
        form = form_for(plans, tuning)
        width = min(pack_width(plan, form)[0] for plan in plans)
        macros, grids = launch_shapes(plans, tuning, form=form, width=width, shared=shared_memory_of(90))
        blocks = macros.get("CLUSTER", 1)
        held = macros["PACKS"] * macros["THREADS"] * macros["VEC"] * blocks
        for plan, grid in zip(plans, grids, strict=True):
            if macros.get("ROWS", 1) == 1:
                assert grid == (plan.row_count * blocks, 1, 1)
            assert not macros["FULL"] or form.is_looped or plan.is_empty or held == plan.program.dims[-1]
