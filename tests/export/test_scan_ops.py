"""Kernels of recurrences in a package: numbers of their ops, and a whole model whose loop they walk."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fusion_advisor.codegen.recurrence.cpp import CppRecurrences
from fusion_advisor.codegen.recurrence.triton import TritonRecurrences
from fusion_advisor.errors import CannotExport
from fusion_advisor.export.aot_package.op_source import entries, library_ops, refuse_python_launches
from fusion_advisor.export.package import files_of_ops
from fusion_advisor.export.scan_ops import scan_op
from fusion_advisor.files.whole_folder import write_folder
from fusion_advisor.fuse.decide.session import ScanSource
from fusion_advisor.fuse.stages.scan_kernels import HEADER
from fusion_advisor.verify.check_chain import layout_of
from tests.export import models
from tests.kernel_cases import recurrences as cases

NAMES = ("mamba", "mamba fp16, 16 states", "mamba, turned", "average", "gated", "gated fp16")


def op_of(name, maker, taken=()):
    """The op of a loop of the kernels' own tests."""
    (site,) = cases.folded(*cases.CASES[name]).found
    source = ScanSource(site=site, rendered=maker.render(site.recurrence, HEADER))
    metas = [layout_of(node.meta["val"]) for node in (*site.given, *site.outputs)]
    return scan_op(source, "S1", metas, taken)


@pytest.mark.parametrize("maker", [CppRecurrences(), TritonRecurrences()], ids=lambda maker: maker.name)
def test_ops_are_as_near_to_float64_as_the_steps_one_by_one(maker, tmp_path):
    ops = []
    for name in NAMES:
        ops.append(op_of(name, maker, [op.name for op in ops]))
    write_folder(files_of_ops(ops, "some_scans", "cpu"), tmp_path / "some_scans", force=False)
    command = [sys.executable, str(Path(__file__).with_name("run_ops.py")), str(tmp_path / "some_scans"), "some_scans"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout.splitlines()[-1])
    assert list(shown) == [op.name for op in ops]
    assert all(len(shown[op.name]) == len(op.outputs) for op in ops)
    wrong = {name: results for name, results in shown.items() if any(not found <= limit for found, limit in results)}
    assert wrong == {}


def test_a_kernels_file_of_triton_checks_itself(tmp_path):
    op = op_of("gated", TritonRecurrences())
    (tmp_path / op.file).write_text(op.rendered.file_text)
    program = f"import os, runpy; os.environ['TRITON_INTERPRET'] = '1'; runpy.run_path({op.file!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": ok") == 2


class Gated(torch.nn.Module):
    """A recurrence from a state of the call on, whose last state goes out."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(5))

    def forward(self, x, gates, start):
        rows, state = cases.gated(x, gates, start * 2)
        return torch.nn.functional.gelu(rows * self.weight + 1), state


@torch.no_grad()
def test_a_model_with_a_loop_is_a_package(tmp_path, monkeypatch):
    inputs = {"x": cases.normal(50, 2, 5), "gates": cases.normal(50, 2, 5, seed=1), "start": cases.normal(2, 5)}
    model, _, fused = models.fused(lambda: (Gated().eval(), inputs))
    assert [row.kernel for row in fused.report.fusions if row.id == "S1" and row.status == "kept"] == ["recurrence"]
    right = fused(**inputs)
    assert fused.export(tmp_path / "with_a_loop") == ()
    fused.revert()
    monkeypatch.syspath_prepend(tmp_path / "with_a_loop")
    package = importlib.import_module("with_a_loop")
    package.apply(model)
    found = model(**inputs)
    assert package.fallbacks(model) == {}
    assert all(map(torch.equal, found, right))
    program = torch.export.export(model, (), inputs)
    assert any("with_a_loop.recurrence" in str(node.target) for node in program.graph.nodes)
    assert all(map(torch.equal, program.module()(**inputs), right))
    assert all(map(torch.equal, torch.compile(model, fullgraph=True, backend="aot_eager")(**inputs), right))
    package.revert(model)


def test_a_compiled_package_takes_loops_that_start_from_zero():
    mamba, gated = op_of("mamba", CppRecurrences()), op_of("gated", CppRecurrences())
    refuse_python_launches([mamba])
    (described,) = library_ops([mamba])
    assert described["operands"] == ["in_1", "in_2", "in_3", "in_4", "in_5", "state", "out_1"]
    assert entries([mamba])[0][1] == 7
    with pytest.raises(CannotExport, match=r"`recurrence` \(S1\) starts from a state"):
        refuse_python_launches([gated])
    with pytest.raises(CannotExport, match=r"`recurrence` \(S1\) is a Triton kernel"):
        refuse_python_launches([op_of("mamba", TritonRecurrences())])
