"""A C++ kernel that crashes, ends its process or never ends is refused, and neither the process nor the run is lost."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch

import fusion_advisor
from fusion_advisor.capture.graph.side_effects import Written
from fusion_advisor.codegen.common.interface import Header, KernelCrashed, Tuning
from fusion_advisor.codegen.cpp import first_run
from fusion_advisor.codegen.cpp.backend import CppBackend
from fusion_advisor.errors import KernelFaulted
from fusion_advisor.fuse.decide.instruments import Instruments
from fusion_advisor.fuse.pipeline import apply_workload
from fusion_advisor.fuse.plan.options import ApplyOptions, Budgets
from fusion_advisor.fuse.rewrite.first_call import call_in_child
from fusion_advisor.records import Status
from fusion_advisor.verify.check_chain import layout_of
from tests.fuse.test_pipeline import Model, loaded  # noqa: F401  (a fixture)
from tests.kernel_cases.lowered import lower_function
from tests.tiny import BANDWIDTH

pytestmark = pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler")
HEADER = Header(title="case", summary="a test", origin="a test")
BEGIN = "int threads) {\n"
"""Where the statements of the entry point start."""
FAULTS = {
    "writes to address 8": ("*(volatile int *)8 = 1;", "crashed (SIGSEGV)"),
    "aborts": ("abort();", "crashed (SIGABRT)"),
    "divides by zero": ("volatile int zero = 0, seven = 7; seven = seven / zero;", "crashed (SIGFPE)"),
    "loops for ever": ("for (volatile int on = 1; on;) {}", "did not end within 2 s"),
    "ends the process": ("exit(3);", "ended its process with exit status 3"),
    "reads past the end": ("volatile float last = x[n];", "crashed (SIGSEGV)"),
    "writes before the start": ("((volatile char *)out)[-4096] = 1;", "crashed (SIGSEGV)"),
}
DECLARED = 'extern "C" void abort();\nextern "C" void exit(int);\n'


@pytest.fixture(autouse=True)
def _cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def spoilt(rendered, statement):
    """A kernel that does something else ahead of its work."""
    assert BEGIN in rendered.source
    start = 'extern "C" void fa_'
    source = rendered.source.replace(start, DECLARED + start, 1).replace(BEGIN, f"{BEGIN}  {statement}\n", 1)
    return replace(rendered, source=source)


def lowered(x):
    return lower_function(lambda x: torch.sigmoid(x) * x, x)[0].program


def call(kernel, x):
    call_in_child(kernel, lowered(x), [x], [layout_of(x)], [layout_of(x)])


def built(tmp_path, x, statement=""):
    rendered = CppBackend().render(lowered(x), HEADER, tuning=Tuning(), fast_math=False)
    return CppBackend().build(spoilt(rendered, statement) if statement else rendered, tmp_path / "kernel.cpp")


@pytest.mark.parametrize("name", FAULTS)
def test_a_kernel_that_ends_its_process_is_refused_with_the_reason(name, tmp_path, monkeypatch):
    statement, reason = FAULTS[name]
    monkeypatch.setattr(first_run, "LEAST_S", 2.0)
    x = torch.randn(1000)
    with pytest.raises(KernelCrashed) as refusal:
        call(built(tmp_path, x, statement), x)
    assert f"{reason} while it was checked" in str(refusal.value)
    assert not list((tmp_path / "cache").rglob("*.ran"))


def test_a_right_kernel_runs_in_a_child_once_for_each_size_and_changes_nothing(tmp_path):
    x = torch.randn(1000)
    kernel, before = built(tmp_path, x), x.clone()

    def ran():
        """What each child left behind, and when: a second child would write it again."""
        return {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.ran")}

    call(kernel, x)
    first = ran()
    for given in (x, x[:7].clone(), x[:0]):
        call(kernel, given)
    both = ran()
    assert len(first) == 1 and len(both) == 2 and first.items() <= both.items() and torch.equal(x, before)
    call(built(tmp_path, x), x)  # the same library, loaded from the cache
    assert ran() == both


def test_large_and_strided_tensors_run_with_their_own_sizes(tmp_path, monkeypatch):
    monkeypatch.setattr(first_run, "_MOST_COPIED_BYTES", 4096)
    wide = torch.randn(300, 40).t()
    call(built(tmp_path, wide), wide)
    assert len(list((tmp_path / "cache").rglob("*.ran"))) == 1


def test_a_child_that_cannot_start_refuses_nothing_and_is_said(tmp_path, monkeypatch, caplog):
    x = torch.randn(10)
    kernel = built(tmp_path, x)
    monkeypatch.setattr(first_run, "_MAIN", tmp_path / "missing.py")
    call(kernel, x)
    assert "runs without a first run" in caplog.text


QUICK = {
    "warmup": 1, "runs": 2, "min_share": 0.0, "keep": "verified", "compile": False, "bandwidth": BANDWIDTH,
    "budgets": Budgets(wall_s=0.02),
}  # fmt: skip


def test_the_run_goes_on_without_a_kernel_that_crashes(monkeypatch):
    real = CppBackend.render

    def render(self, program, header, **options):
        rendered = real(self, program, header, **options)
        return spoilt(rendered, "*(volatile int *)8 = 1;") if header.title == "gelu_tanh" else rendered

    monkeypatch.setattr(CppBackend, "render", render)
    torch.manual_seed(0)
    model, x = Model().eval(), torch.randn(2, 48, 64)
    expected = model(x)
    with torch.no_grad(), fusion_advisor.apply(model, x, **QUICK) as fused:
        rows = {row.kernel: row for row in fused.report.fusions}
        assert rows["gelu_tanh"].status is Status.BUILD_FAILED
        assert "crashed (SIGSEGV) while it was checked" in rows["gelu_tanh"].reason
        assert [row.status for name, row in rows.items() if name != "gelu_tanh"] == [Status.KEPT]
        torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)


def test_starting_a_child_costs_little(tmp_path):
    """No bound of the clock's: the child imports neither torch nor numpy, which would take a second."""
    source = first_run._MAIN.read_text()
    imported = [line.split()[1].partition(".")[0] for line in source.splitlines() if line.startswith(("import ", "from "))]
    assert set(imported) <= {"__future__", "ctypes", "json", "mmap", "os", "resource", "sys", "typing"}


def test_a_fault_on_a_gpu_ends_the_run_with_a_report_that_names_the_kernel(loaded, monkeypatch):  # noqa: F811
    """torch's error stands in for the GPU's; putting the model's state back fails too, as it does in a context that is lost."""
    fault = torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nmore words")
    lost = []

    def faulty(*_, **__):
        lost.append(1)
        raise fault

    def restore(self):
        if lost:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(Written, "restore", restore)
    reports = []
    options = ApplyOptions(**{**QUICK, "keep": "paying", "only": ("gelu_tanh",)})
    instruments = Instruments(compare_alone=faulty)
    with pytest.raises(
        KernelFaulted, match=r"(?m)gelu_tanh faulted on the GPU.*illegal memory access was encountered$"
    ) as refusal:
        apply_workload(loaded, options, on_report=reports.append, instruments=instruments)
    assert refusal.value.__cause__ is fault
    assert [row.status for row in reports[-1].fusions if row.kernel == "gelu_tanh"] == [Status.BUILD_FAILED]
