"""Sums close: the headline's two times and every change between them add up, in every committed report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fusion_advisor import units
from fusion_advisor.records import Status
from fusion_advisor.records.serialize import read_report
from fusion_advisor.report import shared_rows
from fusion_advisor.report.headline import headline
from fusion_advisor.report.ledger import ledger
from tests.report.fixtures import applied

EXAMPLES = sorted(Path(__file__).resolve().parents[2].glob("reports/examples/*/report.json"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.parent.name)
def test_in_every_committed_report_the_changes_lead_from_the_headline_s_before_to_its_after(path):
    report = read_report(path)
    found = ledger(report)
    if found is None:
        assert report.after is None
        return
    assert found.before_ns + sum(entry.delta_ns for entry in found.entries) == found.after_ns
    text = headline(report).text
    if found.entries:
        assert f"{units.duration(found.before_ns)} → {units.duration(found.after_ns)}" in text
        assert [entry.level_ns for entry in found.entries][-1] == found.after_ns
    kept = [row for row in (*report.fusions, *report.rewrites) if row.status is Status.KEPT and row.step_delta_ns is not None]
    assert {row.id for row in kept} <= {entry.id for entry in found.entries}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.parent.name)
def test_no_committed_report_says_that_fusion_does_not_help_where_it_did(path):
    assert "fusion alone will not help" not in shared_rows.launch_line(read_report(path))


def test_where_nothing_was_kept_only_the_eager_step_is_shown():
    report = applied()
    found = ledger(replace(report, after=replace(report.before, label="unchanged")))
    assert found is not None and found.entries == () and found.before_ns == found.after_ns


def test_a_profile_has_no_changes():
    assert ledger(replace(applied(), after=None)) is None
