"""A kernel repository's extension on torch's stable ABI: files, a build by nvcc or a planted one, ops, what they refuse.

One build loads in several versions of torch. The exported test, which this one runs, shows it: a library that nvcc 13.0 built
against the headers of torch 2.10 passed it in torch 2.10 (CUDA 12.8), 2.11 and 2.12 (CUDA 13.0) and 2.13 (CPU).
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from fusion_advisor.codegen.cuda.nvrtc import find_nvcc
from fusion_advisor.codegen.gemm.problem import GATED_TILES
from fusion_advisor.errors import PlanMismatch
from fusion_advisor.export.extension.source import launches_of, why_not
from fusion_advisor.export.hub_kernels.linears import in_cuda, linear_functions
from fusion_advisor.export.patch.patch import other_rewrites
from fusion_advisor.files.whole_folder import write_folder
from fusion_advisor.fuse.decide.session import BuiltLinear, LinearSource
from tests.export.extension import native, planted_nvcc
from tests.kernel_cases import programs

COMPILERS = ["planted", *(["nvcc"] if find_nvcc() else [])]


@pytest.fixture(scope="module")
def ops():
    return native.ops()


def environment(compiler, folder):
    """Return a process's environment in which a compiler is found; the planted one is written into a folder."""
    if compiler == "nvcc":
        return dict(os.environ)
    planted = folder / "bin" / "nvcc"
    planted.parent.mkdir()
    planted.write_text(f"#!{sys.executable}\n{Path(planted_nvcc.__file__).read_text()}")
    planted.chmod(0o755)
    return {**os.environ, "CUDA_HOME": str(folder)}


def ran(words, folder, own):
    done = subprocess.run([sys.executable, *words], cwd=folder, env=own, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("compiler", COMPILERS)
def test_the_built_ops_pass_the_exported_tests(ops, compiler, tmp_path):
    """Schemas, refusals of tensors on the CPU and fakes of the built library; its numbers need a GPU."""
    listed = ops if compiler == "planted" else ops[1:2]
    write_folder(native.files(listed), tmp_path / "repository", force=False)
    own = environment(compiler, tmp_path)
    own.pop("PYTHONPATH", None)  # the repository needs torch alone
    printed = ran(["build.py"], tmp_path / "repository", own)
    (variant,) = (tmp_path / "repository" / "build").glob("torch-stable-abi210-cu*")
    assert variant.name in printed
    shown = ran(["-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", ".", "tests"], tmp_path / "repository", own)
    assert f"{3 * len(listed)} passed" in shown, shown


def test_each_file_is_compiled_for_its_architectures(ops, tmp_path):
    write_folder(native.files(ops), tmp_path / "repository", force=False)
    own = environment("planted", tmp_path)
    ran(["build.py"], tmp_path / "repository", {**own, "CUDA_ARCHS": "8.0 90"})
    commands = (tmp_path / "bin" / "commands.txt").read_text().splitlines()
    by_file = {Path(line.partition(" -c ")[2].split()[0]).name: line for line in commands if " -c " in line}
    assert "code=sm_90a" in by_file["gate_up.cu"]
    assert "sm_80" not in by_file["gate_up.cu"]
    for file in by_file.keys() - {"gate_up.cu"}:
        assert all(f"code={code}" in by_file[file] for code in ("sm_80", "sm_90", "compute_90"))
    assert "-cudart static" in commands[-1]


def test_build_toml_names_every_source(ops, tmp_path):
    files = native.files(ops)
    build = tomllib.loads(files["build.toml"].decode())
    assert build["torch"]["stable-abi"] == {"cuda": "2.10"}
    named = {file for section in build["kernel"].values() for file in section["src"]}
    assert named == {file for file in files if file.startswith("csrc/")}
    assert set(build["torch"]["src"]) == {"torch-ext/torch_binding.cpp", "torch-ext/torch_binding.h"} & files.keys()
    alone = build["kernel"]["native_kernels_90a"]
    assert alone["cuda-capabilities"] == ["9.0a"]
    assert [file for file in alone["src"] if file.endswith(".cu")] == ["csrc/gate_up.cu"]
    assert "cuda-capabilities" not in build["kernel"]["native_kernels"]


def test_kernels_are_shipped_as_rendered_and_launched_as_in_a_package(ops):
    files = native.files(ops)
    for op in ops:
        assert files[f"csrc/{op.rendered.entry}.cuh"].decode().endswith(op.rendered.source)
    for op in ops[:-1]:
        ways = ast.literal_eval(op.launch["launches"])
        for launch, way in zip(launches_of(op, "90"), ways, strict=True):
            text = files[launch.file].decode()
            assert all(f"#define {name} {value}\n" in text for name, value in way["macros"].items())
            assert f"grid({', '.join(map(str, way['grid']))}), block({', '.join(map(str, way['block']))})" in text
            assert f"integers[] = {{{', '.join(map(str, way['integers']))}}}" in text
            assert text.count("&pointers[") == len(op.inputs) + len(op.outputs)
    # 300 x 72 by 2 x 136 x 72, in tiles of 64 columns: the maps of a package's launch
    text = files["csrc/gate_up.cu"].decode()
    assert all(f"{', '.join(map(str, one[:4]))}, " in text for one in ast.literal_eval(ops[-1].launch["maps"]))


def test_what_the_extension_does_not_have_is_named_with_its_reason(ops):
    x = native.meta((1001,), "float32")
    writing = native.chain("gelu_tanh", programs.gelu_tanh((1001,)), [x], [x], (0,), taken=("gelu_tanh",))
    assert "writes into" in why_not(writing)
    files = native.files([*ops, writing])
    assert f"`{writing.name}` (F1): it writes into tensors that it is given" in files["README.md"].decode()
    assert f'library.def("{writing.name}(' not in files["torch-ext/torch_binding.cpp"].decode()
    printed = files["torch-ext/native_kernels/ops.py"].decode()
    assert f"\n{writing.name} = kernel_op(" in printed
    assert f"\n{ops[0].name} = extension_op(" in printed


def test_without_cuda_kernels_there_is_no_extension():
    x = native.meta((1001,), "float32")
    triton = native.chain("gelu_tanh", programs.gelu_tanh((1001,)), [x], [x], language="triton")
    files = native.files([triton])
    assert "[torch-noarch]" in files["build.toml"].decode()
    assert not any(file.startswith("csrc") or file == "build.py" or file.endswith("_extension.py") for file in files)


def test_linears_in_cuda_become_functions_and_others_stay_with_a_sentence():
    forms = {"G1": "cuda_wgmma", "G2": "cuda_fma", "G3": "cuda_cublas", "G4": "triton_dot"}
    linears = [
        BuiltLinear(id=name, sites=(), source=SimpleNamespace(config=SimpleNamespace(form=form))) for name, form in forms.items()
    ]
    linears.append(BuiltLinear(id="G5", sites=()))
    assert [one.id for one in in_cuda(linears)] == ["G1", "G2"]
    rows = [SimpleNamespace(id=one.id, kernel="gate_up") for one in linears]
    saved = SimpleNamespace(linears=rows, sums=(), rewrites={})
    said = other_rewrites(saved, {"G1", "G2"})
    assert [line.split()[0] for line in said] == ["G3", "G4", "G5"]
    assert all("linear layer is not exported" in line for line in said)


def plan_with_a_gate(together_backend="cuda"):
    """Return a plan with one kernel of a linear, and what is left of a run when it is put together again."""
    problem = native.PROBLEM
    source = LinearSource(problem=problem, config=GATED_TILES[0], header=native.header("gate_up"))
    shapes = [(2, problem.m // 2, shape[1]) if name in ("x", "out") else shape for name, shape in problem.operands]
    ops = [SimpleNamespace(outputs=(native.meta(shape, problem.dtype),)) for shape in shapes]
    site = SimpleNamespace(inputs=(0, 1), outputs=(2,), call=object())
    linear = BuiltLinear(id="G1", sites=(site, site), source=source)
    written = SimpleNamespace(restored=0)
    written.restore = lambda: setattr(written, "restored", written.restored + 1)
    restored = SimpleNamespace(live=SimpleNamespace(written=written), bench=SimpleNamespace(ops=ops), linears=[linear])
    rows = (SimpleNamespace(id="G1", kernel="gate_up", rendered=(SimpleNamespace(backend=together_backend),)),)
    return SimpleNamespace(linears=rows), restored


def test_a_plans_gate_is_an_op_after_those_of_chains(ops):
    saved, restored = plan_with_a_gate()
    found, why = linear_functions(None, saved, ops, together=lambda *_: restored)
    assert [op.fusion_id for op in found] == ["G1"]
    assert found[0].name == "gate_up_2"  # a chain's op has the name already
    assert found[0].launch == ops[-1].launch
    assert why == ()
    assert restored.live.written.restored == 1


def test_a_plan_that_no_longer_fits_costs_the_linears_alone(ops):
    def refuse(*_):
        raise PlanMismatch(run="a run", detail="gate_up: its numbers no longer pass")

    found, why = linear_functions(None, plan_with_a_gate()[0], ops, together=refuse)
    assert found == ()
    assert "its numbers no longer pass" in why[0]


def test_without_linears_in_cuda_the_model_is_not_captured_again(ops):
    assert linear_functions(None, plan_with_a_gate("triton")[0], ops, together=pytest.fail) == ((), ())
