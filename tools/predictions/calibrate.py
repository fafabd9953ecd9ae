"""Factors of predictions' intervals from measured savings, and the coverage that they have on runs that did not give them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from fusion_advisor.fuse.prediction.interval import CALIBRATION, Calibration, Kind
from fusion_advisor.records import Report
from tools.predictions.observations import Observation, observe_all

COVERED = 0.9
_ROUND = 100
_NO_CALL = replace(CALIBRATION, graph_call_ns=0)


def calibrate(reports: Mapping[str, Report]) -> Calibration:
    """Return the calibration that the precise observations of some runs give; the cost of a graph's call is the code's.

    The factor of a kind is the score of rank ⌈0.9 (n + 1)⌉ among its n precise observations, the largest where there are fewer. A
    score is the error over the uncertainty of the prediction's parts. A kind without any takes the factor of all kinds together.

    Args:
        reports: of the runs, by name.
    """
    precise = [one for one in observe_all(reports, CALIBRATION) if one.is_precise and one.kind is not None]
    everything = factor_of(precise) if precise else max(CALIBRATION.factors.values())
    own = {kind: [one for one in precise if one.kind is kind] for kind in Kind}
    factors = {kind: factor_of(ones) if ones else everything for kind, ones in own.items()}
    return replace(CALIBRATION, factors=factors)


def graph_call_ns(reports: Mapping[str, Report]) -> int | None:
    """Return what a call through its CUDA graph cost runs beyond the device's time, in the median and whole µs; None without any.

    Reports hold predictions from which the code's own figure is taken, so changing that one makes old reports unreadable here.

    Args:
        reports: of the runs, by name; graphs that were measured narrowly count.
    """
    graphs = [one for one in observe_all(reports, _NO_CALL) if one.kind is Kind.CUDA_GRAPH and one.is_precise]
    return 1000 * round(max(0.0, median(one.predicted_ns - one.measured_ns for one in graphs)) / 1000) if graphs else None


def factor_of(observations: Sequence[Observation]) -> float:
    """Return the factor for observations of one kind, in hundredths, rounded up.

    Args:
        observations: at least one, all precise.
    """
    scores = sorted(abs(one.predicted_ns - one.measured_ns) / max(one.spread_ns, 1.0) for one in observations)
    rank = min(math.ceil(COVERED * (len(scores) + 1)), len(scores))
    return math.ceil(scores[rank - 1] * _ROUND) / _ROUND


def left_out(reports: Mapping[str, Report]) -> list[Observation]:
    """Return the observations of each run with the intervals that all other runs give.

    Args:
        reports: of two runs or more, by name.
    """
    found = []
    for run, report in reports.items():
        others = {name: other for name, other in reports.items() if name != run}
        found += observe_all({run: report}, calibrate(others))
    return found
