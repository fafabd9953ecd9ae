"""The registry: stable ids, an order that its own reasons allow, and titles that nothing depends on."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from fusion_advisor.errors import UnreadableReport
from fusion_advisor.fuse.live.saved_plan import load_plan
from fusion_advisor.fuse.passes.registry import PASSES, REWRITES, kept_passes, order_faults
from fusion_advisor.fuse.pipeline import apply_workload
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.records import RewriteStage
from fusion_advisor.records.serialize import read_report, write_report
from tests.fuse import test_pipeline
from tests.fuse.live.test_saved_plan import saved_run
from tests.fuse.stages import test_try_layout_change_narrow as narrow

quick, planted, pytestmark = test_pipeline.quick, narrow.planted, test_pipeline.pytestmark
IDS = [
    "contiguous-rows", "channels-last", "contiguous-masks",
    "drop-masks", "group-heads", "share-masks", "share-values", "batch-counters", "split-biases", "pad-gemm", "odd-width-gemm",
    "patch-gemm", "window-gemm", "fold-constants", "fold-frozen", "narrow-rows", "merge-gemms", "gemm-epilogue",
    "linear-kernels", "scan-kernels", "all-reduce-norm", "cuda-graph", "linear-cross-entropy", "pad-products", "memory-budget",
    "gelu-checkpoint", "attn-dropout-checkpoint",
]  # fmt: skip
"""What reports and saved plans know: add to them, and never rename one."""


def test_ids_are_stable_words_and_titles_are_short():
    assert {rewrite.id for rewrite in REWRITES} >= set(IDS)
    for rewrite in REWRITES:
        # A hyphen tells rewrites from kernels in --only and --skip.
        assert re.fullmatch(r"[a-z]+(-[a-z]+)+", rewrite.id), rewrite.id
        assert 0 < len(rewrite.title) <= 30, rewrite.title
    assert len({rewrite.title for rewrite in REWRITES}) == len(REWRITES)


def test_the_order_is_one_that_the_reasons_allow():
    assert order_faults(REWRITES) == []
    known = {rewrite.id for rewrite in REWRITES}
    assert all(set(rewrite.after) <= known and all(rewrite.after.values()) for rewrite in REWRITES)


@pytest.mark.parametrize("rewrite", [rewrite for rewrite in REWRITES if rewrite.after], ids=lambda rewrite: rewrite.id)
def test_a_rewrite_that_stands_too_early_is_named_with_the_reason(rewrite):
    moved = [rewrite, *(other for other in REWRITES if other is not rewrite)]
    faults = order_faults(moved)
    for other, why in rewrite.after.items():
        assert f"{rewrite.id} must come after {other}: {why}" in faults


def test_stages_and_doubles_are_checked_too():
    first, last = REWRITES[0], REWRITES[-1]
    assert f"{first.id} (pass) stands after {last.id} (call)" in order_faults([replace(last, after={}), first])
    assert order_faults([first, first]) == [f"{first.id} stands twice"]
    assert [rewrite.stage for rewrite in (first, last)] == [RewriteStage.PASS, RewriteStage.CALL]


@pytest.mark.slow
def test_an_edit_of_every_title_changes_nothing_in_a_saved_plan(quick):
    saved_run(narrow.classifier(), quick, narrow.planted())
    before = load_plan(quick.run_dir)
    assert {"narrow-rows", "merge-gemms"} <= set(before.rewrites)
    path = quick.run_dir / "report.json"
    report = read_report(path)
    edited = tuple(replace(row, name=f"EDITED {number}") for number, row in enumerate(report.rewrites))
    write_report(replace(report, rewrites=edited), path)
    after = load_plan(quick.run_dir)
    assert list(after.rewrites) == list(before.rewrites)
    assert kept_passes(after.report.rewrites) == kept_passes(before.report.rewrites)
    assert [row.name for row in after.report.rewrites] == [row.name for row in edited]


def test_a_kept_rewrite_that_is_not_known_refuses_the_plan(quick):
    saved_run(narrow.classifier(), quick, narrow.planted())
    path = quick.run_dir / "report.json"
    report = read_report(path)
    write_report(replace(report, rewrites=(*report.rewrites[:-1], replace(report.rewrites[-1], id="Merge-gemms"))), path)
    with pytest.raises(UnreadableReport, match="does not have: Merge-gemms"):
        load_plan(quick.run_dir)


def test_rewrites_are_skipped_and_chosen_by_id(quick):
    run = apply_workload(narrow.classifier(), replace(quick, skip=("merge-*",)), instruments=narrow.planted())
    assert [row.id for row in run.report.rewrites if row.stage is RewriteStage.ON_TOP] == ["narrow-rows"]
    options = ApplyOptions(only=("rms*", "*-gemms"), skip=("swiglu", "cuda-graph"))
    assert (options.only_kernels, options.skipped_kernels) == (("rms*",), ("swiglu",))
    assert [name for name in IDS if options.wants(name)] == ["merge-gemms"]
    assert [name for name in IDS if not ApplyOptions(only=("rms*",), skip=("cuda-graph",)).wants(name)] == ["cuda-graph"]
    assert ApplyOptions(skip=("*", "[a-z]*")).skipped_kernels == ("*", "[a-z]*")
    assert ApplyOptions(only=("merge-*", "merge-gemm", "rms*")).unused_patterns(IDS) == ("merge-gemm",)
    assert set(PASSES) < set(IDS)
