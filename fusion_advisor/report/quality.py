"""Whether a run's data can be trusted: what was dropped, whether the clocks differed, which steps varied, in words."""

from __future__ import annotations

from fusion_advisor import units
from fusion_advisor.records import ModelCheck, Report, Timing
from fusion_advisor.report import baseline_rows, clocks, shared_rows
from fusion_advisor.report.escape import plural, visible

MOST_SPREAD = 0.1
"""Share of a median by which its interval may reach to one side before the median is doubted."""


def verdict(report: Report) -> tuple[str, tuple[str, ...]]:
    """Whether the trace can be trusted: a tone and the sentences that say why."""
    rows = _rows(report)
    return ("warn" if any(is_bad for is_bad, _ in rows) else "gain"), tuple(sentence for _, sentence in rows)


def warnings(report: Report) -> tuple[str, ...]:
    """Only those sentences of :func:`verdict` that speak against the figures."""
    return tuple(sentence for is_bad, sentence in _rows(report) if is_bad)


def _rows(report: Report) -> list[tuple[bool, str]]:
    if report.remembered_from:
        return [(False, _remembered(report)), *_measured(report)]
    return _measured(report)


def _remembered(report: Report) -> str:
    return (
        f"Chains, the traced eager step and each rewrite's time come from run {visible(report.remembered_from, 80)}. This run "
        "built the kernels, checked all numbers and timed the whole step; `--fresh` times every rewrite again."
    )


def _measured(report: Report) -> list[tuple[bool, str]]:
    data = report.quality
    launches, kernels = plural(data.launches, "launch", "launches"), plural(data.kernels, "kernel")
    if data.launches == data.kernels:
        rows = [(False, f"{launches}, {kernels} in the trace: nothing was dropped.")]
    else:
        rows = [(True, f"{launches} but {kernels} in the trace: shares lack the missing kernels.")]
    joined = f"{units.share(data.joined_share)} of the captured device time is joined to an op and a source line."
    if data.captured_device_ns:  # else no graph's ops were traced: its reason is among the warnings
        rows.append((data.joined_share < 0.95, joined))
        eager, captured = units.duration(data.eager_device_ns), units.duration(data.captured_device_ns)
        rows.append((False, f"Kernel time: {data.reconciliation or f'eager {eager}, captured {captured}'}."))
    if attention := shared_rows.attention_line(report):
        rows.append((False, attention))
    rows += clocks.rows(report)
    if doubt := unsteady(report):
        rows.append((True, doubt))
    if report.effort == "quick":
        quick = "`--quick` chose rewrites by their own times, and no A/A shows how far the step differs from itself"
        rows.append((False, f"{quick}: a run without it proves each gain."))
    if report.noise_share is not None:
        noise = f"Noise: the same step timed twice differs by {units.share(report.noise_share)}"
        rows.append((report.noise_share > 0.02, f"{noise}. Smaller gains count as none."))
    for broken in data.graph_breaks:
        rows.append((True, f"Graph break: {visible(broken.reason, 240)} ({visible(broken.source, 120)})"))
    rows += [(True, warning) for warning in (*data.warnings, *report.warnings)]
    return rows


def is_unsteady(timing: Timing) -> bool:
    """Whether another run need not find the same median."""
    reach_ns = max(timing.ci_high_ns - timing.median_ns, timing.median_ns - timing.ci_low_ns)
    return reach_ns > MOST_SPREAD * timing.median_ns


def unsteady(report: Report) -> str:
    """Name the ways that varied while they were timed; empty where there is none."""
    varied = [
        f"{name} {units.duration(wall.median_ns)} {units.duration_interval(wall.ci_low_ns, wall.ci_high_ns)}"
        for name, wall in baseline_rows.timed(report)
        if is_unsteady(wall)
    ]
    if not varied:
        return ""
    return (
        f"Unstable timings, uncertain by more than {MOST_SPREAD:.0%}: {', '.join(varied)}. Another run may find other medians. "
        "Rerun on an idle machine."
    )


def likeliest_line(check: ModelCheck) -> str:
    """Say how often the fused and the eager model call the same tokens likeliest, with eager's own figure where they differ."""
    if check.argmax_agreement is None:
        return ""
    five = "" if check.top5_agreement is None else f", the same five {units.share(check.top5_agreement)}"
    line = f"Same likeliest token as eager {units.share(check.argmax_agreement)}{five}"
    if min(check.argmax_agreement, 1.0 if check.top5_agreement is None else check.top5_agreement) == 1:
        return f"{line}."
    if check.eager_argmax_agreement is None or check.eager_top5_agreement is None:
        return f"{line}; tokens whose scores lie closer than the rounding change places, and eager's own figure was not recorded."
    own = f"{units.share(check.eager_argmax_agreement)} and {units.share(check.eager_top5_agreement)}"
    return f"{line}; eager's own against the oracle {own}: tokens whose scores lie closer than the rounding change places."
