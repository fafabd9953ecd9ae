"""Kernels of recurrences: numbers beside float64 and eager's own error, sizes at the edges, and what they say of themselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fusion_advisor.codegen.common.interface import KernelBuildFailed
from fusion_advisor.codegen.recurrence.cpp import CppRecurrences
from fusion_advisor.codegen.recurrence.triton import TritonRecurrences, compile_for
from fusion_advisor.fuse.stages.scan_kernels import HEADER
from tests.kernel_cases import recurrences as cases

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("name", cases.CASES)
def test_cpp_is_as_near_to_float64_as_the_ops_one_by_one(name):
    assert cases.complaint(CppRecurrences(), name) == ""


def test_triton_is_as_near_to_float64_as_the_ops_one_by_one():
    program = [sys.executable, "-m", "tests.kernel_cases.recurrences"]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False, timeout=500)
    assert done.stdout.splitlines() == [f"{name} → " for name in cases.CASES], done.stderr[-2000:]


@pytest.mark.parametrize("name", ["mamba", "average", "gated"])
def test_one_step_and_no_step_are_the_start_of_all(name):
    function, inputs = cases.CASES[name]
    rows, *_ = cases.outputs_of(CppRecurrences(), function, inputs)
    first, *state = cases.outputs_of(CppRecurrences(), function, inputs, steps=1)
    along = {"mamba": -1, "average": 1, "gated": 0}[name]
    assert torch.equal(first.select(along, 0), rows.select(along, 0))
    assert first.select(along, 1).isnan().all()
    none, *before = cases.outputs_of(CppRecurrences(), function, inputs, steps=0)
    assert none.isnan().all()
    if name == "gated":
        assert torch.equal(before[0], inputs[2]) and not torch.equal(state[0], inputs[2])


@pytest.mark.parametrize("name", ["mamba", "mamba bf16", "average", "gated fp16"])
def test_triton_compiles_for_a_gpu_that_is_not_here(name):
    (site,) = cases.folded(*cases.CASES[name]).found
    rendered = TritonRecurrences().render(site.recurrence, HEADER)
    assert compile_for(site.recurrence, rendered, 90).startswith(b"\x7fELF")


def test_a_state_too_wide_for_registers_is_refused():
    (site,) = cases.folded(cases.mamba, cases.mamba_inputs(1, 2, 9, 300, torch.float32)).found
    with pytest.raises(KernelBuildFailed, match="300 columns"):
        TritonRecurrences().render(site.recurrence, HEADER)


@pytest.mark.parametrize("maker", [CppRecurrences(), TritonRecurrences()])
def test_the_head_comment_says_what_is_moved(maker):
    (site,) = cases.folded(*cases.CASES["mamba"]).found
    text = " ".join(maker.render(site.recurrence, HEADER).source.replace("//", "").replace("#", "").split())
    # delta, value and rows 2 x 7 x 13; source and read 2 x 13 x 5; decay 7 x 5; the state 2 x 7 x 5, read and written.
    moved = 4 * (3 * 2 * 7 * 13 + 2 * 2 * 13 * 5 + 7 * 5 + 2 * 2 * 7 * 5)
    assert f"Moves {moved:,} bytes at 13 x 2 x 7 x 5" in text
    assert "would read and write it 13 times" in text
