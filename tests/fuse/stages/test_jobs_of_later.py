"""Kernels of later stages are named before the fusions are tried: those that these stages then ask for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fusion_advisor.autotune.build_ahead import Job, LinearJob
from fusion_advisor.autotune.cache import TuningStore
from fusion_advisor.autotune.select_gemm import jobs_for
from fusion_advisor.capture.graph.tracer import capture_regions
from fusion_advisor.codegen.cuda.nvrtc import has_cuda_core
from fusion_advisor.codegen.gemm.problem import CUBLAS, GemvProblem, candidates
from fusion_advisor.fuse.decide.session import Bench
from fusion_advisor.fuse.decide.try_fusions import submit, try_all
from fusion_advisor.fuse.pipeline import apply_workload
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.fuse.plan.plan import make_plan
from fusion_advisor.fuse.plan.progress import Progress
from fusion_advisor.fuse.stages.jobs_of_later import jobs_of_later
from fusion_advisor.fuse.stages.linear_kernels import header_of
from fusion_advisor.fuse.stages.linear_kinds import find_kinds
from tests.autotune.test_tune import CUDA, FakeGpu
from tests.codegen.gemm.test_problem import H200, HEADER, measured
from tests.fuse import test_pipeline
from tests.fuse.stages.test_try_layout_change_merge import gated, planted
from tests.fuse.stages.test_try_linear_kernels import bench_of, decoder
from tests.tiny import patterns, profile_live

pytestmark = test_pipeline.pytestmark
quick = test_pipeline.quick

CPU = torch.device("cpu")


def planned_bench(loaded):
    capture, live = profile_live(loaded.model, loaded.args, loaded.kwargs)
    return Bench(live, on_cuda=False), make_plan(capture, patterns(), min_share=0.0).fusions


def programs_of(jobs):
    return {job.program for job in jobs if isinstance(job, Job)}


def test_the_kernels_of_merged_products_are_those_that_merging_binds(quick):
    kept = {item.planned.program for item in apply_workload(gated(), quick, instruments=planted()).fused._plan.fusions}
    bench, planned = planned_bench(gated())
    before, later = {one.program for one in planned}, programs_of(jobs_of_later(bench, planned, ApplyOptions(), CPU))
    assert kept - before, "the chain reads slices of one product"
    assert kept <= before | later and not later & before
    without = jobs_of_later(bench, planned, ApplyOptions(skip=("merge-gemms",)), CPU)
    assert not programs_of(without)


def test_weights_that_lie_apart_are_not_copied_for_it():
    bench, planned = planned_bench(gated(is_laid_out=False))
    assert not list(jobs_of_later(bench, planned, ApplyOptions(freeze=True), CPU))


def test_linears_are_those_of_the_merged_graph():
    loaded = decoder()
    bench = Bench(capture_regions(loaded.model, (), loaded.kwargs), on_cuda=False)
    kinds = find_kinds(bench_of(decoder()))

    def linears(options=None, **more):
        options = options or ApplyOptions()
        jobs = jobs_of_later(bench, (), options, CUDA, gpu=FakeGpu(), **more)
        return {(job.problem, job.header.title) for job in jobs if isinstance(job, LinearJob)}

    assert linears() == {(kind.problem, header_of(kind.title).title) for kind in kinds}
    assert not linears(is_served=lambda problem, device: False)
    assert not linears(ApplyOptions(skip=("linear-kernels",)))
    assert not linears(ApplyOptions(backend="triton")), "Triton compiles at a kernel's first launch"
    assert {title for _, title in linears(ApplyOptions(skip=("rmsnorm_gate_up",)))} == {
        kind.title for kind in kinds if kind.title != "rmsnorm_gate_up"
    }


@pytest.mark.skipif(not has_cuda_core(), reason="needs cuda-core: Triton's kernels are not named")
@pytest.mark.parametrize("rows", [1, 32])
def test_all_that_choosing_compiles_is_named_and_what_is_stored_alone(tmp_path, rows):
    problem, store = GemvProblem(m=rows, n=64, k=64, dtype="bfloat16", has_norm=True, is_gated=True), TuningStore(tmp_path / "t")

    def named():
        jobs = jobs_for(problem, CUDA, header=HEADER, store=store, gpu=H200)
        configs = [job.config for job in jobs if isinstance(job, LinearJob)]
        return configs, {job.header.title for job in jobs if isinstance(job, Job)}

    before = named()
    best = candidates(problem, ("cuda",))[-1]
    choice, fake = measured(problem, lambda config: 500 if config == best else 1_000, store)
    around = [config for config in fake.built if config.form == "cuda_cublas"]
    assert before[0] == [config for config in fake.built if config != CUBLAS and config not in around]
    assert before[1] == ({"rmsnorm", "swiglu_packed"} if around else set()) and bool(around) == (rows > 8)
    assert (choice.config, named()) == (best, ([best], set()))


def test_they_are_named_once_the_fusions_own_kernels_are_asked_for():
    asked = []
    ahead = SimpleNamespace(submit=lambda jobs: asked.append(list(jobs)))
    bench = SimpleNamespace(on_cuda=True, observe=lambda _: asked and asked.append("observed"))
    plan = SimpleNamespace(fusions=())

    def tried(ahead):
        return try_all(bench, plan, ApplyOptions(), Progress(), lambda _: None, ahead=ahead, later=lambda: ["later"])

    assert tried(None) == ([], []) and not asked
    assert tried(ahead) == ([], []) and asked == [["later"], "observed"], "nothing waits for the model's own run"


def test_a_fusions_own_kernels_are_asked_for_on_the_steps_device():
    bench, planned = planned_bench(gated())
    asked = []
    submit(SimpleNamespace(submit=asked.extend), bench, planned, ApplyOptions(backend="cpp"))
    assert bench.device == CPU and not bench.values, "the step has not run for it"
    assert {job.program for job in asked} == {one.program for one in planned}
