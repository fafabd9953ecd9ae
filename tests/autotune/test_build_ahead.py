"""Kernels are compiled in other processes under the keys that binding them asks for; an end of those processes is said."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from fusion_advisor.autotune.build_ahead import BuildAhead, Job, LinearJob
from fusion_advisor.autotune.tune import best_tuning, candidates, jobs_of
from fusion_advisor.codegen.common.horizontal_fusion import calls_of
from fusion_advisor.codegen.common.interface import Header, Tuning
from fusion_advisor.codegen.cuda.nvrtc import has_cuda_core
from fusion_advisor.codegen.gemm.cuda import GemvCuda, compile_for
from fusion_advisor.codegen.gemm.problem import GemvProblem
from fusion_advisor.codegen.gemm.problem import candidates as gemv_candidates
from fusion_advisor.codegen.registry import descriptor
from fusion_advisor.codegen.triton.ahead import TargetOnly
from fusion_advisor.codegen.triton.backend import TritonBackend
from fusion_advisor.codegen.triton.direct_launch import compile_options, warmed
from fusion_advisor.codegen.triton.launch import launch_of
from tests.autotune.test_tune import CUDA, FakeGpu
from tests.kernel_cases import programs

HEADER = Header(title="rmsnorm", summary="a test", origin="a test")
PROGRAM = programs.rmsnorm(64, 512, "bfloat16")


@pytest.fixture
def caches(tmp_path, monkeypatch):
    """Empty caches of both compilers."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    return tmp_path


def jobs(backend="triton", program=PROGRAM):
    return [
        Job(program=program, header=HEADER, backend=backend, tuning=tuning, fast_math=False)
        for tuning, _ in candidates(program, backend)
    ]


def entries(folder):
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


@pytest.mark.parametrize(
    "program",
    [PROGRAM, programs.softmax(100, 333), programs.rope(2, 8, 64, 128, "bfloat16"), programs.gelu_tanh((1000,))],
    ids=["rmsnorm", "softmax", "rope", "gelu"],
)
def test_binding_finds_what_was_compiled_ahead(caches, tmp_path, program):
    from triton.runtime import driver

    asked = jobs(program=program)
    with BuildAhead(90, processes=2) as ahead:
        ahead.submit(asked)
        ahead.wait(asked)
    made = entries(caches / "triton")
    assert len(made) >= len(asked)
    before = driver._active
    driver.set_active(TargetOnly(90))
    try:
        for job in asked:
            rendered = TritonBackend().render(program, HEADER, tuning=job.tuning, fast_math=False)
            kernel = TritonBackend().build(rendered, tmp_path / f"{rendered.entry}.py")
            shape, integers = launch_of(calls_of(program, flatten_rows=False), rendered)
            scalars = (*(value for _, value in integers), *shape.constants.values())
            dtypes, options = [one.dtype for one in program.operands], compile_options(shape.num_warps)
            warmed(kernel._kernel, dtypes, scalars, shape.programs, options, entry=rendered.entry, target="sm_90")
    finally:
        driver.set_active(before)
    assert entries(caches / "triton") == made


def test_a_kernel_for_several_sizes_is_compiled_under_the_keys_that_each_of_them_binds(caches, tmp_path):
    from triton.runtime import driver

    sizes = tuple(programs.rmsnorm(rows, 512, "bfloat16") for rows in (64, 7, 33))
    rendered = TritonBackend().render(sizes[0], HEADER, tuning=Tuning(), fast_math=False, elsewhere=sizes[1:])
    kernel = TritonBackend().build(rendered, tmp_path / f"{rendered.entry}.py")
    asked = []
    kernel.bind = lambda program: None  # there is no GPU

    def beside(found):
        asked.extend(
            Job(program=one, header=HEADER, backend="triton", tuning=Tuning(), fast_math=False, elsewhere=sizes) for one in found
        )

    count = kernel.compile_for((programs.rmsnorm(rows, 512, "bfloat16") for rows in (1, 2, 64, 4096)), beside)
    assert count == len(asked) > 0
    with BuildAhead(90, processes=1) as ahead:
        ahead.submit(asked)
        ahead.wait(asked)
    made = entries(caches / "triton")
    assert len(made) >= count
    before = driver._active
    driver.set_active(TargetOnly(90))
    try:
        for job in asked:
            shape, integers = launch_of(calls_of(job.program, flatten_rows=False), rendered)
            scalars = (*(value for _, value in integers), *shape.constants.values())
            dtypes, options = [one.dtype for one in job.program.operands], compile_options(shape.num_warps)
            warmed(kernel._kernel, dtypes, scalars, shape.programs, options, entry=rendered.entry, target="sm_90")
    finally:
        driver.set_active(before)
    assert entries(caches / "triton") == made


def cubins_of(asked, caches):
    """Compile jobs ahead; returns the cubins that were kept, one for each."""
    with BuildAhead(90, processes=2) as ahead:
        ahead.submit(asked)
        ahead.wait(asked)
    kept = list((caches / "own").rglob("*.cubin"))
    assert len(kept) == len(asked)
    return kept


@pytest.mark.skipif(not has_cuda_core(), reason="needs cuda-core")
def test_cubins_are_kept_for_a_bind(caches):
    asked = jobs("cuda", programs.softmax(64, 512, "bfloat16"))
    kept = cubins_of(asked, caches)
    for job in asked:
        rendered = descriptor("cuda").maker().render(job.program, HEADER, tuning=job.tuning, fast_math=False)
        descriptor("cuda").compile_for(job.program, rendered, 90)
    assert list((caches / "own").rglob("*.cubin")) == kept


@pytest.mark.skipif(not has_cuda_core(), reason="needs cuda-core")
def test_cubins_of_linears_are_kept_for_a_bind(caches):
    problem = GemvProblem(m=2, n=64, k=256, dtype="bfloat16", has_norm=True)
    asked = [LinearJob(problem=problem, header=HEADER, config=config) for config in gemv_candidates(problem, ("cuda",))[:2]]
    kept = cubins_of(asked, caches)
    for job in asked:
        compile_for(GemvCuda().render(problem, HEADER, config=job.config), 90)
    assert list((caches / "own").rglob("*.cubin")) == kept


def test_the_end_of_the_processes_is_said_and_nobody_waits(caches):
    said: list[str] = []
    with BuildAhead(90, processes=1, warn=said.append) as ahead:
        os.killpg(ahead._process.pid, signal.SIGKILL)
        asked, started = jobs(), time.monotonic()
        ahead.submit(asked)
        ahead.wait(asked)
        deadline = time.monotonic() + 5
        while not said and time.monotonic() < deadline:
            time.sleep(0.01)
        assert time.monotonic() - started < 10
    assert len(said) == 1 and "one by one" in said[0]


def test_nothing_is_said_and_no_process_stays_after_a_close(caches):
    said: list[str] = []
    ahead = BuildAhead(90, processes=2, warn=said.append)
    ahead.submit(jobs())
    ahead.close()
    assert ahead._process.poll() is not None and not said
    with pytest.raises(ProcessLookupError):
        os.killpg(ahead._process.pid, 0)
    ahead.wait(jobs())  # and this returns


def test_a_kernel_that_cannot_be_compiled_ends_nothing(caches):
    bad = Job(program=PROGRAM, header=HEADER, backend="triton", tuning=Tuning(num_warps=3), fast_math=False)
    good = jobs()[:1]
    with BuildAhead(90, processes=1) as ahead:
        ahead.submit([bad, *good])
        ahead.wait([bad, *good])
        assert not ahead._is_over
    assert entries(caches / "triton")


def test_a_kernel_is_asked_for_once(caches):
    asked = jobs()[:1]
    with BuildAhead(90, processes=1) as ahead:
        ahead.submit(asked)
        ahead.submit(jobs()[:1])
        assert len(ahead._numbers) == 1


class Waits:
    """Remembers what was waited for."""

    def __init__(self):
        self.jobs = ()

    def wait(self, jobs):
        self.jobs = jobs


def test_what_is_tuned_is_what_was_asked_for(tmp_path):
    gpu, waits = FakeGpu(), Waits()
    from fusion_advisor.autotune.cache import TuningStore

    store = TuningStore(tmp_path / "tunings.json")
    asked = jobs_of(PROGRAM, (), "triton", CUDA, header=HEADER, fast_math=False, store=store, gpu=gpu)
    assert len(asked) > 1
    best_tuning(
        PROGRAM, (), "triton", CUDA, header=HEADER, store=store, gpu=gpu, ahead=waits,
        build=lambda tuning: lambda *_: None, clock=CountingClockOf(),
    )  # fmt: skip
    assert waits.jobs == asked
    assert len(jobs_of(PROGRAM, (), "triton", CUDA, header=HEADER, fast_math=False, store=store, gpu=gpu)) == 1


class CountingClockOf:
    """Says that every repetition takes as long as the last."""

    method = "fake"

    def prepare(self, call, rotation):
        return lambda: None

    def time_ns(self, repetition):
        return 1000


def test_nothing_is_asked_for_on_a_cpu():
    assert [job.tuning for job in jobs_of(PROGRAM, (), "cpp", torch.device("cpu"), header=HEADER, fast_math=False)] == [Tuning()]
