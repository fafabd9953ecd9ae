"""What the command that runs compute-sanitizer makes of its output, and the faults that it plants; the tools need a GPU."""

from __future__ import annotations

import subprocess

import pytest

from fusion_advisor.codegen.cuda.nvrtc import find_nvcc
from fusion_advisor.library.discover import list_kernels
from tools import sanitize, sanitize_cuda

CLEAN = "========= ERROR SUMMARY: 0 errors"
THEIRS = """========= Uninitialized __global__ memory read of size 4 bytes
=========     at void at::native::vectorized_elementwise_kernel<4>(int)+0x70
========= ERROR SUMMARY: 1 error"""
OURS = """========= Uninitialized __global__ memory read of size 4 bytes
=========     at fa_rmsnorm_ab12cd+0x70 in kernel.cu:12
========= ERROR SUMMARY: 1 error"""
SPECS = {spec.name: spec for spec in list_kernels()}


def judged(tool, output, code, *, failed=(), is_complete=True):
    return sanitize_cuda.judged(tool, ["rmsnorm"], output, code, 7, failed, is_complete=is_complete)


@pytest.mark.parametrize("tool", ["memcheck", "initcheck", "synccheck"])
def test_a_silent_tool_and_right_cases_are_clean(tool):
    assert judged(tool, CLEAN, 0).is_clean
    assert not judged(tool, CLEAN, 0, failed=["cuda R=1: off"]).is_clean
    assert not judged(tool, CLEAN, 0, is_complete=False).is_clean
    assert not judged(tool, "", 0).is_clean
    assert not judged(tool, "not finished in 500 s", 124).is_clean


@pytest.mark.parametrize(
    ("tool", "summary"),
    [
        ("memcheck", "========= ERROR SUMMARY: 3 errors"),
        ("synccheck", "========= ERROR SUMMARY: 1 error"),
        ("racecheck", "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)"),
    ],
)
def test_what_a_tool_finds_is_not_clean(tool, summary):
    assert not judged(tool, summary, sanitize_cuda.FAULT).is_clean


def test_racecheck_ends_in_a_line_of_its_own():
    assert judged("racecheck", "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", 0).is_clean


def test_initcheck_counts_reads_of_our_kernels_alone():
    assert judged("initcheck", THEIRS, sanitize_cuda.FAULT).is_clean
    assert not judged("initcheck", f"{THEIRS}\n{OURS}", sanitize_cuda.FAULT).is_clean
    assert "fa_rmsnorm" in judged("initcheck", OURS + "\n" * 5000, sanitize_cuda.FAULT).output


def test_a_record_counts_processes_and_faults_that_were_not_seen():
    verdicts = [judged("memcheck", CLEAN, 0), judged("memcheck", "========= ERROR SUMMARY: 3 errors", sanitize_cuda.FAULT)]
    record = sanitize_cuda.summed(verdicts, ["synccheck"], ["rmsnorm"], 3.0)
    assert (record["tried"], record["kernels"], record["planted"], record["failed"]) == (14, 1, 4, 2)
    assert record["details"][0] == "planted and not seen: synccheck"
    assert sanitize_cuda.summed(verdicts[:1], [], ["rmsnorm"], 3.0)["failed"] == 0


@pytest.mark.parametrize("name", SPECS)
def test_every_manifest_has_small_cases(name):
    spec = sanitize_cuda.small(SPECS[name], ("bfloat16",))
    assert spec.check and all(case.dtypes for case in spec.check)
    assert {str(case) for case in spec.check} <= {str(case) for case in SPECS[name].check}


def test_rows_wider_than_the_registers_are_among_the_small_cases():
    assert "R=2 C=20000" in {str(case) for case in sanitize_cuda.small(SPECS["add_rmsnorm"], ("bfloat16",)).check}


def test_each_tool_has_a_fault_of_its_own():
    assert all(f"fa_planted_{tool}(" in sanitize_cuda.PLANTED for tool in sanitize_cuda.TOOLS)


@pytest.mark.skipif(find_nvcc() is None, reason="compiles CUDA C++ with nvcc")
def test_the_planted_faults_compile(tmp_path):
    (tmp_path / "planted.cu").write_text(sanitize_cuda.PLANTED)
    command = [str(find_nvcc()), "-arch=sm_90", "-cubin", "-o", str(tmp_path / "planted.cubin"), str(tmp_path / "planted.cu")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_machine_without_a_gpu_says_so(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert sanitize.main(["cuda"]) == 2
    assert "no CUDA device" in capsys.readouterr().err
