"""Tables and a picture of predicted against measured savings."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from statistics import median

from fusion_advisor import units
from fusion_advisor.fuse.prediction.interval import Calibration, Kind
from tools.predictions.observations import PRECISE, TOGETHER, Observation

_WORST = 12
_SHARES = (0.5, 0.9)
HEAD = (
    "| {} | Measured | Judged | Median error | 90th percentile | Bias | Sign right | Within interval | Half width |\n"
    "|---|--:|--:|--:|--:|--:|--:|--:|--:|\n"
)


def percentile(values: Iterable[float], share: float) -> float:
    """Return the smallest value that at least a share of the values does not exceed.

    Args:
        values: at least one.
        share: between 0 and 1.
    """
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _line(name: str, observations: Sequence[Observation]) -> str:
    judged = [one for one in observations if one.is_precise]
    signed = [one for one in observations if one.has_sign]
    signs = f"{sum(one.is_sign_right for one in signed)} of {len(signed)}"
    if not judged:
        return f"| {name} | {len(observations)} | 0 | | | | {signs} | | |"
    errors = [abs(one.error_share) for one in judged]
    middle, high = (percentile(errors, share) for share in _SHARES)
    bias = median(one.error_share for one in judged)
    covered = sum(one.is_covered for one in judged)
    width = median((one.high_ns - one.low_ns) / 2 / max(abs(one.predicted_ns), 1) for one in judged)
    return (
        f"| {name} | {len(observations)} | {len(judged)} | {middle:.1%} | {high:.1%} | {bias:+.1%} | {signs} "
        f"| {covered} of {len(judged)} | {width:.0%} |"
    )


def summary(observations: Sequence[Observation]) -> str:
    """Return what all observations say together: error, sign and coverage.

    Args:
        observations: with the intervals that are judged.
    """
    judged = [one for one in observations if one.is_precise]
    if not judged:
        return f"{len(observations)} savings were predicted and measured; none was measured narrowly enough to judge."
    errors = [abs(one.error_share) for one in judged]
    signed = [one for one in observations if one.has_sign]
    others = [one for one in observations if not one.is_precise]
    silent = sum(one.predicted_ns == 0 for one in signed)
    covered = sum(one.is_covered for one in judged)
    right = sum(one.is_sign_right for one in signed)
    met = sum(one.is_met for one in others)
    runs = len({one.run for one in observations})
    return (
        f"{len(observations)} savings of {runs} runs were predicted and measured. {len(judged)} were measured within "
        f"±{PRECISE:.0%} and are judged: the median error is {percentile(errors, _SHARES[0]):.1%}, the 90th percentile "
        f"{percentile(errors, _SHARES[1]):.1%}, and {covered} ({covered / len(judged):.1%}) lie within their intervals. "
        f"Of {len(signed)} that are faster or slower for certain, {right} ({right / max(len(signed), 1):.1%}) were predicted "
        f"with the right sign; {silent} of the others were predicted as 0. Of the {len(others)} that are not judged, {met} "
        "have a measured interval that meets the predicted one."
    )


def markdown(observations: Sequence[Observation], calibration: Calibration | None = None) -> str:
    """Return all tables.

    Args:
        observations: with the intervals that are judged.
        calibration: shown with the kinds; None: no factors are shown.
    """
    parts = [summary(observations)]
    names = [*map(str, Kind), TOGETHER]
    parts.append(_grouped("Kind", observations, lambda one: one.group, names) + "\n" + _line("all", observations))
    if calibration is not None:
        factors = ", ".join(f"{kind} {factor:.2f}" for kind, factor in calibration.factors.items())
        parts.append(f"Factors: {factors}. A call through a CUDA graph: {units.duration(calibration.graph_call_ns)}.")
    rewrites = [one for one in observations if one.kind in (Kind.PASS, Kind.OTHER_GEMM, Kind.ALONE)]
    if rewrites:
        parts.append(_grouped("Rewrite", rewrites, lambda one: one.id))
    parts.append(_grouped("Run", observations, lambda one: one.run))
    parts.append(_thresholds(observations))
    parts.append(_grouped("Predicted saving over the measurement's noise", observations, _size, _SIZES))
    worst = sorted((one for one in observations if one.is_precise), key=lambda one: -abs(one.error_share))[:_WORST]
    parts.append("The largest errors:\n\n" + _rows(worst))
    apart = [one for one in observations if not one.is_precise and not one.is_met]
    if apart:
        parts.append("Not judged, and the two intervals do not meet:\n\n" + _rows(apart))
    return "\n\n".join(parts) + "\n"


def _grouped(
    title: str, observations: Sequence[Observation], key: Callable[[Observation], str], names: Sequence[str] = ()
) -> str:
    groups: dict[str, list[Observation]] = {name: [] for name in names}
    for one in observations:
        groups.setdefault(key(one), []).append(one)
    return HEAD.format(title) + "\n".join(_line(name, group) for name, group in groups.items() if group)


_THRESHOLDS = (0.05, 0.1, 0.2, 0.3, 0.5)


def _thresholds(observations: Sequence[Observation]) -> str:
    """What the errors were if wider or only narrower measurements had judged them."""
    head = "| Measured within | Judged | Median error | 90th percentile | Within interval |\n|---|--:|--:|--:|--:|\n"
    lines = []
    for share in _THRESHOLDS:
        judged = [one for one in observations if one.is_within(share)]
        if judged:
            middle, high = (percentile((abs(one.error_share) for one in judged), part) for part in _SHARES)
            covered = sum(one.is_covered for one in judged) / len(judged)
            lines.append(f"| ±{share:.0%} | {len(judged)} | {middle:.1%} | {high:.1%} | {covered:.0%} |")
    return head + "\n".join(lines)


_ENDS = (2, 10, 50)
_SIZES = ("below 2", "2 to 10", "10 to 50", "50 and more")


def _size(one: Observation) -> str:
    ratio = abs(one.predicted_ns) / max(one.noise_ns, 1)
    return _SIZES[sum(ratio >= end for end in _ENDS)]


def _rows(observations: Sequence[Observation]) -> str:
    head = "| Run | Rewrite | Predicted | Interval | Measured | Interval | Error |\n|---|---|--:|--:|--:|--:|--:|\n"
    return head + "\n".join(
        f"| {one.run} | {one.id}{'' if one.name == one.id else f' {one.name}'} | {units.delta(-one.predicted_ns)} "
        f"| {units.delta_interval(-one.high_ns, -one.low_ns)} | {units.delta(-one.measured_ns)} "
        f"| {units.delta_interval(-one.measured_high_ns, -one.measured_low_ns)} "
        f"| {f'{one.error_share:+.0%}' if one.measured_ns else ''} |"
        for one in observations
    )


_COLOURS: Mapping[str, str] = {
    Kind.CHAIN: "#0969da",
    Kind.LINEAR: "#bf8700",
    Kind.NORM_LINEAR: "#b3261e",
    Kind.ALONE: "#8250df",
    Kind.PASS: "#1a7f37",
    Kind.OTHER_GEMM: "#57606a",
    Kind.CUDA_GRAPH: "#24292f",
    TOGETHER: "#8c959f",
}
_LEFT, _SIDE, _LEAST_NS = 60, 460, 1_000


def picture(observations: Sequence[Observation]) -> str:
    """Return predicted over measured savings of what is judged, both on a scale of powers of ten; a dot on the line is right.

    Args:
        observations: savings below 1 µs and predictions that a step becomes slower lie at the edge.
    """
    judged = [one for one in observations if one.is_precise and one.measured_ns > 0]
    most = max([10 * _LEAST_NS, *(max(one.measured_ns, one.high_ns) for one in judged)])
    decades = math.ceil(math.log10(most / _LEAST_NS))

    def at(ns: float) -> float:
        return _SIDE * math.log10(max(ns, _LEAST_NS) / _LEAST_NS) / decades

    marks = []
    for decade in range(decades + 1):
        place, label = at(_LEAST_NS * 10**decade), units.duration(_LEAST_NS * 10**decade)
        marks.append(
            f'<text x="{_LEFT - 6}" y="{_SIDE - place + 24:.1f}" text-anchor="end">{label}</text>'
            f'<text x="{_LEFT + place:.1f}" y="{_SIDE + 36}" text-anchor="middle">{label}</text>'
        )
    for one in judged:
        x, colour = _LEFT + at(one.measured_ns), _COLOURS[one.group]
        low, middle, high = (_SIDE + 20 - at(ns) for ns in (one.low_ns, one.predicted_ns, one.high_ns))
        marks.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}" stroke="{colour}" stroke-opacity="0.5"/>'
            f'<circle cx="{x:.1f}" cy="{middle:.1f}" r="3" fill="{colour}">'
            f"<title>{escape(f'{one.run} {one.id} {one.name}')}</title></circle>"
        )
    for row, (group, colour) in enumerate(_COLOURS.items()):
        y = 30 + 16 * row
        marks.append(
            f'<circle cx="{_LEFT + 14}" cy="{y}" r="3" fill="{colour}"/><text x="{_LEFT + 22}" y="{y + 4}">{escape(group)}</text>'
        )
    width, height = _LEFT + _SIDE + 30, _SIDE + 64
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="11">'
        '<rect width="100%" height="100%" fill="#ffffff"/>'
        f'<text x="{_LEFT}" y="13">predicted saving and its interval, over the measured saving</text>'
        f'<rect x="{_LEFT}" y="20" width="{_SIDE}" height="{_SIDE}" fill="none" stroke="#57606a"/>'
        f'<line x1="{_LEFT}" y1="{_SIDE + 20}" x2="{_LEFT + _SIDE}" y2="20" stroke="#57606a" stroke-dasharray="3 3"/>'
        f"{''.join(marks)}"
        f'<text x="{_LEFT + _SIDE}" y="{_SIDE + 54}" text-anchor="end">measured saving of a step</text></svg>\n'
    )


def write(to: Path, observations: Sequence[Observation], calibration: Calibration) -> None:
    """Write ``predictions.md``, ``predictions.json`` and ``predictions.svg``.

    Args:
        to: folder; it is made.
        observations: with the intervals that are judged.
        calibration: that their runs give.
    """
    to.mkdir(parents=True, exist_ok=True)
    rows = [
        {**asdict(one), "low_ns": round(one.low_ns), "high_ns": round(one.high_ns), "spread_ns": round(one.spread_ns)}
        for one in observations
    ]
    text = ",\n".join(json.dumps(row) for row in rows)
    (to / "predictions.json").write_text(f"[\n{text}\n]\n", encoding="utf-8")
    (to / "predictions.md").write_text(markdown(observations, calibration), encoding="utf-8")
    (to / "predictions.svg").write_text(picture(observations), encoding="utf-8")
