"""Compilers are started before torch is imported, serve the GPU that is named later, and have loaded what they need by then."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fusion_advisor.autotune.build_ahead import BuildAhead
from fusion_advisor.autotune.start_compilers import building_ahead, started_early
from tests.autotune.test_build_ahead import entries, jobs

HERE = Path(__file__)
ROOT = HERE.parents[2]


@pytest.fixture
def caches(tmp_path, monkeypatch):
    """Empty caches of the compilers."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    return tmp_path


@pytest.mark.parametrize(
    ("device", "driver", "visible"),
    [("cpu", HERE, "0"), ("auto", HERE / "gone", "0"), ("cuda:1", HERE, ""), ("auto", HERE, "-1")],
)
def test_nothing_is_started_without_a_gpu(monkeypatch, device, driver, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with started_early(device, driver=driver) as ahead:
        assert ahead is None


def test_processes_serve_a_gpu_that_is_named_later_and_end_with_the_command(caches, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    said: list[str] = []
    with started_early("auto", driver=HERE) as early:
        assert early is not None
        with building_ahead("cuda:0", said.append, early, arch_of=lambda _: 80) as ahead:
            assert ahead is early
            ahead.submit(asked := jobs()[:1])
            ahead.wait(asked)
        assert early.is_over
    assert any("sm_80" in path.read_text() for path in (caches / "triton").rglob("*.ptx"))
    assert not said


def test_others_are_started_where_the_first_have_ended(caches):
    early = BuildAhead(processes=1)
    early.close()
    with building_ahead("cuda:0", lambda _: None, early, arch_of=lambda _: 90) as ahead:
        assert ahead is not early and not ahead.is_over
        asked = jobs()[:1]
        ahead.submit(asked)
        ahead.wait(asked)
    assert entries(caches / "triton")


def test_an_early_end_is_said_to_whom_it_concerns():
    early = BuildAhead(processes=1)
    early._process.kill()
    early._listener.join(10)
    said: list[str] = []
    early.serve(90, said.append)
    early.close()
    assert len(said) == 1


def test_no_process_is_started_for_a_cpu():
    with building_ahead("cpu", lambda _: None) as ahead:
        assert ahead is None


def test_this_process_digests_its_compiler_meanwhile(caches):
    from triton.runtime.cache import triton_key

    triton_key.cache_clear()
    with building_ahead("cuda:0", lambda _: None, arch_of=lambda _: 90):
        for thread in threading.enumerate():
            if thread.name == "fusion-advisor-digest":
                thread.join(30)
    assert triton_key.cache_info().currsize == 1


_PROGRAM = """
import sys
from fusion_advisor.autotune.build_ahead import Job
from fusion_advisor.autotune.build_worker import compile_job
from fusion_advisor.codegen.common.interface import Header, Tuning
from fusion_advisor.codegen.triton.ahead import load_compiler
from tests.kernel_cases import programs

header = Header(title="gelu", summary="a test", origin="a test")
job = Job(program=programs.gelu_tanh((1000,)), header=header, backend="triton", tuning=Tuning(), fast_math=False)
load_compiler()
from triton.runtime.cache import triton_key
print(triton_key.cache_info().misses)
before = set(sys.modules)
try:
    compile_job(job, 90)
except AssertionError:  # a version of Triton that builds a launcher asks for CUDA's library
    pass
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
"""


def test_a_compiler_has_nothing_large_left_to_load(tmp_path):
    environment = {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True, env=environment)
    digests, new = done.stdout.splitlines()
    assert not {"torch", "numpy", "jinja2", "fusion_advisor"} & set(new.split())
    assert digests == "1"
    assert any(tmp_path.rglob("*.ptx"))
