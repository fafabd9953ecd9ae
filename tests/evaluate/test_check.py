"""``kernels check``: what it finds, and that it finds it."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch

from fusion_advisor.codegen.cpp import backend
from fusion_advisor.codegen.triton.backend import TritonBackend
from fusion_advisor.content import content_dir
from fusion_advisor.evaluate import check, check_inputs
from fusion_advisor.library.discover import BadReference, load_kernel, scaffold
from fusion_advisor.library.spec import Case

needs_compiler = pytest.mark.skipif(backend.find_compiler() is None, reason="compiles C++, and there is no compiler")


class Steps:
    def __init__(self):
        self.said = []

    def step(self, done, total, text):
        self.said.append((done, total, text))


@pytest.fixture
def squash(tmp_path):
    """A kernel of a user's own, as `kernels new` writes it."""
    scaffold("squash", tmp_path)
    return tmp_path


def edit(file, old, new):
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new), encoding="utf-8")


def run(directory, *backends):
    return check.check_kernel("squash", Steps(), kernel_dirs=[directory], backends=backends)


@needs_compiler
def test_a_new_kernel_passes_at_once(squash):
    steps = Steps()
    rows = check.check_kernel("squash", steps, kernel_dirs=[squash], backends=["cpp"])
    assert [row.result for row in rows] == ["passed"] * 7
    assert rows[1].case == "R=7 C=129" and rows[1].backend == "cpp" and rows[1].dtype == "float32"
    assert "eager" in rows[1].detail
    assert steps.said[-1] == (5, 6, "R=1 C=1 bfloat16")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine with no CUDA device")
def test_triton_is_interpreted_where_there_is_no_device(squash):
    rows = [row for row in run(squash, "triton") if row.backend == "triton"]
    assert [row.result for row in rows] == ["passed"] * 6
    assert all("in Triton's interpreter; compiles for sm_90" in row.detail for row in rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine with no CUDA device")
def test_cuda_that_was_not_run_has_not_passed(squash):
    rows = [row for row in run(squash, "cuda") if row.backend == "cuda"]
    assert {row.result for row in rows} == {"skipped"}


@needs_compiler
def test_wrong_arithmetic_fails(squash, monkeypatch):
    render = backend.CppBackend.render

    def wrong(self, *args, **kwargs):
        rendered = render(self, *args, **kwargs)
        return replace(rendered, source=rendered.source.replace("1.0f / std::sqrt", "1.001f / std::sqrt"))

    monkeypatch.setattr(backend.CppBackend, "render", wrong)
    rows = run(squash, "cpp")[1:]
    assert {row.result for row in rows if row.dtype == "float32"} == {"failed"}
    assert "normal inputs: relative error" in rows[0].detail


@needs_compiler
def test_a_missing_store_fails(squash, monkeypatch):
    monkeypatch.setattr(backend.CppKernel, "bind", lambda self, program: lambda *tensors: None)
    assert {row.result for row in run(squash, "cpp")[1:]} == {"failed"}


def test_source_that_does_not_compile_fails(squash, monkeypatch):
    render = TritonBackend.render

    def wrong(self, *args, **kwargs):
        rendered = render(self, *args, **kwargs)
        return replace(rendered, source=rendered.source.replace("tl.store", "tl.stoer"))

    monkeypatch.setattr(TritonBackend, "render", wrong)
    rows = [row for row in run(squash, "triton") if row.backend == "triton"]
    assert {row.result for row in rows} == {"failed"}
    assert "stoer" in rows[0].detail


def test_two_kernels_that_compute_the_same_are_told(tmp_path):
    shutil.copytree(content_dir("kernels") / "rmsnorm", tmp_path / "twin")
    edit(tmp_path / "twin/kernel.toml", 'name = "rmsnorm"', 'name = "twin"')
    rows = check.check_kernel("twin", Steps(), kernel_dirs=[tmp_path], backends=[])
    assert {row.result for row in rows} == {"failed"}
    assert "the kernel `rmsnorm` computes the same" in rows[0].detail


def test_a_constant_that_nothing_uses_is_told(squash):
    edit(squash / "squash/kernel.toml", "eps = 1e-6", "eps = 1e-6\nslope = 0.1")
    row = run(squash)[0]
    assert row.result == "failed"
    assert "slope of the manifest occurs nowhere" in row.detail


def test_a_reference_that_is_no_kernel_says_why(squash):
    edit(
        squash / "squash/reference.py", "torch.sigmoid(wide * scale * weight.float())", "torch.sort(wide * scale * weight).values"
    )
    rows = run(squash, "cpp")
    assert {row.result for row in rows} == {"failed"}
    assert rows[0].detail.startswith("FA60")


def test_a_reference_that_stops_is_the_users_mistake(squash):
    edit(squash / "squash/reference.py", "wide = x.float()", "wide = x.flaot()")
    with pytest.raises(BadReference, match="reference_written_out cannot be traced: AttributeError"):
        run(squash, "cpp")


def test_without_a_compiler_rows_are_skipped(squash, monkeypatch):
    monkeypatch.setattr(backend, "find_compiler", lambda: None)
    rows = run(squash, "cpp")[1:]
    assert {row.result for row in rows} == {"skipped"}
    assert "no C++ compiler" in rows[0].detail


def test_inputs_follow_the_manifest():
    spec = load_kernel("rope").spec
    case = Case(sizes=(("B", 2), ("H", 3), ("S", 5), ("D", 16)), dtypes=())
    x, cos, _ = check_inputs.make_inputs(spec, case, "float16", "NaN and Inf")
    assert x.shape == (2, 3, 5, 16) and x.stride() == (240, 16, 48, 1) and x.dtype == torch.float16
    assert int(x.isnan().sum()) == 1 and int(x.isinf().sum()) == 2 and bool(cos.isfinite().all())
    large, *_ = check_inputs.make_inputs(spec, case, "float16", "large")
    assert 1e3 < float(large.abs().max()) <= 1e4
