"""Triton kernels: numerics in the interpreter (a process of its own: it must be switched on before triton is
imported), compiling for GPUs that are not here, and on a CUDA device the real thing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from fusion_advisor.codegen.common.horizontal_fusion import calls_of
from fusion_advisor.codegen.common.interface import Header, KernelBuildFailed, Tuning
from fusion_advisor.codegen.triton.backend import TritonBackend, assembly_for, compile_for
from fusion_advisor.codegen.triton.tiling import choose_shape, choose_shapes
from fusion_advisor.ir.program import Program, Store
from tests.kernel_cases import programs as p
from tests.kernel_cases.cases import cases, distance, inputs
from tests.kernel_cases.evaluate import allocate, evaluate
from tests.kernel_cases.lowered import lower_function

HERE = Path(__file__).parents[2] / "kernel_cases"
HEADER = Header(title="case", summary="a test", origin="generated from the chain")
CASES = cases()
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="runs kernels, and this machine has no CUDA device")


def render(program, tuning=None, fast_math=False, header=HEADER):
    return TritonBackend().render(program, header, tuning=tuning or Tuning(), fast_math=fast_math)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "names", "limit"),
    [
        ("default", (), 1),
        ("tuned", (), 1),
        ("fast", ("gelu_tanh-bfloat16", "swiglu-float16", "rmsnorm-float32", "softmax-float32", "special-sigmoid"), 50),
    ],
)
def test_every_case_matches_the_float64_oracle_in_the_interpreter(tmp_path, mode, names, limit):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])])}
    command = [sys.executable, str(HERE / "interpret_triton.py"), str(tmp_path), mode, *names]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == len(names or CASES)
    assert not {name: far for name, far in found.items() if not far <= limit}


@pytest.mark.parametrize("default", ["0", None])
def test_multiply_adds_are_fused_whatever_tritons_default_is(monkeypatch, tmp_path, recwarn, default):
    """It goes from on to off in Triton 3.10, and 3.9 warns of every kernel that leaves it open."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_DEFAULT_FP_FUSION", raising=False)
    if default is not None:
        monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", default)
    program = CASES["gelu_tanh-bfloat16"]
    ptx = assembly_for(program, render(program), 90)["ptx"]
    assert ptx.count("fma.rn") >= 2
    assert not [str(one.message) for one in recwarn if "FP_FUSION" in str(one.message)]


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(
    "name",
    ["gelu_tanh-bfloat16", "bias_gelu_erf-float32", "swiglu_split-float16", "rmsnorm-bfloat16", "add_layernorm-float64",
     "softmax-float32", "rope-bfloat16", "looped_softmax-1x20000", "five_dims", "batched_softmax", "int_and_bool",
     "transposed_add", "beside_norms-float32"],
)  # fmt: skip
def test_compiles_without_a_gpu(name, capability):
    cubin = compile_for(CASES[name], render(CASES[name]), capability)
    assert cubin[:4] == b"\x7fELF"


@pytest.mark.parametrize("op", [name for name in CASES if name.startswith(("special-", "binary-"))])
def test_every_op_compiles(op):
    assert compile_for(CASES[op], render(CASES[op]), 90)


def test_wide_rows_are_looped_and_narrow_ones_are_not():
    assert "for start in " not in render(p.rmsnorm(4, 16384)).source
    assert "for start in " in render(p.rmsnorm(4, 16385)).source
    assert render(p.rmsnorm(4, 16384)).entry != render(p.rmsnorm(4, 16385)).entry


def test_a_tuning_may_walk_a_row_that_registers_would_hold():
    """The walks say what stays in the cache: the row until its last walk, the weight for all rows; a row of over 128 kB is not
    kept, and its kernel has a name of its own."""
    source = render(p.rmsnorm(4, 8192), Tuning(block_cols=4096)).source
    assert source.count("for start in ") == 2
    told = [line.split("evict_")[1][:5].strip('")') for line in source.splitlines() if "evict_" in line]
    assert told == ["last", "first", "last"]  # x, x again, the weight
    near, far = (render(p.rmsnorm(4, cols), Tuning(block_cols=4096)) for cols in (2**15, 2**15 + 1))
    assert "evict_" in near.source
    assert "evict_" not in far.source
    assert near.entry != far.entry
    assert "for start in " not in render(p.rmsnorm(4, 4096), Tuning(block_cols=4096)).source


def test_constants_are_launched_in_the_order_of_the_signature():
    """Launchers pass them by position; the interpreter, by name, would not notice."""
    norm = p.renamed(CASES["looped_group_norm_one"], x="y", x2="scales", out="y_out")
    siblings = p.siblings(p.dropout_add_rmsnorm(4, 18432), norm)
    for name, program in {**CASES, "dropout beside parts": siblings}.items():
        rendered = render(program)
        calls = calls_of(program, flatten_rows=False)
        is_looped = "for start in " in rendered.source
        shape, _ = choose_shapes([call.plan for call in calls], Tuning(), is_looped=is_looped)
        signature = rendered.source[rendered.source.rindex("\ndef fa_") :].split("):\n")[0]
        last = signature[signature.rindex("INDEX: tl.constexpr") :]
        assert [word.split(":")[0].strip() for word in last.split(",") if word.strip()] == list(shape.constants), name
    assert {"WHOLE", "BY_FOUR"} <= set(shape.constants)


def test_a_tile_of_a_walk_has_the_eight_neighbours_that_share_a_maximum():
    program = p.softmax(4, 40)
    (call,) = calls_of(program, flatten_rows=False)
    shape = choose_shape(call.plan, Tuning(block_cols=4), is_looped=True)
    assert shape.constants["BLOCK_COLS"] == 8
    assert compile_for(program, render(program, Tuning(block_cols=4)), 90)


def test_tiles_are_compiled_for_every_size_but_the_outermost():
    program = CASES["rope-bfloat16"]
    source = render(program).source
    signature = source[source.index("def fa_") : source.index("):\n", source.index("def fa_"))]
    assert "cols: tl.constexpr" in signature
    numbers = [word.strip() for line in signature.splitlines()[2:] for word in line.split(",") if word.strip()]
    assert all(word.endswith("tl.constexpr") for word in numbers)
    rows_and_cols = render(CASES["bias_gelu_erf-bfloat16"]).source
    assert "    rows, cols: tl.constexpr," in rows_and_cols
    flat = render(p.gelu_tanh()).source
    assert "size," in flat
    assert "size: tl.constexpr" not in flat


def test_what_a_channel_shares_is_multiplied_once_and_nothing_else():
    def source(scale):
        inputs = torch.randn(1, 40, 32, 32), torch.rand(1, 40, 32, 32), torch.randn(40)
        lowered, _ = lower_function(lambda x, y, w: (x * scale(x, y) * w[None, :, None, None]).sum((1, 2, 3)), *inputs)
        return render(lowered.program).source

    assert "x * (inverse_rms * x2)" in source(lambda x, _: torch.rsqrt(x.pow(2).mean((1, 2, 3), keepdim=True) + 1e-6))
    assert "x * tl.rsqrt(x2) * x3" in source(lambda _, y: torch.rsqrt(y))


def test_one_kernel_serves_every_width_with_the_same_key():
    assert render(p.rmsnorm(4, 1000)) == render(p.rmsnorm(9, 4096))


def test_addresses_beyond_32_bits_use_64_bit_indices():
    wide = Program(
        dims=(2**31,),
        operands=p.gelu_tanh().operands,
        values=p.gelu_tanh().values,
        stores=(Store(operand=1, value=11, strides=(1,)),),
    )
    from fusion_advisor.codegen.common.arguments import schedule

    assert schedule(wide, flatten_rows=False).needs_int64
    assert not schedule(p.gelu_tanh((2**30,)), flatten_rows=False).needs_int64
    assert schedule(p.rmsnorm(3, 1024, row_stride=2**30), flatten_rows=False).needs_int64
    assert compile_for(wide, render(wide), 90)


def test_fast_math_shows_in_name_and_head_comment():
    rendered = render(p.gelu_tanh(), fast_math=True)
    assert "fast" in rendered.entry
    assert "fast math" in rendered.source
    assert rendered.entry != render(p.gelu_tanh()).entry


def test_manifest_text_cannot_leave_the_comment():
    header = Header(title="k", summary='x"""\nimport os\r\u2028boom', origin="o\\\n#", source="*/ \x1b[31m")
    lines = render(p.gelu_tanh(), header=header).source.splitlines()
    head = lines[: lines.index("import triton")]
    assert all(line.startswith("#") or not line for line in head)
    assert "\x1b" not in "".join(lines)


def test_unknown_op_is_a_build_failure():
    with pytest.raises(KernelBuildFailed, match="op gamma"):
        render(p.unary("gamma"))


def test_bad_source_is_a_build_failure_with_a_short_cause(tmp_path):
    rendered = render(p.gelu_tanh())
    broken = type(rendered)(
        backend="triton", entry=rendered.entry, source=rendered.source.replace("tl.store", "tl.stoer"), suffix=".py"
    )
    with pytest.raises(KernelBuildFailed, match="stoer") as caught:
        compile_for(p.gelu_tanh(), broken, 90)
    assert len(str(caught.value)) < 400


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("fast_math", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_runs_on_the_device(tmp_path, name, fast_math):
    program = CASES[name]
    rendered = render(program, fast_math=fast_math)
    launcher = TritonBackend().build(rendered, tmp_path / f"{rendered.entry}.py").bind(program)
    tensors, outputs = inputs(name, program), [t.cuda() for t in allocate(program)]
    launcher(*(t.cuda() for t in tensors), *outputs)
    if fast_math and name.startswith(("special", "binary")):
        return  # approximations give up the extremes
    for got, oracle in zip(outputs, evaluate(program, *tensors), strict=True):
        assert distance(name, got.cpu(), oracle) <= (100 if fast_math else 1)


@pytest.mark.gpu
@needs_gpu
def test_unaligned_tensors_take_the_careful_road(tmp_path):
    program = p.gelu_tanh((1000,), "bfloat16")
    rendered = render(program)
    launcher = TritonBackend().build(rendered, tmp_path / "k.py").bind(program)
    x = torch.randn(1001, device="cuda").bfloat16()[1:]
    out = torch.zeros(1003, device="cuda").bfloat16()[3:]
    launcher(x, out)
    assert distance("gelu", out.cpu(), evaluate(program, x.cpu())[0]) <= 1


def test_what_is_written_names_what_is_made_of_it():
    def function(x, residual, weight):
        total = x + residual
        return total, functional.layer_norm(total, (64,), weight, None, 1e-5)

    inputs = torch.zeros(4, 64), torch.zeros(4, 64), torch.zeros(64)
    source = render(lower_function(function, *inputs)[0].program).source
    assert "out1_mean = mean_of(out1_sum, " in source
    assert "inverse_deviation = tl.rsqrt(out1_variance + 1e-05)" in source


def test_what_is_added_with_a_minus_sign_is_subtracted():
    def source(function):
        return render(lower_function(function, torch.zeros(4, 64))[0].program).source

    assert "out = x - 2.5" in source(lambda x: x + -2.5)
    assert "out = x + 2.5" in source(lambda x: x - -2.5)
