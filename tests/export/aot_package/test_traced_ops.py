"""Triton kernels in a compiled model: torch.export sees ops, and Inductor is given the kernels with their own launches."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from fusion_advisor.codegen.common.interface import Header
from fusion_advisor.codegen.gemm.problem import GemvConfig, GemvProblem
from fusion_advisor.export.aot_package.op_source import in_library, traced_ops
from fusion_advisor.export.kernel_files.files import rendered
from fusion_advisor.export.linear_ops import linear_op
from fusion_advisor.export.package import files_of_ops
from fusion_advisor.export.printed import ops_listed
from fusion_advisor.files.whole_folder import write_folder
from fusion_advisor.fuse.decide.session import LinearSource
from tests.export.extension import native
from tests.export.test_other_rewrites import meta

SCRIPT = Path(__file__).with_name("trace_ops.py")
NORMED = GemvProblem(m=1, n=24, k=64, dtype="float32", has_norm=True, has_residual=True)
GATED = GemvProblem(m=3, n=40, k=32, dtype="float16", has_bias=True, is_gated=True)
FMA = GemvConfig(form="triton_fma", rows=16, warps=2, block_k=32, stages=2)
DOT = GemvConfig(form="triton_dot", rows=16, warps=8, block_k=32, stages=2)


def op_of(problem, config, taken=()):
    source = LinearSource(problem=problem, config=config, header=Header(title="linear", summary="one", origin="generated"))
    return linear_op(source, "G1", [meta(shape, problem.dtype) for _, shape in problem.operands], taken)


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """Two linears of other sizes, and what a trace shows of them."""
    folder, name = tmp_path_factory.mktemp("traced"), "seen_ops"
    first = op_of(NORMED, FMA)
    ops = [first, op_of(GATED, DOT, {first.name})]
    listed = {**ops_listed(ops), "name": name, "device": "cpu"}
    files = files_of_ops(ops, name, "cpu") | {
        f"{name}/ops.py": rendered("export/ops.py", traced_ops(listed, ops)),
        f"{name}/_compiled.py": rendered("export/pt2/_compiled.py", listed),
    }
    write_folder(files, folder / "out", force=False)
    command = [sys.executable, str(SCRIPT), str(folder / "out"), name]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    return ops, json.loads(done.stdout.splitlines()[-1])


def test_torch_export_sees_an_op_for_each_kernel(traced):
    ops, found = traced
    assert found["seen"] == [f"seen_ops.{op.name}.default" for op in ops]
    assert in_library(ops) == ()  # no C++ library is built for them


def test_inductor_is_given_the_kernels_themselves(traced):
    ops, found = traced
    assert not [target for target in found["lowered"] if target.startswith("seen_ops.")]
    assert [one["name"] for one in found["kernels"]] == [op.rendered.entry for op in ops]
    for one, op in zip(found["kernels"], ops, strict=True):
        assert {name for name, _ in (*op.inputs, *op.outputs)} < set(one["given"])
        assert not {"enable_fp_fusion", "num_warps"} & set(one["given"])  # no arguments of the kernel


def test_launches_are_of_the_run(traced):
    """Blocks of 16 rows of the weight, and as many warps as were chosen."""
    _, found = traced
    assert [one["grid"] for one in found["kernels"]] == [[[2, 1, 1]], [[3, 1, 1]]]
    assert [one["configs"][0][0] for one in found["kernels"]] == [2, 8]


def test_cuda_kernels_stay_calls_of_ops_beside_triton_kernels():
    """The trace launches them through NVRTC; the compiled model calls the op library's."""
    gelu, gated = native.ops()[0], native.gated()
    ops = [gelu, op_of(NORMED, FMA), gated]
    listed = traced_ops({**ops_listed(ops), "name": "mixed_ops", "device": "cuda"}, ops)
    assert in_library(ops) == (gelu, gated)
    assert [row.get("register", "kernel_op") for row in listed["ops"]] == ["kernel_op", "traced_op", "kernel_op"]
    source = rendered("export/ops.py", listed).decode()
    imports = {name.name for node in ast.parse(source).body if isinstance(node, ast.ImportFrom) for name in node.names}
    assert {"cuda_launcher", "tensor_map_launcher", "traced_launcher", "traced_op", "kernel_op"} <= imports
