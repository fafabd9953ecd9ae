"""Noise is not a verdict: a run that could not tell says so, in every view and by its exit code."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fusion_advisor.errors import MachineTooBusy
from fusion_advisor.fuse.too_busy import with_noise_judged
from fusion_advisor.records import MachineLoad, Status
from fusion_advisor.records.serialize import dump_report, load_report
from fusion_advisor.report import shared_rows
from fusion_advisor.report.headline import headline
from tests.report.fixtures import applied

LOAD = MachineLoad(load_average=5.1, cores=2, busiest=(("cc1plus", 1.9),))
STEP_NS = 10_000_000


def judged(noise_share, statuses=(Status.WITHIN_NOISE, Status.TOO_LITTLE), saving_ns=1_000_000):
    report = applied()
    fusions = [
        replace(fusion, status=status, predicted_saving_ns=saving_ns)
        for fusion, status in zip(report.fusions, statuses, strict=False)
    ]
    report = replace(report, fusions=tuple(fusions), rewrites=(), after=replace(report.before, label="unchanged"))
    return with_noise_judged(report, noise_share=noise_share, step_ns=STEP_NS, load=lambda: LOAD)


def test_where_no_expected_gain_could_pass_nothing_is_called_within_noise():
    report = judged(0.3)
    assert {fusion.status for fusion in report.fusions} == {Status.UNDECIDED}
    assert headline(report).tone == "warn"
    text = headline(report).text
    for words in (
        "Could not tell: this machine is too busy",
        "3.00 ms (30.0%)",
        "1.00 ms",
        "5.1 on 2 cores",
        "cc1plus 1.9 cores",
    ):
        assert words in text
    assert "OMP_WAIT_POLICY=PASSIVE" in text and "Nothing paid" not in text
    assert "removed" not in {shared_rows.VERDICTS[fusion.status].words for fusion in report.fusions}
    assert load_report(dump_report(report)) == report
    assert MachineTooBusy.exit_code == 6


@pytest.mark.parametrize(
    ("noise_share", "statuses", "saving_ns"),
    [
        (0.09, (Status.WITHIN_NOISE,), 1_000_000),  # a gain of a tenth would have been seen
        (0.3, (Status.WITHIN_NOISE, Status.KEPT), 1_000_000),
        (0.3, (Status.SLOWER, Status.WRONG_NUMBERS), 1_000_000),
        (0.01, (Status.WITHIN_NOISE,), 50_000),  # a quiet machine, and a small gain
        (0.04, (Status.WITHIN_NOISE,), 0),
    ],
)
def test_a_verdict_stays_where_the_step_could_tell(noise_share, statuses, saving_ns):
    report = judged(noise_share, statuses, saving_ns)
    assert report.too_busy is None
    assert tuple(fusion.status for fusion in report.fusions) == statuses
