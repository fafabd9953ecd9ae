"""A compiled package loads and runs without tracing, and comes as near to the model as the fused model does."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fusion_advisor.errors import CannotExport
from fusion_advisor.export.aot_package.op_source import refuse_python_launches
from fusion_advisor.export.aot_package.traced import NamedCall, named_tensors
from fusion_advisor.export.aot_package.write_pt2 import op_library_files, pt2_context, why_it_failed
from fusion_advisor.export.kernel_files.files import rendered
from fusion_advisor.files.whole_folder import write_folder
from fusion_advisor.records.serialize import read_report
from fusion_advisor.runtime.torch_internals.inductor import compile_and_package
from tests.export import models
from tests.export.extension import native
from tests.export.extension.test_extension import COMPILERS, environment

SCRIPT = Path(__file__).with_name("compiled_here.py")


def run_alone(folder, results, *how):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-I", str(SCRIPT), str(folder), str(results), *how], capture_output=True, text=True, check=False,
        env=environment, cwd=folder.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return torch.load(results, weights_only=True)


def difference(one, other):
    return ((one.double() - other.double()).norm() / other.double().norm()).item()


@pytest.mark.slow  # AOTInductor compiles for half a minute
@pytest.mark.parametrize("make", [models.gpt2, models.llama, models.bert])
def test_a_compiled_package_comes_as_near_to_float64_as_eager(make, tmp_path):
    model, inputs, fused = models.fused(make)
    with torch.no_grad():
        outputs = named_tensors(fused(**inputs))
    assert fused.export(tmp_path / "compiled", format="pt2") == ()
    fused.revert()
    found = run_alone(tmp_path / "compiled", tmp_path / "results.pt")
    with torch.no_grad():
        eager, truth = named_tensors(model(**inputs)), named_tensors(model.double()(**inputs))
    assert list(found) == list(outputs)
    is_equal = all(torch.equal(found[name], value) for name, value in outputs.items())
    assert ("has the fused model's bits" in (tmp_path / "compiled" / "README.md").read_text().replace("have", "has")) == is_equal
    for name, value in truth.items():
        assert difference(found[name], value) <= 2 * difference(eager[name], value) + 1e-7


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_a_compiled_package_on_a_gpu(backend, tmp_path):
    """CUDA C++ kernels are in the op library, Triton's in the model."""

    def on_gpu():
        model, inputs = models.llama()
        return model.cuda().bfloat16(), {
            name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()
        }

    model, inputs, fused = models.fused(on_gpu, backend=backend, graph=False, skip=("cuda-graph",))
    with torch.no_grad():
        outputs = named_tensors(fused(**inputs))
    fused.export(tmp_path / "compiled", format="pt2")
    fused.revert()
    assert (tmp_path / "compiled" / "libcompiled_ops.so").is_file() == (backend == "cuda")
    found = run_alone(tmp_path / "compiled", tmp_path / "results.pt")
    replayed = run_alone(tmp_path / "compiled", tmp_path / "replayed.pt", "graph")
    assert all(torch.equal(replayed[name], value) for name, value in found.items())
    with torch.no_grad():
        eager, truth = named_tensors(model(**inputs)), named_tensors(model.double()(**inputs))
    assert list(found) == list(outputs)
    for name, value in truth.items():
        assert difference(found[name], value) <= 2 * difference(eager[name], value) + 1e-7


@pytest.mark.slow  # half a minute of a C++ compiler
def test_a_package_for_a_gpu_loads_without_asking_a_compiler(tmp_path, caplog):
    """Its code on the host has no vector instructions, and torch would compile programs at every start to know the CPU's."""
    from torch._inductor import cpu_vec_isa

    x, built, lists = torch.randn(4, 4), [], cpu_vec_isa.valid_vec_isa_list
    compile_and_package(
        torch.export.export(NamedCall(torch.nn.Tanh(), {}), (), {"input": x}), tmp_path / "model.pt2", is_on_gpu=True
    )
    context = {"device": "cuda", "library_file": "", "tensors": [("input", (4, 4), (4, 1), "float32")]}
    (tmp_path / "run.py").write_bytes(rendered("export/pt2/run.py", context))
    spec = importlib.util.spec_from_file_location("run_for_a_gpu", tmp_path / "run.py")
    run = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(run)
    lists.cache_clear()
    cpu_vec_isa.VecISA._VecISA__bool__impl.cache_clear()  # an earlier test may have asked
    asked = cpu_vec_isa.VecISA.check_build.__code__
    sys.setprofile(lambda frame, event, _: built.append(event) if event == "call" and frame.f_code is asked else None)
    try:
        call = run.load()
    finally:
        sys.setprofile(None)
    assert not built
    assert "mismatch" not in caplog.text
    assert lists.cache_info().currsize == 0
    torch.testing.assert_close(call(input=x)["0"], x.tanh())


@dataclass
class Found:
    """What a model returns."""

    best: torch.Tensor
    rest: tuple[object, ...] = ()


def test_tensors_inside_of_an_output_have_names():
    """None of them is missing from a compiled package: it returns what these names are of."""
    one, two, three = torch.ones(1), torch.ones(2), torch.ones(3)
    assert named_tensors(one) == {"0": one}
    assert named_tensors((one, None, [two, {"x": three}])) == {"0": one, "2.0": two, "2.1.x": three}
    assert named_tensors({"logits": one, "hidden": (two, three), "count": 3}) == {
        "logits": one, "hidden.0": two, "hidden.1": three,
    }  # fmt: skip
    assert named_tensors(Found(one, (two, "text"))) == {"best": one, "rest.0": two}


class Small(torch.nn.Module):
    """A chain between two linear layers, with two results."""

    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)

    def forward(self, x):
        """Compute."""
        hidden = self.up(x)
        return self.down(torch.nn.functional.gelu(hidden * 1.5)), hidden


def test_a_small_model_twice(tmp_path):
    """The second export in one process finds the ops' namespace free again."""
    torch.manual_seed(0)
    model, x = Small().eval(), torch.randn(16, 32)
    _, _, fused = models.fused(lambda: (model, {"x": x}))
    with torch.no_grad():
        outputs = fused(x=x)
    fused.export(tmp_path / "small", format="pt2")
    assert fused.is_applied
    fused.export(tmp_path / "small", format="pt2", force=True)
    found = run_alone(tmp_path / "small", tmp_path / "results.pt")
    assert list(found) == ["0", "1"]
    for one, other in zip(found.values(), outputs, strict=True):
        assert difference(one, other) <= 1e-6
    assert sorted(path.name for path in (tmp_path / "small").iterdir() if path.name != "__pycache__") == [
        "LICENSE", "README.md", "build.py", "example.pt", "kernels", "libsmall_ops.so", "model.pt2", "ops.cpp", "run.py",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("suffix", "change", "reason"),
    [
        (".cu", {}, ""),
        (".cu", {"in_place": (0,)}, "is a CUDA C\\+\\+ kernel that the op library cannot have: it writes into tensors"),
        (".py", {"file_text": "kernel[grid](x, enable_fp_fusion=False)"}, "is compiled without fused multiply-adds"),
        (".cpp", {"in_place": (0,)}, "writes into its arguments"),
        (".cpp", {"carried": SimpleNamespace(first="x[0]")}, "starts from a state"),
        (".py", {"in_place": (0,)}, ""),
    ],
)
def test_a_kernel_that_cannot_be_compiled_in_is_named(suffix, change, reason):
    backend = {".cu": "cuda", ".py": "triton", ".cpp": "cpp"}[suffix]
    rendered = SimpleNamespace(backend=backend, suffix=suffix, file_text=change.pop("file_text", "enable_fp_fusion=True"))
    op = SimpleNamespace(
        **{
            "name": "gelu_tanh",
            "fusion_id": "F1",
            "rendered": rendered,
            "in_place": (),
            "carried": None,
            "inputs": ("x",),
            **change,
        }
    )
    if reason:
        with pytest.raises(CannotExport, match=rf"op `gelu_tanh` \(F1\) {reason}"):
            refuse_python_launches([op])
    else:
        refuse_python_launches([op])


@pytest.mark.parametrize("compiler", COMPILERS)
def test_cuda_kernels_are_built_into_the_op_library(compiler, tmp_path):
    """The library defines each op in the namespace that the compiled model calls; a tensor on the CPU is refused by the op."""
    ops = native.ops() if compiler == "planted" else native.ops()[1:2]
    found = SimpleNamespace(ops=ops, left_out=(), values={}, tensors=(), context={"class_name": "Model"})
    context = pt2_context(SimpleNamespace(report=read_report(native.REPORT)), found, "compiled_model")
    write_folder(op_library_files(found, context), tmp_path / "out", force=False)
    own = environment(compiler, tmp_path)
    subprocess.run([sys.executable, "build.py"], cwd=tmp_path / "out", env=own, check=True, capture_output=True)
    assert context["library_file"] == "libcompiled_model_ops.so"
    assert not context["compiled_in"]
    script = (
        "import torch; torch.ops.load_library('libcompiled_model_ops.so')\n"
        f"for name in {[op.name for op in ops]}: print(getattr(torch.ops.compiled_model, name).default._schema)\n"
        "torch.ops.compiled_model.rmsnorm(torch.ones(4, 24).bfloat16(), torch.ones(24).bfloat16())"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path / "out", capture_output=True, text=True, check=False)
    assert done.stdout.count("compiled_model::") == len(ops), done.stderr
    assert "is not on a GPU, and the kernel is CUDA C++" in done.stderr


def test_a_library_of_cuda_kernels_needs_nvcc(tmp_path):
    """Its script says so where there is none."""
    found = SimpleNamespace(ops=native.ops()[1:2], left_out=(), values={}, tensors=(), context={"class_name": "Model"})
    context = pt2_context(SimpleNamespace(report=read_report(native.REPORT)), found, "compiled_model")
    text = op_library_files(found, context)["build.py"].decode().replace("/usr/local/cuda/bin", str(tmp_path))
    (tmp_path / "build.py").write_text(text)
    own = {**os.environ, "PATH": str(tmp_path), "CUDA_HOME": "", "CUDA_PATH": ""}
    done = subprocess.run([sys.executable, "build.py"], cwd=tmp_path, env=own, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "nvcc was not found" in done.stderr


def test_a_compiler_that_fails_leaves_nothing(tmp_path, monkeypatch):
    model = Small().eval()
    _, _, fused = models.fused(lambda: (model, {"x": torch.randn(16, 32)}))
    compiler = tmp_path / "cxx"
    compiler.write_text('#!/bin/sh\ncase "$*" in *ops.cpp*) echo \'error: no such header\' >&2; exit 1;; esac\nexec c++ "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(CannotExport, match="its op library does not work"):
        fused.export(tmp_path / "small", format="pt2")
    assert list(tmp_path.iterdir()) == [compiler]
    fused.revert()


@pytest.mark.parametrize(
    ("code", "compiler", "said"),
    [
        (-11, "their-g++", "SIGSEGV ended it; CXX is their-g++: try the compiler of the system, with CXX unset"),
        (-9, "", "SIGKILL ended it"),
        (1, "their-g++", "RuntimeError: no such op"),
        (2, "", "the last line"),
    ],
    ids=["a crash", "a signal", "an exception", "no error"],
)
def test_a_failed_process_is_told_by_its_error_or_its_signal(code, compiler, said, monkeypatch):
    monkeypatch.setenv("CXX", compiler)
    written = {1: "Traceback\n  RuntimeError: no such op\n  x\n", 2: "one\nthe last line\n"}.get(code, "")
    assert why_it_failed(subprocess.CompletedProcess([], code, "", written)) == said
    assert why_it_failed(subprocess.CompletedProcess([], 3, "", "")) == "exit status 3"
