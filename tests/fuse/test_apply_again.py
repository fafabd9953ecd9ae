"""A second apply of the same step: verdicts come from the first, numbers and times do not."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace

import pytest
import torch

from fusion_advisor.files.private_folder import cache_folder
from fusion_advisor.fuse import remembered
from fusion_advisor.fuse.installed import LAST_STAGE
from fusion_advisor.fuse.pipeline import apply_workload
from fusion_advisor.fuse.plan.options import ApplyOptions, Budgets
from fusion_advisor.records import Status
from fusion_advisor.records.serialize import dump_report, load_report
from fusion_advisor.report.headline import headline
from fusion_advisor.report.quality import verdict
from fusion_advisor.runtime.environment import describe_environment
from fusion_advisor.workload.load import describe_live
from tests.fuse.test_pipeline import FASTER, TIMING, Model, Told, keep_all, keep_none, verdicts
from tests.tiny import BANDWIDTH

pytestmark = pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler")


@pytest.fixture
def workload():
    torch.manual_seed(0)
    return describe_live(Model().eval(), (torch.randn(2, 48, 64),))


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """Options of a run that remembers, with short budgets and a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return ApplyOptions(
        warmup=1, runs=8, min_share=0.0, run_dir=tmp_path / "run", run_id="r1", config_hash="abc", command="x", compile=False,
        budgets=Budgets(wall_s=0.05, decide_s=0.2), bandwidth=BANDWIDTH, remembers=True,
    )  # fmt: skip


def faster(status_of):
    """Instruments that keep, and time eager slower than ours."""
    return verdicts(status_of, walls=lambda calls, **_: [TIMING, FASTER][: len(calls)])


def never():
    """Instruments under which no rewrite may be timed again."""

    def fail(*_, **__):
        raise AssertionError("a remembered verdict was timed again")

    return replace(faster(keep_all), decide=fail, compare_alone=fail)


def first_run(workload, asked):
    run = apply_workload(workload, asked, instruments=faster(keep_all))
    run.revert()
    return run


def kept_names():
    return sorted(path.name for path in cache_folder("decisions").iterdir())


def test_a_second_apply_puts_in_what_the_first_kept_and_times_no_rewrite(workload, asked, tmp_path):
    first, progress = first_run(workload, asked), Told()
    expected = workload.model(*workload.args)
    second = apply_workload(
        workload, replace(asked, run_id="r2", run_dir=tmp_path / "second"), progress, instruments=never()
    )  # fmt: skip
    try:
        with torch.no_grad():
            torch.testing.assert_close(workload.model(*workload.args), expected, rtol=1e-5, atol=1e-5)
        assert second.fused.fallbacks == {}
    finally:
        second.revert()
    report = second.report
    assert (report.run_id, report.remembered_from, first.report.remembered_from) == ("r2", "r1", "")
    assert [row.status for row in report.fusions] == [row.status for row in first.report.fusions]
    assert [row.receipt for row in report.fusions] == [row.receipt for row in first.report.fusions]
    assert report.model_check.is_passed and report.after.label == "fused"
    assert "profile" not in progress.phases and any("--fresh" in note for note in progress.notes)
    assert any("remembered from run r1" in point for point in headline(report).points)
    assert any("come from run r1" in sentence for sentence in verdict(report)[1])
    assert load_report(dump_report(report)) == report
    assert list((tmp_path / "second" / "kernels").glob("*.cpp"))


def test_a_third_run_names_the_run_that_measured(workload, asked):
    first_run(workload, asked)
    for name in ("r2", "r3"):
        run = apply_workload(workload, replace(asked, run_id=name), instruments=never())
        run.revert()
        assert run.report.remembered_from == "r1"


def test_nothing_is_remembered_unless_it_is_asked_for_and_something_was_kept(workload, asked):
    apply_workload(workload, replace(asked, remembers=False), instruments=faster(keep_all)).revert()
    assert kept_names() == []
    apply_workload(workload, asked, instruments=faster(keep_none)).revert()
    assert kept_names() == []
    for other in ({"dry_run": True}, {"nvtx": True}, {"keep": "verified"}):
        assert not remembered.is_wanted(replace(asked, **other))


class Wider(Model):
    """Another graph under the same name and shapes."""

    def forward(self, x):
        return super().forward(x) + x


def test_another_graph_of_the_same_name_is_measured_anew(workload, asked):
    first_run(workload, asked)
    other = replace(describe_live(Wider().eval(), workload.args), record=workload.record)
    progress = Told()
    run = apply_workload(other, asked, progress, instruments=faster(keep_all))
    run.revert()
    assert run.report.remembered_from == ""
    assert any("holds no more" in note for note in progress.notes) and "profile" in progress.phases


def test_a_decision_that_makes_wrong_numbers_is_dropped(workload, asked):
    first_run(workload, asked)
    answers = iter([False, True])

    def check(*args, **kwargs):
        found = LAST_STAGE.check_model(*args, **kwargs)
        return replace(found, is_passed=next(answers, True))

    run = apply_workload(workload, asked, instruments=faster(keep_all), last=replace(LAST_STAGE, check_model=check))
    run.revert()
    assert run.report.remembered_from == "" and run.report.model_check.is_passed


def test_a_step_that_is_slower_than_eager_now_is_measured_anew(workload, asked):
    first_run(workload, asked)
    slower = verdicts(keep_all, walls=lambda calls, **_: [FASTER, TIMING][: len(calls)])
    progress = Told()
    apply_workload(workload, asked, progress, instruments=slower).revert()
    assert any("slower than eager" in note for note in progress.notes) and "profile" in progress.phases
    assert kept_names() == []


@pytest.mark.parametrize("name", ["report.json", "capture.json.gz"])
def test_a_damaged_decision_is_dropped_with_a_warning(workload, asked, name):
    first_run(workload, asked)
    (path,) = cache_folder("decisions").glob(f"*/{name}")
    path.write_bytes(path.read_bytes()[:100])
    progress = Told()
    run = apply_workload(workload, asked, progress, instruments=faster(keep_all))
    run.revert()
    assert run.report.remembered_from == "" and any("was dropped" in text for text in progress.warnings)
    assert len(kept_names()) == 1


def test_the_key_changes_with_all_that_a_verdict_depends_on_and_with_nothing_else(workload, asked):
    environment = describe_environment("cpu")

    def key(*, record=workload.record, environment=environment, options=asked, settings="", content=""):
        return remembered.decision_key(record, environment, options, settings, content)

    same = [
        key(),
        key(options=replace(asked, run_id="r9", command="y", run_dir=None, compile=True, baseline="both", compile_limit_s=9.0)),
        key(environment=replace(environment, commit="0123", tool="9.9")),
    ]
    others = [
        key(record=replace(workload.record, dtype="bf16")),
        key(environment=replace(environment, torch="2.99")),
        key(environment=replace(environment, device_name="another GPU")),
        key(environment=replace(environment, driver="1")),
        key(options=replace(asked, min_gain=0.1)),
        key(options=replace(asked, exact=True)),
        key(options=replace(asked, skip=("gelu*",))),
        key(settings="TF32"),
        key(content="another template"),
    ]
    assert len(set(same)) == 1 and len({*same, *others}) == 1 + len(others)


def test_only_so_many_decisions_are_kept_and_the_one_unused_for_longest_goes(workload, asked, monkeypatch):
    run = first_run(workload, asked)
    assert any(row.status is Status.KEPT for row in run.report.fusions)
    monkeypatch.setattr(remembered, "MOST", 2)
    (first,) = kept_names()
    remembered.remember("a" * 32, run.capture, run.report)
    for name, last_use_s in ((first, 1), ("a" * 32, 2)):
        os.utime(cache_folder("decisions") / name, (last_use_s, last_use_s))
    assert remembered.find(first, print) is not None  # used again
    remembered.remember("b" * 32, run.capture, run.report)
    assert kept_names() == sorted([first, "b" * 32])
