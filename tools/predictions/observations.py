"""Predicted and measured savings of rewrites, read from reports.

A measured saving has an interval of its own. A prediction is judged where that interval is narrow: half of it is at most
``PRECISE`` of the saving. Elsewhere the measurement cannot tell a good prediction from a bad one. Such rewrites are counted too,
by whether the two intervals meet. Rewrites that were timed in the step together are one observation: their sum was measured. A
change that was not measured in the step at all is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fusion_advisor.errors import AdvisorError
from fusion_advisor.fuse.passes.in_trace import LAYOUTS
from fusion_advisor.fuse.prediction.interval import CALIBRATION, Calibration, Kind, is_predicted, kind_of, spread_ns
from fusion_advisor.fuse.prediction.saving import chain_saving_ns
from fusion_advisor.records import Chain, Fusion, GraphRewrite, Report
from fusion_advisor.records.serialize import read_report
from tools.predictions.records import SUFFIX, read_records

PRECISE = 0.1
"""Half the measured interval, at most, as a share of the larger of the measured and the predicted saving. By the larger: a small
measured saving does not hide that a large one was predicted."""
TOGETHER = "several at once"
REPORT = "report.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One rewrite, or several that were timed together.

    Attributes:
        run: name of its folder.
        id: of the rewrite.
        name: of the kernel, or the id of a graph rewrite.
        kind: how it is predicted; None of several together.
        status: the verdict.
        predicted_ns: saving.
        low_ns: lower end of the prediction's interval.
        high_ns: upper end.
        spread_ns: uncertainty before any factor; 0 of several together.
        measured_ns: saving.
        measured_low_ns: lower end of the measurement's interval.
        measured_high_ns: upper end.
    """

    run: str
    id: str
    name: str
    kind: Kind | None
    status: str
    predicted_ns: int
    low_ns: float
    high_ns: float
    spread_ns: float
    measured_ns: int
    measured_low_ns: int
    measured_high_ns: int

    @property
    def group(self) -> str:
        """The kind in words."""
        return TOGETHER if self.kind is None else str(self.kind)

    @property
    def noise_ns(self) -> float:
        """Half the width of the measurement's interval."""
        return (self.measured_high_ns - self.measured_low_ns) / 2

    @property
    def is_precise(self) -> bool:
        """Whether the measurement can judge the prediction."""
        return self.is_within(PRECISE)

    def is_within(self, share: float) -> bool:
        """Whether the saving was measured so narrowly.

        Args:
            share: half the measured interval, at most, over the larger of the measured and the predicted saving.
        """
        return self.measured_ns != 0 and self.noise_ns <= share * max(abs(self.measured_ns), abs(self.predicted_ns))

    @property
    def error_share(self) -> float:
        """Predicted minus measured, over the measured saving's size; measured savings of 0 are never precise."""
        return (self.predicted_ns - self.measured_ns) / abs(self.measured_ns)

    @property
    def has_sign(self) -> bool:
        """Whether the measurement says for certain that the step became faster or slower."""
        return self.measured_low_ns > 0 or self.measured_high_ns < 0

    @property
    def is_sign_right(self) -> bool:
        """Whether the prediction said the same; a prediction of 0 did not."""
        return self.predicted_ns * self.measured_ns > 0

    @property
    def is_covered(self) -> bool:
        """Whether the measured saving lies within the prediction's interval."""
        return self.low_ns <= self.measured_ns <= self.high_ns

    @property
    def is_met(self) -> bool:
        """Whether the two intervals have a point in common."""
        return self.low_ns <= self.measured_high_ns and self.measured_low_ns <= self.high_ns


def read_runs(folders: Sequence[Path]) -> tuple[dict[str, Report], list[str]]:
    """Return the reports in folders, by the name of their folder, and a line for each file that is none.

    Args:
        folders: of a run each, or with such folders or files of slim records (:mod:`tools.predictions.records`) in them.
    """
    found: dict[str, Report] = {}
    refused = []
    for path in sorted({path for folder in folders for path in folder.rglob(REPORT)}):
        name = path.parent.name if path.parent.name not in found else str(path.parent)
        try:
            found[name] = read_report(path)
        except AdvisorError as error:
            refused.append(f"{path}: {error}")
    for path in sorted({path for folder in folders for path in folder.rglob(f"*{SUFFIX}")}):
        found |= {f"{path.parent.name}/{name}": report for name, report in read_records(path)}
    return found, refused


def observe(run: str, report: Report, calibration: Calibration | None = None) -> list[Observation]:
    """Return what a report predicts and measures.

    A report without intervals is predicted again from its records, for its figures come from an earlier way to predict.

    Args:
        run: its name.
        report: of it.
        calibration: from which intervals and graph calls are taken; left out: the report's own, and today's where it has none.
    """
    chains = {chain.id: chain for chain in report.chains}
    rows: list[Fusion | GraphRewrite] = [
        row for row in (*report.fusions, *report.rewrites) if is_predicted(row, chains) and not row.is_timed_alone
    ]
    each = {row.id: _observed(run, row, report, chains, calibration) for row in rows if row.step_delta_ci_ns is not None}
    each = {name: one for name, one in each.items() if one is not None}
    teams = [frozenset((row.id, *row.timed_with)) for row in rows if row.timed_with]
    alone = [one for name, one in each.items() if not any(name in team for team in teams)]
    return alone + [_sum([each[name] for name in sorted(team)]) for team in dict.fromkeys(teams) if team <= each.keys()]


def _observed(
    run: str, row: Fusion | GraphRewrite, report: Report, chains: Mapping[str, Chain], calibration: Calibration | None
) -> Observation | None:
    assert row.step_delta_ci_ns is not None
    rule = calibration or CALIBRATION
    chain = chains.get(row.chain_id) if isinstance(row, Fusion) else None
    predicted = _predicted_again(row, chain, report, rule)
    kind, saving_ns = kind_of(predicted), predicted.predicted_saving_ns
    if saving_ns is None or row.step_delta_ns is None:
        return None
    spread = spread_ns(
        predicted, chain, launch_ns=report.bandwidth.launch_ns, cost_ns=report.launch_cost_ns, call_ns=rule.graph_call_ns
    )
    low_ns, high_ns = saving_ns - rule.factors[kind] * spread, saving_ns + rule.factors[kind] * spread
    if calibration is None and row.predicted_low_ns is not None and row.predicted_high_ns is not None:
        low_ns, high_ns = row.predicted_low_ns, row.predicted_high_ns
    return Observation(
        run=run,
        id=row.id,
        name=row.kernel if isinstance(row, Fusion) else row.id,
        kind=kind,
        status=row.status.value,
        predicted_ns=saving_ns,
        low_ns=low_ns,
        high_ns=high_ns,
        spread_ns=spread,
        measured_ns=-row.step_delta_ns,
        measured_low_ns=-row.step_delta_ci_ns[1],
        measured_high_ns=-row.step_delta_ci_ns[0],
    )


def _predicted_again(
    row: Fusion | GraphRewrite, chain: Chain | None, report: Report, calibration: Calibration
) -> Fusion | GraphRewrite:
    """Predict as today what the records allow: chains, and the CUDA graph with this calibration's cost of a call; no layouts."""
    if row.id in LAYOUTS:
        return replace(row, predicted_saving_ns=None)
    is_old = row.predicted_low_ns is None
    if isinstance(row, Fusion):
        is_chain = is_old and chain is not None
        return replace(row, predicted_saving_ns=chain_saving_ns(row, chain, report.launch_cost_ns)) if is_chain and chain else row
    if kind_of(row) is not Kind.CUDA_GRAPH or row.predicted_saving_ns is None:
        return row
    without_call_ns = row.predicted_saving_ns + (0 if is_old else CALIBRATION.graph_call_ns)
    return replace(row, predicted_saving_ns=max(0, without_call_ns - calibration.graph_call_ns))


def _sum(parts: Sequence[Observation]) -> Observation:
    """Return several rewrites that were timed together as one; the ends of their intervals are added."""
    return Observation(
        run=parts[0].run,
        id=", ".join(part.id for part in parts),
        name=", ".join(part.name for part in parts),
        kind=None,
        status=parts[0].status,
        predicted_ns=sum(part.predicted_ns for part in parts),
        low_ns=sum(part.low_ns for part in parts),
        high_ns=sum(part.high_ns for part in parts),
        spread_ns=0.0,
        measured_ns=sum(part.measured_ns for part in parts),
        measured_low_ns=sum(part.measured_low_ns for part in parts),
        measured_high_ns=sum(part.measured_high_ns for part in parts),
    )


def observe_all(reports: Mapping[str, Report], calibration: Calibration | None = None) -> list[Observation]:
    """Return the observations of all runs; the arguments are :func:`observe`'s."""
    return list(_each(reports, calibration))


def _each(reports: Mapping[str, Report], calibration: Calibration | None) -> Iterator[Observation]:
    for run, report in reports.items():
        yield from observe(run, report, calibration)
