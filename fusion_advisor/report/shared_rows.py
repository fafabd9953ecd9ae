"""The rows and sentences that every view of a report shares, so that its tables cannot disagree.

Nothing is measured or judged here: ratios of two figures of the report, sums that a chart needs, and words for a status.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fusion_advisor import units
from fusion_advisor.records import (
    COMPILED,
    Chain,
    Finding,
    FrozenValue,
    Fusion,
    GraphRewrite,
    Match,
    NoMatch,
    Report,
    Status,
    StepProfile,
    Timing,
)
from fusion_advisor.report import baseline_rows
from fusion_advisor.report.escape import plural, visible
from fusion_advisor.report.training import rows as training
from fusion_advisor.timing.host_timer import CPU_TIME
from fusion_advisor.timing.paired import compare_rounds


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a status is shown: sign, words and tone; never by colour alone."""

    mark: str
    words: str
    tone: str
    """``gain``, ``loss``, ``warn`` or ``plain``."""


_MOST_SOURCES = 4
"""Frozen weights and buffers that a sentence names; the report's JSON has them all."""

UNCHANGED, is_unchanged = baseline_rows.UNCHANGED, baseline_rows.is_unchanged

VERDICTS = {
    Status.PLANNED: Verdict("·", "planned, not applied", "plain"),
    Status.KEPT: Verdict("✓", "kept", "gain"),
    Status.WITHIN_NOISE: Verdict("~", "within noise, removed", "warn"),
    Status.TOO_LITTLE: Verdict("~", "too little, removed", "warn"),
    Status.UNDECIDED: Verdict("?", "could not tell", "warn"),
    Status.SLOWER: Verdict("✗", "slower, removed", "loss"),
    Status.WRONG_NUMBERS: Verdict("✗", "wrong numbers, removed", "loss"),
    Status.BUILD_FAILED: Verdict("✗", "did not compile", "loss"),
    Status.NOT_MATCHED: Verdict("–", "not matched", "plain"),
    Status.NOT_REPLACED: Verdict("!", "replaced nothing", "warn"),
    Status.ABSORBED: Verdict("→", "part of a larger kernel", "plain"),
}


def reasons(rows: Iterable[Fusion | GraphRewrite], *statuses: Status) -> list[str]:
    """Say of each rewrite that came to such an end which it is, and why."""
    return [
        f"{row.id} {row.kernel if isinstance(row, Fusion) else row.name}: {row.reason}" for row in rows if row.status in statuses
    ]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One line of the before/after table, formatted."""

    name: str
    before: str
    before_spread: str
    after: str
    after_spread: str
    change: str
    speedup: str
    note: str = ""


def answers(report: Report) -> dict[str, Match | NoMatch]:
    """The library's answer by chain id."""
    return {answer.chain_id: answer for answer in report.answers}


def fusion_by_chain(report: Report) -> dict[str, Fusion]:
    """The fusion by chain id; the last one where a chain was tried twice."""
    return {fusion.chain_id: fusion for fusion in report.fusions}


def device_word(report: Report) -> str:
    """``GPU`` or ``CPU``: what column heads call the device."""
    return "CPU" if report.environment.device_kind == "cpu" else "GPU"


def context_line(report: Report) -> str:
    """Model, device, dtype and shapes in one line."""
    work = report.workload
    size = f"batch {work.batch}" + (f" × {work.seq_len}" if work.seq_len else "")
    size += f", {work.context} cached" if work.context else ""
    size += f" + {work.new_tokens} new" if work.new_tokens else ""
    revision = f"@{work.revision[:7]}" if work.revision else ""
    parts = [visible(work.model_id, 80) + revision, report.environment.device_name, work.dtype, work.phase, size]
    parts += [f"{len(report.ranks.rows)} ranks"] if report.ranks is not None else []
    return " · ".join(part for part in parts if part)


def caveats(report: Report) -> tuple[str, ...]:
    """Caveats of the figures, in sentences; shown with every headline."""
    work, lines = report.workload, []
    if work.layers is not None:
        whole = f" of {work.total_layers}" if work.total_layers else ""
        lines.append(f"Only {work.layers}{whole} layers were run (--layers): every time is of the cut model.")
    if work.weights == "random":
        lines.append(
            "Random weights: speed does not depend on them, but the numerics say nothing about a trained model's accuracy."
        )
    if report.tolerance is not None:
        lines.append(f"The limit on errors is the user's, not eager's own error: {report.tolerance}.")
    if report.frozen:
        lines.append(_contract(report.frozen))
    if report.effort == "quick":
        lines.append("Chosen by the rewrites' own times (--quick): no A/A shows how far the step differs from itself.")
    if report.keep == "verified":
        lines.append("What stays was not chosen by time (--keep verified): a rewrite may make the step slower.")
    if report.is_exact:
        lines.append("Kernels round each op's result as eager does (--exact); each says whether it has eager's bits.")
    if report.quality.graph_breaks and report.step_before is not None:
        lines.append(
            f"The call has {plural(len(report.quality.graph_breaks), 'graph break')}: the verdict on a rewrite is of the "
            "captured graphs alone, the headline of the whole call."
        )
    for fusion in report.fusions:
        if fusion.implausible:
            lines.append(f"{fusion.id}: its times alone are left out: {fusion.implausible}, measured again and again.")
    if report.environment.device_kind == "cpu":
        lines.append("Measured on a CPU: nothing here predicts a GPU.")
    return tuple(lines)


def _contract(frozen: Sequence[FrozenValue]) -> str:
    """The contract of a model with frozen values, and the tensors that the values were made from."""
    sources = list(dict.fromkeys(source for value in frozen for source in value.sources))
    named = ", ".join(visible(source, 60) for source in sources[:_MOST_SOURCES])
    more = f" and {len(sources) - _MOST_SOURCES} more" if len(sources) > _MOST_SOURCES else ""
    total = units.size(sum(value.held_bytes for value in frozen))
    return (
        f"Frozen (--freeze): {plural(len(frozen), 'value')} of {total} made of {named}{more}. The contract: weights and buffers "
        "are not written while the fusion is in place, or fused.refresh() is called after the write."
    )


def generation_lines(report: Report) -> tuple[str, ...]:
    """Time of a whole ``generate`` call and whether its tokens are eager's; empty for a single step."""
    call = report.generation
    if call is None:
        return ()

    def sides(before_ns: int, after_ns: int) -> str:
        return units.duration(before_ns) + (f" → {units.duration(after_ns)}" if after_ns else "")

    whole = sides(call.before.median_ns, call.after.median_ns if call.after else 0)
    prefill, decode = sides(call.prefill_before_ns, call.prefill_after_ns), sides(call.decode_before_ns, call.decode_after_ns)
    lines = [
        f"generate: {call.prompt_tokens} prompt + {call.new_tokens} new tokens in {whole}; "
        f"prefill step {prefill}, decode step {decode}.",
        "Chains and kernels here are the decode step's; the prefill has its own report in prefill/.",
    ]
    if call.after is not None:
        if call.first_divergence is None:
            words = f"All {call.new_tokens} greedy tokens are eager's."
        else:
            gap = 0.0 if call.logit_gap is None else call.logit_gap
            words = (
                f"Greedy tokens part from eager's at new token {call.first_divergence}, where eager's choice led by {gap:.3g}."
            )
        if call.original_calls:
            words += f" {call.original_calls} of {call.new_tokens} steps ran the original ops."
        lines.append(words)
    return tuple(lines)


def step_lines(report: Report) -> tuple[str, ...]:
    """Sentences about a step that is more than one forward pass."""
    return training.lines(report) or generation_lines(report)


def launch_line(report: Report) -> str:
    """Whether the eager step waits for its launches, and how far each remedy could go; empty where it was not judged.

    The eager time is the headline's, so that one section names one: the verdict's own may be of another measurement of the run.
    """
    found = report.launch_verdict
    if found is None:
        return ""
    wall_ns = report.before.wall.median_ns if report.before.wall else found.wall_ns
    idle = max(0, wall_ns - found.busy_ns) / max(wall_ns, 1)
    kernels = f"kernels run for {units.duration(found.busy_ns)} of its {units.duration(wall_ns)}"
    graph_ns, both_ns = found.graph_floor_ns, found.both_floor_ns
    below = _below(report, both_ns)
    if idle <= found.limit_share:
        bounds = f"Lower bound for fusion, with the model's own GEMM and attention kernels: {units.duration(both_ns)}."
        return f"The GPU is busy for most of the eager step: {kernels} (idle {units.share(idle)}). {bounds}{below}"
    fusion_ns = max(both_ns, wall_ns * found.launches_fused // max(found.launches, 1))
    return (
        f"Part of the eager step is the GPU waiting for Python: {kernels} (idle {units.share(idle)}). Lower bounds, with the "
        f"model's own GEMM and attention kernels: CUDA graph {units.duration(graph_ns)}, fusion {units.duration(fusion_ns)}, "
        f"both {units.duration(both_ns)}.{below}"
    )


def _below(report: Report, both_ns: int) -> str:
    """Why our step is below the bound of fusion and a CUDA graph; empty where it is not."""
    pair = step_pair(report)
    if pair is None or is_unchanged(report) or pair[2].median_ns >= both_ns:
        return ""
    return f" Ours, {units.duration(pair[2].median_ns)}, is below because rewrites replaced GEMM or attention kernels too."


def step_pair(report: Report) -> tuple[str, Timing, Timing] | None:
    """The step that the headline speaks of, before and after: wall time, else device time."""
    if report.after is None:
        return None
    if report.before.wall and report.after.wall:
        return clock_word(report.after.wall), report.before.wall, report.after.wall
    if report.before.device and report.after.device:
        return "device time", report.before.device, report.after.device
    return None


def clock_word(timing: Timing) -> str:
    """Name the clock that a step's host-side time was read from."""
    return "CPU time" if timing.method == CPU_TIME else "wall time"


def speedup_bounds(before: Timing, after: Timing) -> tuple[float, float, float]:
    """Ratio of before to after with its 95 % interval, from their paired rounds: the statistic that rewrites are kept by."""
    found = compare_rounds(before.times_ns, after.times_ns)
    return found.ratio, found.ratio_low, found.ratio_high


def finding_lines(report: Report) -> tuple[tuple[str, str, str], ...]:
    """Findings that need no kernel, largest gain first: title with gain, observation, change."""
    return tuple((f"{one.id} {one.title}: {_gain(one)}", one.reason, one.change) for one in report.findings)


def _gain(one: Finding) -> str:
    if one.spared_bytes:
        return f"at least {units.size(one.spared_bytes)} of memory"
    gain = f"{units.duration(one.gain_ns)} measured" if one.is_measured else f"at most {units.duration(one.gain_ns)}"
    return f"{gain} of device time ({units.share(one.share)})"


def attention_line(report: Report) -> str:
    """Which backends ran attention on each side; empty where none did."""
    parts = []
    for step in steps(report):
        names = ", ".join(f"{name} ({plural(count, 'kernel')}, {units.duration(ns)})" for name, count, ns in step.attention)
        if names:
            parts.append(f"{step.label} {names}")
    return f"Attention ran as: {'; '.join(parts)}." if parts else ""


def comparisons(report: Report) -> tuple[Comparison, ...]:
    """The before/after table; empty for a profile."""
    before, after = report.before, report.after
    if after is None or is_unchanged(report):
        return ()
    rows = [
        _compared(baseline_rows.step_label(before.wall), before.wall, after.wall, "both as a user calls them"),
        _compared(
            "Step, after a rest",
            before.rested,
            after.rested,
            "single steps at full clock: the power limit does not throttle them",
        ),
        _compared("Step, device only", before.device, after.device, "CUDA graph replay, no host in the way"),
        _compared("Captured step", report.step_before, report.step_after, _captured_note(report.step_before)),
        _counted("Kernel time, one traced step", before.device_ns, after.device_ns, units.duration),
        _counted("Kernel launches", before.launches, after.launches, units.number),
        _counted("Peak memory", before.peak_memory_bytes, after.peak_memory_bytes, units.size),
    ]
    return tuple(row for row in rows if row is not None)


def _captured_note(timing: Timing | None) -> str:
    where = "after rests, " if timing is not None and timing.rest else ""
    return f"{where}interleaved: without any rewrite, with all kept ones"


def _compared(name: str, before: Timing | None, after: Timing | None, note: str) -> Comparison | None:
    if before is None or after is None:
        return None
    ratio, low, high = speedup_bounds(before, after)
    return Comparison(
        name,
        units.duration(before.median_ns),
        units.duration_interval(before.ci_low_ns, before.ci_high_ns),
        units.duration(after.median_ns),
        units.duration_interval(after.ci_low_ns, after.ci_high_ns),
        units.relative_change(before.median_ns, after.median_ns),
        f"{units.speedup(ratio)} {units.speedup_interval(low, high)}",
        note,
    )


def _counted(name: str, before: int, after: int, show: object) -> Comparison | None:
    if not before and not after:
        return None
    text = show if callable(show) else str
    return Comparison(name, text(before), "", text(after), "", units.relative_change(before, after), "")


def tiles(report: Report) -> tuple[tuple[str, str, str], ...]:
    """Counts of the first screen: (name, before → after, change)."""
    if step_pair(report) is None or is_unchanged(report):
        return (("Launches", units.number(report.before.launches), ""),) if report.before.launches else ()
    names = {"Kernel launches": "Launches", "Peak memory": "Peak memory"}
    return tuple((names[row.name], f"{row.before} → {row.after}", row.change) for row in comparisons(report) if row.name in names)


def fusion_groups(report: Report) -> tuple[tuple[str, str, tuple[Fusion, ...]], ...]:
    """Fusions by what became of them: (heading, anchor, fusions), empty groups left out."""
    groups = (
        ("Kept", "kept", (Status.KEPT,)),
        (
            "Removed",
            "removed",
            (Status.WITHIN_NOISE, Status.TOO_LITTLE, Status.SLOWER, Status.WRONG_NUMBERS, Status.NOT_REPLACED),
        ),
        ("Could not tell", "undecided", (Status.UNDECIDED,)),
        ("Could not build", "not-built", (Status.BUILD_FAILED,)),
        ("Planned", "planned", (Status.PLANNED, Status.NOT_MATCHED)),
    )
    rows = ((name, anchor, tuple(f for f in report.fusions if f.status in statuses)) for name, anchor, statuses in groups)
    return tuple(row for row in rows if row[2])


def unmatched(report: Report) -> tuple[tuple[Chain, str], ...]:
    """Chains without a kernel, and why."""
    cells = ((chain, *kernel_cell(report, chain)) for chain in report.chains)
    return tuple((chain, why) for chain, kernel, why in cells if not kernel)


def kernel_cell(report: Report, chain: Chain) -> tuple[str, str]:
    """The kernel's name and where it comes from, or an empty name and the reason for none."""
    answer = answers(report).get(chain.id)
    if isinstance(answer, Match):
        origin = (
            f"library{', variant ' + answer.variant if answer.variant else ''}"
            if answer.is_library
            else "generated from the chain"
        )
        bound = ", ".join(f"{name}={value:g}" for name, value in answer.constants)
        return answer.kernel, f"{origin}{', ' + bound if bound else ''}"
    if isinstance(answer, NoMatch):
        return "", f"{answer.reason} ({answer.code})"
    return "", "the library was not asked"


def steps(report: Report) -> tuple[StepProfile, ...]:
    """The profiles that exist, in the order in which they were taken."""
    compiled = baseline_rows.best_compile(report)
    name = "" if compiled is None else f"{COMPILED}{compiled[0]}"
    peer = next((row.step for row in report.baselines if row.name == name), None)
    return tuple(step for step in (report.before, report.captured, report.after, peer) if step is not None)


def category_rows(report: Report) -> tuple[tuple[str, tuple[tuple[int, int] | None, ...]], ...]:
    """For each category, (kernels, ns) in each of :func:`steps`, or None where a step has none."""
    shown = steps(report)
    tables = [{name: (count, ns) for name, count, ns in step.categories} for step in shown]
    names = sorted({name for table in tables for name in table}, key=lambda name: -max(t.get(name, (0, 0))[1] for t in tables))
    return tuple((name, tuple(table.get(name) for table in tables)) for name in names)
