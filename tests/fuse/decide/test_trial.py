"""One fusion tried by itself: built, checked, timed; and every way in which it can fail, with its reason."""

from __future__ import annotations

import itertools
import shutil
from types import SimpleNamespace

import pytest
import torch

from fusion_advisor.autotune.tune import Tuned
from fusion_advisor.codegen.common.interface import KernelBuildFailed, Rendered
from fusion_advisor.fuse.decide import trial
from fusion_advisor.fuse.decide.alone import savings_alone
from fusion_advisor.fuse.decide.trial import original_source, try_fusion
from fusion_advisor.library.discover import load_kernel
from fusion_advisor.records import Status, Timing
from fusion_advisor.timing.interleaving import compare_alone
from tests.timing.planted import PlantedTimer
from tests.tiny import EvaluatedKernel, bench_of, planned, profiled


def timing(*times):
    return Timing(times_ns=times, median_ns=times[1], ci_low_ns=times[0], ci_high_ns=times[2], method="wall")


class Backend:
    """A backend whose kernels the evaluator stands in for."""

    def __init__(self, kernel=None, *, render=None, build=None, bind=None):
        self.kernel, self.failures = kernel or EvaluatedKernel(), {"render": render, "build": build, "bind": bind}

    def _raise(self, stage):
        if self.failures[stage]:
            raise self.failures[stage]

    def render(self, program, header, *, tuning, fast_math):
        self._raise("render")
        return Rendered(backend="cpp", entry=f"fa_{header.title}", source="int x;", suffix=".cpp")

    def build(self, rendered, path):
        self._raise("build")
        return SimpleNamespace(build_ns=1, tuning="", bind=self._bind)

    def _bind(self, program):
        self._raise("bind")
        return self.kernel.bind(program)


@pytest.fixture
def attempt(monkeypatch, tmp_path):
    """Try the GELU of a tiny GPT-2 on a given backend, with planted times."""
    _, _, live = profiled("gpt2")
    plan = planned("gpt2")
    bench, _ = bench_of(live, plan)
    fusion = next(fusion for fusion in plan.fusions if fusion.match.kernel == "gelu_tanh")

    def run(backend, before=(90, 100, 110), after=(40, 50, 60), log=lambda _: None, sequence=()):
        monkeypatch.setattr(trial, "backend_named", lambda _: backend)
        made = itertools.chain(sequence or (), itertools.repeat((timing(*before), timing(*after))))
        planted = compare_alone if sequence is None else lambda *_, **__: next(made)
        return try_fusion(bench, fusion, backend="cpp", fast_math=False, kernel_dir=tmp_path, seed=0, log=log, compare=planted)

    run.bench, run.planned = bench, fusion
    return run


def test_a_right_and_faster_kernel_goes_on(attempt):
    found = attempt(Backend())
    fusion = found.fusion
    assert fusion.status is Status.PLANNED and found.built is not None
    assert fusion.numerics.is_passed
    assert (fusion.chain_before.median_ns, fusion.chain_after.median_ns) == (100, 50)
    assert fusion.predicted_saving_ns == max(0, attempt.planned.chain.device_ns - 2 * 50)
    receipt = fusion.receipt
    assert (receipt.sites_found, receipt.sites_matched, receipt.sites_replaced, receipt.launches_before) == (2, 2, 0, 16)
    assert fusion.rendered[0].path == f"kernels/{attempt.planned.id}_gelu_tanh.cpp"
    assert any("tanh" in text for _, text in fusion.original_source)


def test_wrong_numbers_are_out_and_never_timed(attempt):
    found = attempt(Backend(EvaluatedKernel(spoil=1e-3)))
    assert found.built is None
    assert found.fusion.status is Status.WRONG_NUMBERS
    assert not found.fusion.numerics.is_passed
    assert found.fusion.chain_after is None
    assert "float64" in found.fusion.reason


@pytest.mark.parametrize("stage", ["render", "build", "bind"])
def test_a_failed_build_is_told_and_logged(attempt, stage):
    failure = KernelBuildFailed(kernel="gelu_tanh", target="cpp", cause="no compiler")
    log = []
    found = attempt(Backend(**{stage: failure}), log=log.append)
    assert found.built is None
    assert found.fusion.status is Status.BUILD_FAILED
    assert "no compiler" in found.fusion.reason
    assert found.fusion.numerics is None
    assert len(log) == 1 and "gelu_tanh" in log[0]


def test_a_kernel_that_is_slower_alone_is_out(attempt):
    found = attempt(Backend(), before=(40, 50, 60), after=(60, 100, 110))
    assert found.built is None
    assert found.fusion.status is Status.SLOWER
    assert "0.1 µs" in found.fusion.reason
    assert found.fusion.numerics.is_passed


def test_intervals_that_overlap_go_on_to_the_step(attempt):
    assert attempt(Backend(), before=(40, 50, 70), after=(60, 65, 80)).built is not None


def test_times_that_cannot_be_right_are_measured_again(attempt):
    """7.96 µs of 8.00 ms: the scheduler took the core away from one side alone."""
    pairs = [(8_000_000, 7_960), (100, 50)]
    made = iter([(timing(*3 * (before,)), timing(*3 * (after,))) for before, after in pairs])
    run = attempt(Backend(), sequence=made)
    assert (run.fusion.chain_before.median_ns, run.fusion.chain_after.median_ns) == (100, 50)
    assert run.fusion.implausible == "" and next(made, None) is None


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ((8_000_000,) * 3, (50,) * 3, "more than the whole step"),
        ((100,) * 3, (1,) * 3, "the kernel took 0.00100 µs, in which this device cannot move 65,536 bytes"),
        ((1,) * 3, (100,) * 3, "the original ops took 0.00100 µs"),
    ],
)
def test_times_that_are_never_right_are_left_out_and_said(attempt, before, after, words):
    found = attempt(Backend(), before=before, after=after)
    fusion = found.fusion
    assert words in fusion.implausible
    assert fusion.chain_before is None and fusion.chain_after is None and fusion.predicted_saving_ns is None
    assert found.built is not None, "the step decides"
    assert savings_alone([fusion], {fusion.chain_id: 1}, 0.95) == {}


def test_a_runs_own_timer_that_stands_still_shows_no_figure(attempt, monkeypatch):
    monkeypatch.setattr(attempt.bench, "timer", PlantedTimer())
    assert "in which this device cannot move" in attempt(Backend(), sequence=None).fusion.implausible


def test_nothing_replaced_is_said_with_the_first_refusal(attempt):
    for lowered in attempt.planned.sites:
        attempt.bench.surprises[lowered.inputs[0]] = "a surprise"
    found = attempt(Backend())
    attempt.bench.surprises.clear()
    assert found.built is None
    assert found.fusion.status is Status.NOT_REPLACED
    assert found.fusion.reason == "no site could be replaced: transformer.h.0.mlp.act: a surprise"
    assert len(found.fusion.receipt.refusals) == 2


def test_the_source_around_a_chain_is_the_models_own():
    gelu = next(fusion for fusion in planned("gpt2").fusions if fusion.match.kernel == "gelu_tanh")
    lines = dict(original_source(gelu))
    site = gelu.chain.sites[0]
    assert lines[site.source_line].strip() == site.source_text
    assert len(lines) == 7


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler")
def test_every_chain_of_a_real_model_passes_as_compiled_cpp(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("gpt2", "qwen2"):
        _, _, live = profiled(name)
        plan = planned(name)
        bench, _ = bench_of(live, plan)
        built = []
        for fusion in plan.fusions:
            found = try_fusion(bench, fusion, backend="cpp", fast_math=False, kernel_dir=tmp_path, seed=0)
            assert found.fusion.numerics is not None and found.fusion.numerics.is_passed, found.fusion.reason
            assert (tmp_path / found.fusion.rendered[0].path.removeprefix("kernels/")).read_text() == found.fusion.rendered[
                0
            ].source
            if found.built is not None:
                built.append(found.built)
        torch.testing.assert_close(bench.run(bench.build(built, ())), bench.run(bench.build((), ())), rtol=1e-5, atol=1e-5)


def test_tunables_of_the_manifest_are_tried(monkeypatch, attempt):
    """Of the library's kernel, so that ``apply`` and ``kernels bench`` choose from one list."""
    given = []

    def best(_program, declared, _backend, _device, **_):
        given.append(declared)
        return Tuned(tuning=declared[-1], source="measured")

    monkeypatch.setattr(trial, "best_tuning", best)
    declared = load_kernel("gelu_tanh").spec.tunables
    assert declared and attempt.planned.tunables == declared
    tried = attempt(Backend())
    assert given == [declared]
    assert tried.fusion.rendered[0].parameters == declared[-1]
