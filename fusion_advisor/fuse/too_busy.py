"""Noise is not a verdict: where no expected gain could have passed, the run says that it could not tell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from fusion_advisor.records import Fusion, GraphRewrite, MachineLoad, Report, Status, TooBusy

_LIMIT_SHARE = 0.05
"""Noise above this share of the step is no quiet machine's, where no gain is expected that it could be compared with."""
_QUIET_SHARE = 0.02


def with_noise_judged(report: Report, *, noise_share: float, step_ns: int, load: Callable[[], MachineLoad]) -> Report:
    """Return the report, with its undecided rewrites marked as such where the noise hides every gain that was expected.

    Args:
        report: with a verdict and a predicted saving of each rewrite.
        noise_share: A/A noise over the step.
        step_ns: the step without any rewrite.
        load: looks at the machine; called only where the run could not tell.
    """
    rows: list[Fusion | GraphRewrite] = [*report.fusions, *report.rewrites]
    unclear = [row for row in rows if row.status in (Status.WITHIN_NOISE, Status.TOO_LITTLE)]
    expected_ns = max((row.predicted_saving_ns or 0 for row in unclear), default=0)
    is_hidden = noise_share * step_ns >= expected_ns if expected_ns else noise_share > _LIMIT_SHARE
    if not unclear or noise_share <= _QUIET_SHARE or not is_hidden or any(row.status is Status.KEPT for row in rows):
        return report
    return replace(
        report,
        fusions=tuple(_undecided(row) if row in unclear else row for row in report.fusions),
        rewrites=tuple(_undecided(row) if row in unclear else row for row in report.rewrites),
        too_busy=TooBusy(noise_share=noise_share, step_ns=step_ns, expected_ns=expected_ns, load=load()),
    )


Row = TypeVar("Row", Fusion, GraphRewrite)


def _undecided(row: Row) -> Row:
    return replace(row, status=Status.UNDECIDED, reason=f"could not tell: {row.reason}")
