"""The whole loop on a CPU: real kernels in C++ where one is built, planted times where the verdict matters."""

from __future__ import annotations

import gzip
import json
import shutil
import threading
from dataclasses import replace

import pytest
import torch

from fusion_advisor.capture.graph.tracer import capture_regions
from fusion_advisor.codegen.cpp.backend import find_compiler
from fusion_advisor.errors import NoCompiler
from fusion_advisor.fuse.decide.instruments import Instruments
from fusion_advisor.fuse.decide.keep_rule import Decision
from fusion_advisor.fuse.decide.session import Bench
from fusion_advisor.fuse.decide.verdict import Verdict
from fusion_advisor.fuse.installed import LastStage
from fusion_advisor.fuse.live.model_check import check_whole_model
from fusion_advisor.fuse.modes.trace_profile import profile_trace
from fusion_advisor.fuse.passes.registry import PASSES
from fusion_advisor.fuse.pipeline import apply_workload, measurement_of, profile_workload
from fusion_advisor.fuse.plan.options import ApplyOptions, Budgets, ProfileOptions
from fusion_advisor.fuse.plan.progress import Progress
from fusion_advisor.records import Fusion, GraphRewrite, Match, Status, Tolerance
from fusion_advisor.records.serialize import dump_capture, dump_report, load_capture, load_report
from fusion_advisor.report.headline import headline
from fusion_advisor.report.shared_rows import caveats
from fusion_advisor.runtime.torch_internals import module_call
from fusion_advisor.timing.wall_timer import as_timing
from fusion_advisor.workload.load import describe_live
from tests.tiny import BANDWIDTH

pytestmark = pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler")


class Model(torch.nn.Module):
    """Two chains that differ, apart by GEMMs; a causal mask that nothing needs to build."""

    def __init__(self):
        super().__init__()
        self.one, self.two = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
        self.norm = torch.nn.LayerNorm(64)

    def forward(self, x):
        u = self.one(x)
        u = 0.5 * u * (1.0 + torch.tanh(0.7978845608028654 * (u + 0.044715 * torch.pow(u, 3.0))))
        mask = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool).tril()
        u = torch.nn.functional.scaled_dot_product_attention(u, u, u, attn_mask=mask)
        return self.norm(self.two(u) + x)


@pytest.fixture
def loaded():
    torch.manual_seed(0)
    return describe_live(Model().eval(), (torch.randn(2, 48, 64),))


class Told(Progress):
    def __init__(self):
        self.phases, self.notes, self.steps, self.warnings = [], [], [], []

    def phase(self, name):
        self.phases.append(name)

    def note(self, text):
        self.notes.append(text)

    def step(self, done, total, text):
        self.steps.append((done, total))

    def warn(self, text):
        self.warnings.append(text)


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """Return options with short budgets and without a run for the bandwidth."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return ApplyOptions(
        warmup=1, runs=8, min_share=0.0, run_dir=tmp_path / "run", run_id="r1", config_hash="abc", command="x", compile=False,
        budgets=Budgets(wall_s=0.05, decide_s=0.2), bandwidth=BANDWIDTH,
    )  # fmt: skip


def verdicts(status_of, **planted):
    """Instruments with planted answers: the keep rule's is ``status_of(candidate)``, kernels are twice as fast alone."""

    def decide(bench, candidates, **_):
        made = {
            candidate.id: Verdict(
                id=candidate.id, status=status_of(candidate), reason="planted", delta_ns=-5, interval_ns=(-6, -4)
            )
            for candidate in candidates
        }
        return Decision(verdicts=made, noise_share=0.01, before=TIMING, after=TIMING, method="wall")

    answers = {"decide": decide, "compare_alone": faster_alone, "walls": lambda calls, **_: [TIMING] * len(calls)}
    return Instruments(**(answers | planted))


def faster_alone(*_, **__):
    """A chain's ops and its kernel, which takes half the time."""
    return TIMING, as_timing([50] * 6, "wall")


def walls_of(*timings):
    """Eager's and ours, planted."""
    return lambda *_, **__: list(timings)


TIMING, FASTER = as_timing([100] * 6, "wall"), as_timing([80] * 6, "wall")


def compiler_without(name, folder):
    """Write a C++ compiler that fails for files that have a word in their name."""
    compiler = folder / "c++"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *{name}*) echo planted >&2; exit 1;; esac\nexec {find_compiler()[0]} "$@"\n')
    compiler.chmod(0o755)
    return compiler


def keep_all(_):
    return Status.KEPT


def keep_none(_):
    return Status.WITHIN_NOISE


def assert_consistent(report):
    chains = {chain.id: chain for chain in report.chains}
    assert [answer.chain_id for answer in report.answers] == list(chains)
    matched = [answer.chain_id for answer in report.answers if isinstance(answer, Match)]
    assert [fusion.chain_id for fusion in report.fusions] == matched
    for fusion in report.fusions:
        receipt, chain = fusion.receipt, chains[fusion.chain_id]
        assert receipt.sites_found == len(chain.sites)
        assert receipt.launches_before == chain.launches
        assert receipt.sites_replaced <= receipt.sites_matched <= receipt.sites_found
        if fusion.status is Status.KEPT:
            assert receipt.sites_replaced + len(receipt.refusals) == receipt.sites_matched
            assert receipt.launches_after * len(chain.sites) == receipt.sites_replaced * chain.runs > 0
        else:
            assert receipt.sites_replaced == receipt.launches_after == 0
            assert fusion.reason
    assert load_report(dump_report(report)) == report


def test_profiling_changes_nothing_and_its_report_reads_back(loaded, quick):
    before = dict(loaded.model.__dict__)
    progress = Told()
    options = ProfileOptions(warmup=1, runs=5, min_share=0.0)
    report, capture = profile_workload(loaded, options, progress)
    assert report.status == "profiled"
    assert loaded.model.__dict__ == before
    assert report.fusions == () and report.after is None
    assert progress.phases == ["bandwidth", "profile", "chains"] == [name for name, _ in report.durations_s]
    assert load_report(dump_report(report)) == report
    assert load_capture(dump_capture(capture)) == capture
    assert report.before.device_ns == capture.quality.eager_device_ns
    assert report.captured.device_ns == capture.quality.captured_device_ns


def assert_traces(run_dir, report):
    """Both open in Perfetto (strict ASCII JSON), name steps and modules, and read back as the report has them."""
    for side, told in (("before", report.before), ("after", report.after)):
        path = run_dir / f"trace.{side}.json.gz"
        text = gzip.decompress(path.read_bytes())
        assert text.isascii()
        names = {event["name"] for event in json.loads(text)["traceEvents"]}
        assert "fa:step:0" in names and any(name.startswith("fa:module:") for name in names)
        trace = profile_trace(path, min_share=0.0, top=1000)
        counts = {(row.name, row.category): row.count for row in trace.ranked}
        assert counts == {(name, category): trace.steps * count for name, category, count, _ in told.kernels}


def test_everything_kept_is_in_the_live_model_and_in_the_trace(loaded, quick):
    expected = loaded.model(*loaded.args)
    seen, progress = [], Told()
    run = apply_workload(loaded, quick, progress, seen.append, instruments=verdicts(keep_all))
    report = run.report
    assert_consistent(report)
    assert report.status == "applied" and report.model_check.is_passed
    assert len(report.fusions) >= 2 and {fusion.status for fusion in report.fusions} == {Status.KEPT}
    assert {kernel for kernel, category, _, _ in report.after.kernels if category == "fused"} == {
        kernel.name for fusion in report.fusions for kernel in fusion.rendered
    }
    assert report.after.launches < report.captured.launches
    assert [rewrite.sites for rewrite in report.rewrites if "mask" in rewrite.name] == [1]
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(*loaded.args), expected, rtol=1e-5, atol=1e-5)
    assert run.fused.fallbacks == {} and run.fused.report is report
    assert "_compiled_call_impl" in loaded.model.__dict__
    run.revert()
    assert "_compiled_call_impl" not in loaded.model.__dict__
    for fusion in report.fusions:
        assert (quick.run_dir / fusion.rendered[0].path).read_text() == fusion.rendered[0].source
    assert_traces(quick.run_dir, report)
    until_answer = [taken for name, taken in report.durations_s if name != "warm-up"]
    assert sum(until_answer) == pytest.approx(report.answer_s, abs=0.05)  # no second passes that no phase counts


def test_biases_apart_are_expected_to_save_what_their_gemms_do_alone(loaded, quick, slow_biases):
    asked = []

    def alone(_, before, after):
        asked.append(
            [[node for node in step.variant.modules[0].graph.nodes if node.op == "call_function"] for step in (before, after)]
        )
        return 41_000

    report = apply_workload(loaded, quick, instruments=verdicts(keep_all, saving_alone_ns=alone)).report
    rows = {row.name: row for row in report.rewrites}
    assert rows[PASSES["split-biases"].title].predicted_saving_ns == 41_000
    ((before, after),) = asked  # of this pass alone
    linears = [[len(node.args) for node in ops if "linear" in str(node.target)] for ops in (before, after)]
    assert linears == [[3, 3], [2, 2]]
    assert len(after) == len(before) + 2  # an addition for each
    assert not [node for node in before if "tril" in str(node.target)]  # passes of before this one are in place


def test_the_report_says_what_was_expected_and_how_a_change_was_measured(loaded, quick):
    planted = verdicts(keep_all)

    def decide(bench, candidates, **_):
        decision = planted.decide(bench, candidates)
        made = {name: replace(verdict, timed_with=("other",), is_timed_alone=True) for name, verdict in decision.verdicts.items()}
        return replace(decision, verdicts=made)

    report = apply_workload(loaded, quick, instruments=verdicts(keep_all, decide=decide)).report
    judged = [row for row in (*report.fusions, *report.rewrites) if row.step_delta_ns == -5]
    assert report.fusions and {type(row) for row in judged} == {Fusion, GraphRewrite}
    for row in judged:
        assert row.timed_with == ("other",) and row.is_timed_alone
        assert row.predicted_low_ns < row.predicted_saving_ns < row.predicted_high_ns


def test_steps_are_traced_and_timed_as_asked(loaded, quick):
    asked = []

    def walls(calls, *, least_s, **_):
        asked.append(least_s)
        return [TIMING] * len(calls)

    apply_workload(loaded, replace(quick, min_time_s=0.03, steps=2), instruments=verdicts(keep_all, walls=walls))
    assert set(asked) == {0.03}
    for side in ("before", "after"):
        events = json.loads(gzip.decompress((quick.run_dir / f"trace.{side}.json.gz").read_bytes()))["traceEvents"]
        assert {event["name"] for event in events if event["name"].startswith("fa:step:")} == {"fa:step:0", "fa:step:1"}


def test_the_eager_step_is_timed_in_full_only_where_that_is_its_last_time():
    assert measurement_of(ProfileOptions()).known_to == measurement_of(ApplyOptions(effort="thorough")).known_to == 0
    assert measurement_of(ApplyOptions()).known_to == 0.02


def test_the_report_so_far_is_given_after_every_fusion(loaded, quick):
    seen, progress = [], Told()
    report = apply_workload(loaded, quick, progress, seen.append, instruments=verdicts(keep_all)).report
    tried = len(report.fusions)
    assert [len(found.fusions) for found in seen] == [0, *range(1, tried + 1), tried]
    assert {found.status for found in seen} == {"interrupted"}
    assert progress.steps == [(number, tried) for number in range(tried)]
    for found in seen:
        assert load_report(dump_report(found)) == found
    assert [fusion.status for fusion in seen[-2].fusions] == [Status.PLANNED] * tried
    assert [fusion.status for fusion in seen[-1].fusions] == [Status.KEPT] * tried


def test_when_nothing_pays_the_model_is_as_it_was(loaded, quick):
    before = dict(loaded.model.__dict__)
    run = apply_workload(loaded, quick, instruments=verdicts(keep_none))
    assert_consistent(run.report)
    assert loaded.model.__dict__ == before
    assert run.report.after.label == "unchanged"
    assert run.report.model_check is None
    run.revert()
    assert loaded.model.__dict__ == before


def test_a_failed_build_is_told_and_the_rest_goes_on(loaded, quick, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", str(compiler_without("gelu_tanh", tmp_path)))
    progress = Told()
    report = apply_workload(loaded, quick, progress, instruments=verdicts(keep_all)).report
    assert_consistent(report)
    status = {fusion.kernel: fusion for fusion in report.fusions}
    failed = status.pop("gelu_tanh")
    assert failed.status is Status.BUILD_FAILED and "planted" in failed.reason and failed.rendered == ()
    assert status and {fusion.status for fusion in status.values()} == {Status.KEPT}
    assert any("planted" in text for text in progress.warnings)


def test_wrong_numbers_of_the_whole_model_revert_everything(loaded, quick):

    def fails(*args, **more):
        return replace(check_whole_model(*args, **more), is_passed=False)

    before = dict(loaded.model.__dict__)
    progress = Told()
    report = apply_workload(loaded, quick, progress, instruments=verdicts(keep_all), last=LastStage(check_model=fails)).report
    assert loaded.model.__dict__ == before
    assert {fusion.status for fusion in report.fusions} == {Status.WRONG_NUMBERS}  # with any of them the check fails
    assert all(fusion.receipt.sites_replaced == fusion.receipt.launches_after == 0 for fusion in report.fusions)
    assert all("right alone, and wrong in the whole model" in fusion.reason for fusion in report.fusions)
    assert any("whole model's numbers did not pass with F1" in text for text in report.warnings) and progress.warnings


def test_a_limit_of_the_users_is_the_limit(loaded, quick):
    report = apply_workload(loaded, replace(quick, rtol=0.0), instruments=verdicts(keep_all)).report
    assert report.tolerance == Tolerance(rtol=0.0, atol=0.0)
    assert {fusion.status for fusion in report.fusions} == {Status.WRONG_NUMBERS}
    assert all("outside |error| ≤ 0 + 0 × |oracle|" in fusion.reason for fusion in report.fusions)
    assert {fusion.numerics.limit for fusion in report.fusions} == {str(report.tolerance)}
    assert load_report(dump_report(report)) == report


def test_a_limit_of_the_users_goes_for_the_whole_model(loaded, quick):
    spoiled = []

    def off(loaded, eager, fused, written, **more):
        spoiled.append(check_whole_model(loaded, eager, lambda: fused() + 1e-3, written))
        return check_whole_model(loaded, eager, lambda: fused() + 1e-3, written, **more)

    options = replace(quick, atol=2e-3, rtol=1e-5)
    run = apply_workload(loaded, options, instruments=verdicts(keep_all), last=LastStage(check_model=off))
    assert not spoiled[0].is_passed and run.report.model_check.is_passed
    assert run.report.model_check.limit == str(run.report.tolerance)
    assert any(fusion.status is Status.KEPT for fusion in run.report.fusions)


def test_a_model_that_cannot_be_copied_is_compared_with_eager(loaded, quick):
    loaded.model.lock = threading.Lock()
    run = apply_workload(loaded, quick, instruments=verdicts(keep_all))
    assert (run.report.model_check.oracle, run.report.model_check.is_passed) == ("eager", True)


def test_a_slower_step_reverts_everything(loaded, quick):
    slower = replace(TIMING, median_ns=200, ci_low_ns=190, ci_high_ns=210)
    before = dict(loaded.model.__dict__)
    report = apply_workload(loaded, quick, instruments=verdicts(keep_all, walls=walls_of(TIMING, slower))).report
    assert loaded.model.__dict__ == before
    assert all("would rise" in fusion.reason for fusion in report.fusions)
    assert {fusion.status for fusion in report.fusions} == {
        Status.SLOWER
    }  # and no bug, as `--strict` takes a fusion without a site


def test_a_dry_run_builds_and_checks_and_times_no_step(loaded, quick):
    instruments = Instruments(decide=lambda *_, **__: pytest.fail("the step was timed"))
    before = dict(loaded.model.__dict__)
    run = apply_workload(loaded, replace(quick, dry_run=True), instruments=instruments)
    assert loaded.model.__dict__ == before
    assert run.report.status == "dry run" and run.report.after is None
    assert all(fusion.rendered and fusion.numerics.is_passed for fusion in run.report.fusions)
    assert headline(run.report).text.startswith("Dry run: ")
    assert "kept" not in headline(run.report).text
    run.revert()


def test_without_a_compiler_a_cpu_run_ends_before_anything_is_measured(loaded, quick, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    progress = Told()
    with pytest.raises(NoCompiler) as error:
        apply_workload(loaded, quick, progress)
    assert progress.phases == []
    assert (error.value.code, error.value.exit_code) == ("FA203", 3)
    assert "install g++" in str(error.value.hint)


def test_with_real_timing_the_report_is_consistent_whatever_is_kept(loaded, quick):
    expected = loaded.model(*loaded.args)
    run = apply_workload(loaded, quick)
    assert_consistent(run.report)
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(*loaded.args), expected, rtol=1e-5, atol=1e-5)
    run.revert()
    assert module_call.set_compiled_call(loaded.model, None) is None


class Layer(torch.nn.Module):
    """Breaks in the middle, and so does the loop around it: all layers run the same two graphs."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(64, 64), torch.nn.LayerNorm(64)
        self.register_buffer("table", torch.randn(64))

    def forward(self, x):
        x = self.norm(torch.nn.functional.gelu(self.linear(x), approximate="tanh"))
        torch._dynamo.graph_break()
        return torch.nn.functional.silu(x) * x + torch.exp(self.table)


class Layers(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("is_one_layer", [True, False])
def test_a_graph_that_a_step_runs_several_times_counts_as_often(quick, is_one_layer):
    torch.manual_seed(0)
    model = Layers([Layer()] * 3 if is_one_layer else [Layer() for _ in range(3)]).eval()
    x = torch.randn(32, 64)
    with torch.no_grad():
        expected = model(x)
    run = apply_workload(describe_live(model, (x,)), quick, instruments=verdicts(keep_all, walls=walls_of(TIMING, FASTER)))
    report = run.report
    assert run.capture.region_runs == (3, 3)
    assert report.captured.launches == sum(count for _, count, _ in report.before.categories)  # nothing ran outside of the graphs
    kept = [fusion for fusion in report.fusions if fusion.status is Status.KEPT]
    assert len(kept) == 2
    for fusion in kept:
        chain = next(chain for chain in report.chains if chain.id == fusion.chain_id)
        receipt = fusion.receipt
        assert (receipt.sites_replaced, receipt.launches_after, receipt.refusals) == (1, 3, ())
        assert chain.runs == 3 and chain.launches == 3 * len(chain.ops)
        assert chain.floor_bytes % 3 == 0 and chain.floor_bytes >= 3 * 2 * x.nbytes
    assert_consistent(report)
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)
    assert not run.fused.fallbacks


@pytest.mark.parametrize(("after", "stays"), [(FASTER, True), (TIMING, False)])
def test_what_pays_in_the_graphs_stays_only_if_the_whole_call_pays(quick, after, stays):
    class Broken(torch.nn.Module):
        def forward(self, x):
            x = torch.nn.functional.silu(x) * x
            torch._dynamo.graph_break()
            return x + 1.0

    instruments = verdicts(keep_all, walls=walls_of(TIMING, after))
    run = apply_workload(describe_live(Broken().eval(), (torch.rand(64, 64),)), quick, instruments=instruments)
    report = run.report
    assert run.fused.is_applied == stays
    assert any(fusion.status is Status.KEPT for fusion in report.fusions) == stays
    assert any("whole call does not measurably pay" in warning for warning in report.warnings) != stays
    assert any("only if that is measurably faster" in note for note in report.notes)
    assert any("1 graph break: the verdict on a rewrite is of the captured graphs alone" in line for line in caveats(report))
    if not stays:
        assert all("does not measurably pay" in fusion.reason for fusion in report.fusions)
        assert {fusion.status for fusion in report.fusions} == {Status.WITHIN_NOISE}


def test_a_value_is_folded_only_where_all_runs_of_a_graph_share_its_source():
    torch.manual_seed(0)
    x = torch.randn(32, 64)
    for layers, folded in ([Layer()] * 2, 1), ([Layer(), Layer()], 0):
        with torch.no_grad():
            live = capture_regions(Layers(layers).eval(), (x,), {})
        assert live.runs_of_regions() == (2, 2)
        assert Bench(live, on_cuda=False).build((), ("fold-frozen",)).changed == {"fold-frozen": folded}


def test_the_after_side_holds_what_runs_outside_of_the_captured_graphs(quick):
    class Part(torch.nn.Module):
        def forward(self, x):
            x = torch.nn.functional.silu(x) * 2.0
            torch._dynamo.graph_break()
            return torch.nn.functional.gelu(x) + x

    class Broken(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = torch.nn.ModuleList([Part()])

        def forward(self, x):
            for part in self.parts:  # a break inside a loop: dynamo leaves the whole of this frame to Python
                x = part(x)
            return torch.erfc(x)

    instruments = verdicts(keep_all, walls=walls_of(TIMING, FASTER))
    report = apply_workload(describe_live(Broken().eval(), (torch.rand(64, 64),)), quick, instruments=instruments).report
    assert any(fusion.status is Status.KEPT for fusion in report.fusions)
    counts = [
        [count for kernel, _, count, _ in step.kernels if kernel == "aten::erfc"]
        for step in (report.before, report.captured, report.after)
    ]
    assert counts == [[1], [], [1]]
    assert {kernel for kernel, *_ in report.after.kernels if not kernel.startswith(("aten::", "fa_"))} == set()
    assert_consistent(report)
