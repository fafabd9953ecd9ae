"""Kernel files that were taken away: each runs with nothing of this package on its path, and notices a kernel that is wrong."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
import torch

from fusion_advisor.codegen.common.interface import Header, Tuning
from fusion_advisor.codegen.cpp.backend import find_compiler
from fusion_advisor.codegen.cuda import launcher as cuda_launcher
from fusion_advisor.codegen.cuda.nvrtc import find_nvcc
from fusion_advisor.codegen.cuda.shared_memory import shared_memory_of
from fusion_advisor.codegen.registry import backend
from fusion_advisor.codegen.standalone import operand_layouts, with_launcher
from fusion_advisor.records import TensorMeta
from tests.kernel_cases import programs
from tests.kernel_cases.cases import cases

HEADER = Header(title="taken", summary="a kernel that leaves", origin="a test")
NEEDS_GCC = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
NEEDS_NVCC = pytest.mark.skipif(find_nvcc() is None, reason="no nvcc")


def file_of(program, name, *, fast_math=False):
    rendered = backend(name).render(program, HEADER, tuning=Tuning(), fast_math=fast_math)
    return with_launcher(rendered, program, fast_math=fast_math)


def run(folder, rendered, text, *, device="cpu"):
    """(exit status, what it prints) of a kernel file in an otherwise empty folder, with a clean environment."""
    path = folder / f"kernel{rendered.suffix}"
    path.write_text(text)
    clean = {name: os.environ[name] for name in ("PATH", "HOME", "LD_LIBRARY_PATH") if name in os.environ} | {
        "OMP_NUM_THREADS": "1"
    }
    if rendered.suffix == ".py":
        command = [sys.executable, "-P", path.name]
        clean |= {"TRITON_INTERPRET": "1"} if device == "cpu" else {}
    else:
        command = ["./check"]
        if rendered.suffix == ".cpp":
            flags = [flag for flag in rendered.flags if flag not in ("-shared", "-fPIC", "-O3")]
            compiler = [*find_compiler(), *flags, "-O1", "-DFUSION_ADVISOR_MAIN"]
        else:
            compiler = [str(find_nvcc()), "-std=c++17", f"-arch={'native' if device == 'cuda' else 'sm_90'}"]
        subprocess.run([*compiler, path.name, "-o", "check"], cwd=folder, env=clean, check=True, timeout=200)
        if rendered.suffix == ".cu" and device == "cpu":
            return 0, ""
    done = subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True, check=False, timeout=200)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_triton_file_runs_alone_and_notices_a_wrong_eps(tmp_path):
    rendered = file_of(programs.rmsnorm(64, 48, "bfloat16"), "triton")
    status, said = run(tmp_path, rendered, rendered.text)
    assert (status, "out: relative error" in said, ": ok" in said, "GB/s" in said) == (0, True, True, True), said
    assert rendered.text.startswith(rendered.source)

    head, marker, launcher = rendered.text.partition("# ---- launch")
    assert head.count("eps = 1e-06") == 1
    status, said = run(tmp_path, rendered, head.replace("eps = 1e-06", "eps = 1e-01") + marker + launcher)
    assert status == 1
    assert "WRONG" in said


@NEEDS_GCC
def test_cpp_file_runs_alone_and_notices_a_wrong_eps(tmp_path):
    rendered = file_of(programs.rmsnorm(64, 48, "bfloat16"), "cpp")
    status, said = run(tmp_path, rendered, rendered.text)
    assert (status, ": ok" in said, " us, " in said, " GB/s" in said) == (0, True, True, True), said

    head, marker, launcher = rendered.text.partition("// ---- launch")
    assert head.count("1e-06f") == 1
    status, said = run(tmp_path, rendered, head.replace("1e-06f", "1e-01f") + marker + launcher)
    assert status == 1
    assert "WRONG" in said


@NEEDS_NVCC
@pytest.mark.serial
def test_cuda_file_compiles_with_nvcc(tmp_path):
    program = programs.rope_qk(4, 2, 1, 3, 128, "bfloat16")
    rendered = backend("cuda").render(program, HEADER, tuning=Tuning(), fast_math=False)
    text = cuda_launcher.with_launcher(rendered, program, shared=shared_memory_of(90))
    assert rendered.source in text
    run(tmp_path, rendered, text)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["triton", "cuda"])
def test_file_runs_alone_on_a_gpu(tmp_path, name):
    if name == "cuda" and find_nvcc() is None:
        pytest.skip("no nvcc")
    rendered = file_of(programs.rmsnorm(4096, 1024, "bfloat16"), name)
    status, said = run(tmp_path, rendered, rendered.text, device="cuda")
    assert (status, ": ok" in said, " GB/s" in said) == (0, True, True), said

    assert "1e-06" in rendered.source
    broken = rendered.text.replace(rendered.source, rendered.source.replace("1e-06", "1e-01"))
    status, said = run(tmp_path, rendered, broken, device="cuda")
    assert status == 1
    assert "WRONG" in said


KINDS = (
    "swiglu_split-bfloat16", "rope_pairs-float16", "causal_softmax", "beside_rope-bfloat16", "beside_nothing", "int_and_bool",
    "dropout_add_rmsnorm-7x129", "looped_group_norm_table", "gathered_cross_entropy", "zero_cols_sum", "five_dims",
    "special-sign", "binary-pow", "rmsnorm-float64",
)  # fmt: skip


@NEEDS_GCC
def test_reference_of_a_cpp_file_is_right_for_every_kind_of_nest(tmp_path):
    """All in one program, because the headers take most of the time that a file compiles."""
    found = cases(8)
    mains, bodies, headers = [], [], {}
    for number, name in enumerate(KINDS):
        rendered = file_of(found[name], "cpp")
        lines = rendered.text.splitlines()
        headers |= dict.fromkeys(line for line in lines if line.startswith("#include"))
        body = "\n".join(line for line in lines if not line.startswith("#include"))
        bodies.append(f"namespace case{number} {{\n{body.replace('int main()', 'int run()')}\n}}")
        mains.append(f'  if (case{number}::run()) {{ std::printf("{name} is wrong\\n"); status = 1; }}')
    rendered = file_of(found[KINDS[0]], "cpp")
    text = "\n".join([*headers, *bodies, "int main() {\n  int status = 0;", *mains, "  return status;\n}\n"])
    status, said = run(tmp_path, rendered, text)
    assert status == 0, said
    assert said.count("GB/s") == len(KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_reference_of_a_triton_file_is_the_evaluators(name):
    """The printed PyTorch, run in float64, against the evaluator that all backends are tested with."""
    from tests.kernel_cases.evaluate import evaluate

    program = cases(8)[name]
    rendered = file_of(program, "triton")
    launcher = rendered.text.removeprefix(rendered.source)
    module = {}
    exec(
        compile(
            launcher.partition("def launch(")[0] + "def make_inputs" + launcher.partition("def make_inputs")[2], name, "exec"
        ),
        module,
    )
    tensors = module["make_inputs"]("cpu")
    count = sum(not operand.is_output for operand in program.operands)
    inputs, outputs = tensors[:count], tensors[count:]
    truth = [torch.zeros_like(o, dtype=torch.float64 if o.is_floating_point() else o.dtype) for o in outputs]
    module["reference"](*inputs, *truth, dtype=torch.float64)
    for found, right in zip(truth, evaluate(program, *inputs), strict=True):
        torch.testing.assert_close(found[: len(right)], right, rtol=1e-12, atol=1e-12, equal_nan=True, check_dtype=False)


def test_an_empty_kernel_has_nothing_to_launch():
    rendered = file_of(cases(8)["zero_elements"], "cpp")
    assert rendered.text == rendered.source


def test_an_operand_named_like_a_size_gets_another_name():
    program = programs.renamed(programs.rmsnorm(4, 24), x="rows")
    text = file_of(program, "triton").text
    assert "    rows_2, weight, out,\n    *,\n    rows=4," in text


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_launch_macros_come_before_the_kernels_own():
    program = programs.softmax(4, 40000)
    rendered = backend("cuda").render(program, HEADER, tuning=Tuning(), fast_math=False)
    text = cuda_launcher.with_launcher(rendered, program, shared=shared_memory_of(90))
    assert text.index("#define THREADS") < text.index("#ifndef THREADS")
    assert "cudaFuncAttributeMaxDynamicSharedMemorySize" in text


def test_outputs_in_tensors_that_a_call_is_given_have_no_layout_of_their_own():
    metas = [TensorMeta(shape=(n,), stride=(1,), dtype="float32", offset=0, device="cpu") for n in range(1, 6)]
    a, b, cache, made, written = metas
    assert operand_layouts([a, b], [made], []) == [a, b, made]
    assert operand_layouts([a, b, cache], [made, written], [1]) == [a, b, made, None]
    assert operand_layouts([a, cache, b], [written, made, written], [0, 2]) == [a, None, made, None]


@pytest.mark.parametrize("name", ["cpp", "triton"])
def test_there_is_a_layout_for_each_operand(name):
    program = next(iter(cases().values()))
    rendered = backend(name).render(program, HEADER, tuning=Tuning(), fast_math=False)
    with pytest.raises(ValueError, match=f"layouts for the {len(program.operands)} operands of {rendered.entry}"):
        with_launcher(rendered, program, tensors=[None] * (len(program.operands) + 1))
