"""Linear layers on few rows: every form against fp64 with eager's own error beside it, and who is chosen when.

CUDA kernels run on the host, all threads of a block (see simt_on_host.py), Triton's in its interpreter.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fusion_advisor.autotune.cache import TuningStore
from fusion_advisor.autotune.select_gemm import choose, launcher_for
from fusion_advisor.codegen.common.interface import KernelBuildFailed
from fusion_advisor.codegen.cuda.nvrtc import find_nvcc, has_cuda_core
from fusion_advisor.codegen.gemm import cuda, triton
from fusion_advisor.codegen.gemm.cublas import torch_launcher
from fusion_advisor.codegen.gemm.cuda import GemvCuda
from fusion_advisor.codegen.gemm.problem import (
    CROSSOVER_ROWS,
    CUBLAS,
    GATED_TILES,
    GemvConfig,
    GemvProblem,
    around,
    candidates,
    default_config,
    fits,
    refusal,
    stage_bytes,
)
from fusion_advisor.codegen.gemm.triton import GemvTriton
from fusion_advisor.evaluate.check import check_kernel
from fusion_advisor.library.discover import load_kernel
from fusion_advisor.library.linear import problem_of
from tests.autotune.test_tune import FakeGpu
from tests.kernel_cases import simt_on_host
from tests.kernel_cases.gemv_cases import EPILOGUES, HEADER, complaint, gated_on_many_rows, problems, surrounded, tensors

HERE = Path(__file__).parents[2] / "kernel_cases"
PROBLEMS = problems()
MANY = gated_on_many_rows()
CUDA = [(name, config) for name, problem in PROBLEMS.items() for config in candidates(problem, ("cuda",))]
needs_gpp = pytest.mark.skipif(shutil.which("g++") is None, reason="runs kernels on the host, and there is no g++")


PARTS = 6
"""Files that all configurations are compiled in on the host."""


@pytest.mark.slow
@needs_gpp
@pytest.mark.parametrize("part", range(PARTS))
def test_cuda_on_the_host(tmp_path, part):
    launches, asked = [], []
    for name, config in CUDA[part::PARTS]:
        problem = PROBLEMS[name]
        calls = []
        for kind in ("normal", "special"):
            given = tensors(problem, kind)
            calls.append((*given, torch.full((problem.m, problem.n), 3.0, dtype=given[0].dtype)))
            asked.append((f"{name} {config.text} {kind}", problem, calls[-1]))
        rendered = GemvCuda().render(problem, HEADER, config=config)
        grid, threads = -(-problem.n // config.rows), 32 * config.warps
        launches.append(simt_on_host.Launch(rendered=rendered, calls=calls, grid=grid, threads=threads))
    simt_on_host.run_all(launches, tmp_path)
    found = {label: complaint(problem, list(given), out) for label, problem, (*given, out) in asked}
    assert not {label: problem for label, problem in found.items() if problem}


@pytest.mark.slow
def test_triton_in_the_interpreter(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])])}
    command = [sys.executable, str(HERE / "interpret_gemv.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) > 100
    assert sum("triton_cublas" in name for name in found) == 2 * len(surrounded())
    assert not {name: problem for name, problem in found.items() if problem}


@pytest.mark.parametrize(("name", "given"), EPILOGUES.items())
def test_torch_s_own_ops_compute_the_same(name, given):
    problem = GemvProblem(m=3, n=19, k=520, dtype="bfloat16", **given)
    tensors_given, out = tensors(problem), torch.full((3, 19), 3.0, dtype=torch.bfloat16)
    torch_launcher(problem)(*tensors_given, out)
    assert not complaint(problem, tensors_given, out)


MATRIX = {
    f"{m}-{dtype}-{name}": GemvProblem(m=m, n=3584, k=3584, dtype=dtype, **given)
    for m, dtype, name, given in (
        (1, "bfloat16", "norm", {"has_norm": True}),
        (16, "bfloat16", "all", EPILOGUES["all"]),
        (64, "float16", "plain", {}),
        (8, "float32", "gated", EPILOGUES["gated"]),
    )
}


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("name", MATRIX)
def test_compiles_without_a_gpu(name, arch):
    problem = MATRIX[name]
    for config in candidates(problem, ("triton",)):
        rendered = GemvTriton().render(problem, HEADER, config=config)
        assert triton.compile_for(problem, rendered, arch, config=config).startswith(b"\x7fELF")
    if not has_cuda_core() and find_nvcc() is None:
        pytest.skip("neither cuda-core nor nvcc is here")
    for config in candidates(problem, ("cuda",)):
        rendered = GemvCuda().render(problem, HEADER, config=config)
        assert cuda.compile_for(rendered, arch).startswith(b"\x7fELF")


@pytest.mark.slow
@pytest.mark.skipif(not has_cuda_core() and find_nvcc() is None, reason="neither cuda-core nor nvcc is here")
@pytest.mark.parametrize("name", MANY)
def test_a_gate_in_its_gemm_compiles_for_hopper_alone(name):
    problem = MANY[name]
    for config in GATED_TILES:
        rendered = GemvCuda().render(problem, HEADER, config=config)
        assert cuda.compile_for(rendered, 90).startswith(b"\x7fELF")
    with pytest.raises(KernelBuildFailed):
        cuda.compile_for(rendered, 80)
    assert candidates(problem, ("triton",)) == ()


def test_tiles_of_a_gated_gemm_are_even_over_the_multiprocessors():
    """As on an H200, where all widths were timed."""
    for m, n, k, best in ((512, 14336, 4096, 112), (512, 18944, 3584, 96)):
        problem = GemvProblem(m=m, n=n, k=k, dtype="bfloat16", is_gated=True)
        assert candidates(problem, ("cuda",))[0].rows == best
        assert default_config(problem, ("cuda",)).rows == best
        assert default_config(problem, ("triton",)) == CUBLAS
    for problem in MANY.values():
        for config in candidates(problem, ("cuda",)):
            assert 2 <= config.stages <= 6 and config.rows % 16 == 0
            assert config.stages * stage_bytes(config) + 128 * config.rows * 2 + 1024 <= 227 * 1024
            assert GemvConfig.read(config.text) == config


def test_what_a_gated_gemm_does_not_serve_is_refused():
    problem = GemvProblem(m=512, n=64, k=64, dtype="bfloat16", is_gated=True)
    assert not refusal(problem, "cuda_wgmma")
    for given, text in (
        ({"m": 64}, "more than 64 rows"), ({"is_gated": False}, "only a gate"), ({"has_bias": True}, "only a gate"),
        ({"has_norm": True}, "only a gate"), ({"has_residual": True}, "only a gate"), ({"dtype": "float32"}, "round float32"),
        ({"n": 60}, "no multiple of 8"), ({"k": 63}, "no multiple of 8"),
    ):  # fmt: skip
        assert text in refusal(replace(problem, **given), "cuda_wgmma")
        assert candidates(replace(problem, **given), ("cuda",)) == () or given == {"m": 64}


def test_what_a_kernel_does_not_serve_is_refused():
    half = GemvProblem(m=9, n=64, k=64, dtype="float16", has_norm=True)
    assert "float16 might overflow" in refusal(half, "cuda_mma") and "float16 might overflow" in refusal(half, "triton_dot")
    assert not refusal(replace(half, dtype="bfloat16"), "cuda_mma")
    assert "up to 8 rows" in refusal(half, "cuda_fma")
    assert "no multiple of 8" in refusal(GemvProblem(m=2, n=64, k=65, dtype="bfloat16"), "cuda_mma")
    assert "round float32" in refusal(GemvProblem(m=2, n=64, k=64, dtype="float32"), "triton_dot")
    assert "float64" in refusal(GemvProblem(m=1, n=64, k=64, dtype="float64"), "cuda_fma")
    assert "up to 64 rows" in refusal(GemvProblem(m=65, n=64, k=64, dtype="bfloat16"), "cuda_mma")
    with pytest.raises(KernelBuildFailed, match="up to 8 rows"):
        GemvCuda().render(half, HEADER, config=GemvConfig(form="cuda_fma", rows=2, warps=4, unroll=4))


def test_blocks_fit_into_shared_memory():
    wide = GemvProblem(m=64, n=64, k=64, dtype="bfloat16", is_gated=True)
    assert not fits(wide, GemvConfig(form="cuda_mma", rows=32, warps=8, unroll=2))
    assert all(fits(problem, config) for problem in PROBLEMS.values() for config in candidates(problem))


def test_the_declared_crossover_where_nothing_is_measured():
    few, many = (GemvProblem(m=m, n=3584, k=3584, dtype="bfloat16", has_norm=True) for m in (CROSSOVER_ROWS, CROSSOVER_ROWS + 1))
    assert default_config(few) != CUBLAS
    assert default_config(many) == CUBLAS
    choice = choose(few, "cpu", header=HEADER)
    assert (choice.config, choice.source) == (default_config(few, available()), "default")


def available():
    return ("cuda", "triton") if has_cuda_core() else ("triton",)


class Fake:
    """Launchers that take as long as they are told, behind a clock that believes them."""

    method = "fake"

    def __init__(self, ns):
        self.ns, self.built, self.now = ns, [], 0

    def build(self, config):
        self.built.append(config)
        if self.ns(config) is None:
            raise KernelBuildFailed(kernel="k", target="cuda", cause="no")

        def launch(*_tensors):
            self.now = self.ns(config)

        return launch

    def prepare(self, call, rotation):
        def repetition():
            call(0)
            return rotation.calls

        return repetition

    def time_ns(self, repetition):
        return repetition() * self.now


H200 = FakeGpu("NVIDIA H200", cache_bytes=2**20, free_bytes=2**28)


def measured(problem, ns, store, **given):
    fake = Fake(ns)
    return choose(problem, "cuda", header=HEADER, store=store, clock=fake, build=fake.build, gpu=H200, **given), fake


def test_the_fastest_is_chosen_stored_and_read_back(tmp_path):
    problem, store = GemvProblem(m=4, n=64, k=64, dtype="bfloat16"), TuningStore(tmp_path / "tuning.json")
    fast = candidates(problem, available())[-1]
    choice, fake = measured(problem, lambda config: 500 if config == fast else 1000, store, backends=("triton",))
    assert choice.source == "measured" and choice.config == candidates(problem, ("triton",))[-1]
    assert fake.built[0] == CUBLAS and len(fake.built) <= 4
    assert choice.text.endswith(f"(measured, best of {len(fake.built)})")
    again, fake = measured(replace(problem, n=50), lambda config: 1, store, backends=("triton",))
    assert (again.config, again.source, fake.built) == (choice.config, "stored", [])
    other, _ = measured(replace(problem, m=5), lambda config: 1000, store, backends=("triton",))
    assert other.source == "measured"


def test_cublas_is_chosen_where_it_is_faster(tmp_path):
    store = TuningStore(tmp_path / "tuning.json")
    for m in (1, 64):
        problem = GemvProblem(m=m, n=64, k=64, dtype="bfloat16")
        choice, _ = measured(problem, lambda config: 500 if config == CUBLAS else 1000, store)
        assert (choice.config, choice.source) == (CUBLAS, "measured")
        assert measured(problem, lambda config: 1, store)[0].source == "stored"
        ours, _ = measured(problem, lambda config: 500 if config == CUBLAS else 1000, store, with_cublas=False)
        assert ours.config != CUBLAS
    above, fake = measured(GemvProblem(m=65, n=64, k=64, dtype="bfloat16"), lambda config: 1, store)
    assert (above.config, above.source, fake.built) == (CUBLAS, "default", [])


def test_our_kernels_stand_around_cublas_where_that_is_faster(tmp_path):
    store = TuningStore(tmp_path / "tuning.json")
    for m in (16, 512):
        problem = GemvProblem(m=m, n=64, k=64, dtype="bfloat16", has_norm=True)
        best = around(problem, "triton")
        choice, fake = measured(problem, lambda config, best=best: 500 if config == best else 1000, store, backends=("triton",))
        assert (choice.config, choice.source, choice.config.form) == (best, "measured", "triton_cublas")
        assert fake.built == [CUBLAS, best, *candidates(problem, ("triton",))]
        assert measured(problem, lambda config: 1, store, backends=("triton",))[0].source == "stored"
        # A backend's own row of a bench has no GEMM of cuBLAS.
        alone, _ = measured(problem, lambda config: 1, store, backends=("triton",), with_cublas=False)
        assert alone.config in (candidates(problem, ("triton",)) or (CUBLAS,))
    few = GemvProblem(m=CROSSOVER_ROWS, n=64, k=64, dtype="bfloat16", has_norm=True)
    assert around(few, "triton") not in measured(few, lambda config: 1, store, backends=("triton",))[1].built
    beaten = GemvProblem(m=256, n=64, k=64, dtype="bfloat16", is_gated=True)
    assert measured(beaten, lambda config: 500 if config == CUBLAS else 1000, store)[0].config == CUBLAS


def test_what_has_no_kernel_around_it():
    plain = GemvProblem(m=100, n=64, k=64, dtype="bfloat16", has_bias=True, has_residual=True)
    assert around(plain, "cuda") is None
    assert around(replace(plain, has_norm=True, norm_offset=0.5), "cuda") is None
    assert "no kernel of the library" in refusal(plain, "cuda_cublas")
    assert not refusal(replace(plain, has_norm=True, norm_offset=1.0), "triton_cublas")


def test_blocks_are_even_over_the_multiprocessors():
    problem = GemvProblem(m=16, n=4608, k=3584, dtype="bfloat16", has_norm=True, has_bias=True)
    busiest = {config: -(-problem.n // (config.rows * 132)) * config.rows for config in candidates(problem, ("cuda",))}
    assert min(busiest.values()) == 40  # 4608 / 132 is 34.9, and a block has whole tiles of 8
    for m, n in ((4, 3584), (16, 18944), (32, 3584), (64, 3584)):
        found = candidates(replace(problem, m=m, n=n), ("cuda",))
        assert len(set(found)) == len(found)


def test_what_does_not_build_is_left_out(tmp_path):
    problem = GemvProblem(m=1, n=64, k=64, dtype="bfloat16")
    choice, _ = measured(problem, lambda config: 900 if config == CUBLAS else None, TuningStore(tmp_path / "t.json"))
    assert choice.config == CUBLAS and len(choice.tried) == 1


def test_less_than_noise_leaves_the_default(tmp_path):
    problem = GemvProblem(m=1, n=64, k=64, dtype="bfloat16")
    own = default_config(problem, ("triton",))
    choice, _ = measured(
        problem, lambda config: 1000 if config == own else 990, TuningStore(tmp_path / "t.json"), backends=("triton",)
    )
    assert choice.config == own


def test_a_manifest_becomes_a_problem():
    spec = load_kernel("rmsnorm_gate_up").spec
    problem = problem_of(spec, "llama", spec.bench[0], "bfloat16")
    assert problem == GemvProblem(m=1, n=18944, k=3584, dtype="bfloat16", has_norm=True, is_gated=True)
    assert problem.weight_bytes == 2 * 18944 * 3584 * 2
    assert problem.moved_bytes == problem.weight_bytes + 2 * (3584 + 3584 * problem.has_norm + 18944)
    spec = load_kernel("rmsnorm_linear").spec
    assert problem_of(spec, "gemma", spec.bench[0], "bfloat16").norm_offset == pytest.approx(1.0)
    assert [name for name, _ in problem_of(spec, "llama", spec.bench[0], "float16").operands] == [
        "x",
        "norm_weight",
        "weight",
        "out",
    ]


def has_wgmma():
    """Asked when a test is run: no process can be forked after one asked CUDA."""
    return has_cuda_core() and torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="runs kernels, and this machine has no CUDA device")
class TestOnAGpu:
    @pytest.mark.parametrize("name", PROBLEMS)
    def test_every_configuration(self, tmp_path, name):
        problem = PROBLEMS[name]
        for config in candidates(problem, available()):
            launch = launcher_for(problem, config, header=HEADER, folder=tmp_path)
            for kind in ("normal", "large", "special"):
                given = tensors(problem, kind)
                outs = []
                for _ in range(2):
                    out = torch.full((problem.m, problem.n), 3.0, dtype=given[0].dtype, device="cuda")
                    launch(*(tensor.cuda() for tensor in given), out)
                    outs.append(out.cpu())
                assert not complaint(problem, given, outs[0]), (config.text, kind)
                assert torch.equal(outs[0].nan_to_num(), outs[1].nan_to_num()), config.text

    @pytest.mark.parametrize("name", ["rmsnorm_linear", "rmsnorm_linear_bias", "rmsnorm_gate_up", "linear_residual", "gate_up"])
    def test_every_case_of_the_manifests(self, name):
        rows = check_kernel(name, Silent())
        assert "passed" in {row.result for row in rows} <= {"passed", "skipped"}, rows
        assert all(row.result == "passed" or "cuBLAS computes it" in row.detail for row in rows)

    @pytest.mark.skipif("not has_wgmma()", reason="needs compute capability 9.0 and cuda-core")
    @pytest.mark.parametrize("name", MANY)
    def test_a_gate_in_its_gemm(self, tmp_path, name):
        problem = MANY[name]
        for config in GATED_TILES:  # which of them are candidates is decided by sizes that would take longer
            launch = launcher_for(problem, config, header=HEADER, folder=tmp_path)
            for kind in ("normal", "large", "special"):
                given = tensors(problem, kind)
                x, weight = (tensor.cuda() for tensor in given)
                outs = []
                for _ in range(2):  # at two addresses, what lies around them left alone
                    around = torch.full((problem.m + 2, problem.n), 3.0, dtype=x.dtype, device="cuda")
                    launch(x, weight, around[1:-1])
                    assert (around[0] == 3).all() and (around[-1] == 3).all()
                    outs.append(around[1:-1].cpu())
                assert not complaint(problem, given, outs[0]), (config.text, kind)
                assert torch.equal(outs[0].nan_to_num(), outs[1].nan_to_num()), config.text

    @pytest.mark.skipif("not has_wgmma()", reason="needs compute capability 9.0 and cuda-core")
    def test_a_gate_in_its_gemm_recorded_and_from_places_that_are_not_aligned(self, tmp_path):
        problem = GemvProblem(m=300, n=256, k=512, dtype="bfloat16", is_gated=True)
        launch = launcher_for(problem, candidates(problem, ("cuda",))[0], header=HEADER, folder=tmp_path)
        given = tensors(problem)
        x, weight = (tensor.cuda() for tensor in given)
        out = torch.empty(300, 256, dtype=torch.bfloat16, device="cuda")
        graph = torch.cuda.CUDAGraph()
        launch(x, weight, out)
        with torch.cuda.graph(graph):
            launch(x, weight, out)
        for _ in range(3):
            out.fill_(3.0)
            graph.replay()
            assert not complaint(problem, given, out.cpu())
        shifted = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view(x.shape).copy_(x)
        launch(shifted, weight, out.fill_(3.0))
        assert not complaint(problem, given, out.cpu())

    def test_any_alignment(self, tmp_path):
        problem = GemvProblem(m=2, n=64, k=256, dtype="bfloat16", has_norm=True)
        given = tensors(problem)
        shifted = [torch.empty(t.numel() + 1, dtype=t.dtype, device="cuda")[1:].view(t.shape).copy_(t) for t in given]
        for config in candidates(problem, available()):
            out = torch.full((2, 64), 3.0, dtype=torch.bfloat16, device="cuda")
            launcher_for(problem, config, header=HEADER, folder=tmp_path)(*shifted, out)
            assert not complaint(problem, given, out.cpu()), config.text

    @pytest.mark.parametrize("backend", ["triton", "cuda"])
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
    @pytest.mark.parametrize("name", surrounded())
    def test_kernels_around_cublas(self, tmp_path, backend, dtype, name):
        if backend == "cuda" and not has_cuda_core():
            pytest.skip("cuda-core is not here")
        problem, store = replace(surrounded()[name], dtype=dtype), TuningStore(tmp_path / "tuning.json")
        launch = launcher_for(problem, around(problem, backend), header=HEADER, folder=tmp_path, store=store)
        for kind in ("normal", "large", "special"):
            given = tensors(problem, kind)
            out = torch.full((problem.m, problem.n), 3.0, dtype=given[0].dtype, device="cuda")
            launch(*(tensor.cuda() for tensor in given), out)
            assert not complaint(problem, given, out.cpu()), kind

    def test_chooses_by_measurement(self, tmp_path):
        store = TuningStore(tmp_path / "tuning.json")
        for m in (1, 16, 64):
            problem = GemvProblem(m=m, n=3584, k=3584, dtype="bfloat16", has_norm=True)
            choice = choose(problem, "cuda", header=HEADER, store=store)
            assert choice.source == "measured" and len(choice.tried) > 2
            assert choice.tune_ns > 0
            assert choose(problem, "cuda", header=HEADER, store=store).source == "stored"


class Silent:
    def step(self, done, total, text):
        pass
