"""The rows and sentences that every view of a report shares, so that its tables cannot disagree.

Nothing is measured or judged here: ratios of two figures of the report, sums that a chart needs, and words for a status.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fusion_advisor import units
from fusion_advisor.records import (
    COMPILED,
    ULP_ENDS,
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
from fusion_advisor.report import baseline_rows, clocks
from fusion_advisor.report.escape import plural, visible
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


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One kernel name with its counts and time on both sides."""

    name: str
    category: str
    before_count: int
    before_ns: int
    after_count: int
    after_ns: int


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
    if report.keep == "verified":
        lines.append("What stays was not chosen by time (--keep verified): a rewrite may make the step slower.")
    if report.is_exact:
        lines.append("Kernels round each op's result as eager does (--exact); each says whether it has eager's bits.")
    if report.quality.graph_breaks and report.step_before is not None:
        lines.append(
            f"The call has {plural(len(report.quality.graph_breaks), 'graph break')}: the verdict on a rewrite is of the "
            "captured graphs alone, the headline of the whole call."
        )
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
    if report.training is None:
        return generation_lines(report)
    return (
        f"Training step: forward, loss ({report.training.loss}) and backward in train() mode, without an optimizer.",
        "Fusions are for inference: no chain was looked for.",
    )


def module_rows(report: Report, limit: int) -> tuple[tuple[str, str, str, str, str, str], ...]:
    """Modules of a training step, largest first: (path, modules, launches, forward, backward, share); empty for other phases."""
    if report.training is None:
        return ()
    whole = max(report.training.forward_ns + report.training.backward_ns, 1)
    return tuple(
        (
            row.path or "outside every submodule",
            str(row.modules),
            units.number(row.launches),
            units.duration(row.forward_ns),
            units.duration(row.backward_ns),
            units.share((row.forward_ns + row.backward_ns) / whole),
        )
        for row in report.training.modules[:limit]
    )


def launch_line(report: Report) -> str:
    """Whether the eager step waits for its launches, and how far each remedy could go; empty where it was not judged."""
    found = report.launch_verdict
    if found is None:
        return ""
    idle = units.share(found.idle_ns / max(found.wall_ns, 1))
    step = f"the eager step ({units.duration(found.wall_ns)} wall time, {plural(found.launches, 'launch', 'launches')})"
    if not found.is_launch_bound:
        return f"Not launch-bound: the GPU waits for the host during {idle} of {step}."
    return (
        f"Launch-bound: the GPU waits for the host during {idle} of {step}. Lower bounds, its GEMMs and attention as they are: "
        f"a CUDA graph alone {units.duration(found.graph_floor_ns)}, fusion alone {units.duration(found.fusion_floor_ns)}, "
        f"both {units.duration(found.both_floor_ns)}."
    )


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
    return tuple(
        (f"{one.id} {one.title}: {_gain(one)} of device time ({units.share(one.share)})", one.reason, one.change)
        for one in report.findings
    )


def _gain(one: Finding) -> str:
    return f"{units.duration(one.gain_ns)} measured" if one.is_measured else f"at most {units.duration(one.gain_ns)}"


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
        _compared(
            "Step, wall clock", before.wall, after.wall, "eager as it is called, against the rewritten model as it is called"
        ),
        _compared("Step, after a rest", before.rested, after.rested, "single steps that the power limit does not hold down"),
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
    """The band's figures: (name, before → after, change), the first of them the headline's own."""
    pair = step_pair(report)
    if pair is None or is_unchanged(report):
        wall = report.before.wall
        rows = [("Eager step", units.duration(wall.median_ns), clock_word(wall))] if wall else []
        if report.before.launches:
            rows.append(("Kernel time", units.duration(report.before.device_ns), "one traced step"))
            rows.append(("Launches", units.number(report.before.launches), ""))
        return tuple(rows)
    names = {"Step, wall clock": "Step", "Kernel launches": "Launches", "Peak memory": "Peak memory"}
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


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that one site moves, before and after, and the rates."""

    bytes_before: str
    bytes_after: str
    speed_after: str
    share_of_copy: str


def traffic(report: Report, fusion: Fusion) -> Traffic | None:
    """Bytes of one site; None where nothing tells. The ops' own traffic before, each outside value once after."""
    chain = next((chain for chain in report.chains if chain.id == fusion.chain_id and chain.sites), None)
    if chain is None and fusion.kernel_bytes is None:
        return None
    before = "not known" if chain is None else units.size(chain.moved_bytes / chain.runs)
    floor = float(fusion.kernel_bytes or 0) if chain is None else chain.floor_bytes / chain.runs
    if fusion.chain_after is None:
        return Traffic(before, units.size(floor), "not timed", "")
    speed = floor * 1e9 / max(fusion.chain_after.median_ns, 1)
    of_copy = f"{units.share(speed / max(report.bandwidth.copy_bytes_per_s, 1))} of the copy measured here"
    return Traffic(before, units.size(floor), units.bandwidth(speed), of_copy)


def bits_line(report: Report, fusion: Fusion) -> str:
    """Say whether an exact kernel's results have eager's bits; empty without --exact."""
    checked = fusion.numerics
    if not report.is_exact or checked is None:
        return ""
    if checked.is_bit_equal:
        return f"bit-equal to eager on {plural(checked.elements, 'element')}"
    differing = checked.elements - checked.bit_equal_elements
    return f"not bit-equal: {units.number(differing)} of {plural(checked.elements, 'element')} differ: {checked.differs_by}"


def special_line(fusion: Fusion) -> str:
    """Say what a check on special values found: faults, and differences that were declared; empty where nothing differs."""
    checked = fusion.numerics
    if checked is None:
        return ""
    parts = [f"faults: {'; '.join(checked.faults)}"] if checked.faults else []
    parts += [f"declared exceptions: {'; '.join(checked.declared)}"] if checked.declared else []
    return "; ".join(parts)


def ulp_rows(fusion: Fusion) -> tuple[tuple[str, tuple[str, str], tuple[str, str]], ...]:
    """Distances in units in the last place: (bin, fused, original), each as share and count; empty where none were counted."""
    checked = fusion.numerics
    if checked is None or not checked.fused_ulps or not checked.eager_ulps:
        return ()
    starts = (0, *(end + 1 for end in ULP_ENDS))
    names = [str(end) if start == end else f"{start} to {end}" for start, end in zip(starts, ULP_ENDS, strict=False)]
    names.append(f"over {ULP_ENDS[-1]}")

    def cells(counts: tuple[int, ...]) -> list[tuple[str, str]]:
        return [(units.share(count / max(sum(counts), 1)), units.number(count)) for count in counts]

    return tuple(zip(names, cells(checked.fused_ulps), cells(checked.eager_ulps), strict=True))


def reproduce_one(report: Report, fusion: Fusion) -> str:
    """The run's command for one fusion alone; empty where the run was started from Python."""
    return f"{report.command} --only {shlex.quote(visible(fusion.kernel, 80))}" if report.command else ""


GLOSSARY = (
    ("op", "One ATen operation of the captured graph, for example mul or mean."),
    ("kernel", "One function that runs on the device. An eager op launches one or more."),
    ("launch", "One start of a kernel from the host, which costs a few microseconds of the host's time."),
    ("chain", "Neighbouring pointwise and reduction ops that pass values on and could be one kernel."),
    ("site", "One place in the model where a chain occurs. Equal chains of different layers are sites of one row."),
    ("fusion", "A chain's sites replaced by one kernel."),
    ("floor", "Time that no kernel can go below: outside values read once and results written once, at the copy's speed."),
    ("share", "Part of the captured step's kernel time."),
    ("speedup", "Time before divided by time after: above 1 is faster."),
    ("95% interval", "Where the median lies with 95% certainty, from the order of the measured times."),
    ("A/A noise", "How much a step differs from itself when it is measured twice. Smaller gains are not counted."),
    ("after a rest", "One step on a device that was idle for twice as long before, so that no power limit lowers its clock."),
    ("oracle", "The same computation in higher precision, against which both the fused and the original error are taken."),
    ("relative L2", "Length of the error over length of the oracle's result."),
    ("pointwise", "An op whose every output element depends on the input elements at the same place."),
    ("reduction", "An op that sums or compares along a dimension: mean, softmax, layer norm."),
    ("launch-bound", "The device waits for the host: fewer launches help, faster kernels do not."),
    ("roofline", "Speed against operations per byte, under what the device's memory and arithmetic allow."),
)
"""Terms of the report: (term, meaning)."""


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


def kernel_rows(report: Report, limit: int) -> tuple[tuple[KernelRow, ...], int, int]:
    """Kernels by name and category on both sides, largest first; how many are left out and their time."""
    rows: dict[tuple[str, str], KernelRow] = {}
    for name, category, count, ns in report.before.kernels:
        rows[name, category] = KernelRow(name, category, count, ns, 0, 0)
    for name, category, count, ns in report.after.kernels if report.after else ():
        old = rows.get((name, category), KernelRow(name, category, 0, 0, 0, 0))
        rows[name, category] = KernelRow(name, category, old.before_count, old.before_ns, count, ns)
    ranked = sorted(rows.values(), key=lambda row: (-max(row.before_ns, row.after_ns), row.name))
    rest = ranked[limit:]
    return tuple(ranked[:limit]), len(rest), sum(max(row.before_ns, row.after_ns) for row in rest)


def environment_rows(report: Report) -> tuple[tuple[str, str], ...]:
    """Environment and workload as (name, value), empty values left out."""
    env, work, band = report.environment, report.workload, report.bandwidth
    rows = (
        ("Device", env.device_name + (f" (compute capability {env.capability})" if env.capability else "")),
        ("Device memory", units.size(env.device_memory_bytes) if env.device_memory_bytes else ""),
        ("Measured copy bandwidth", units.bandwidth(report.bandwidth.copy_bytes_per_s)),
        (
            "Measured read, write, triad",
            ", ".join(units.bandwidth(speed) for speed in (band.read_bytes_per_s, band.write_bytes_per_s, band.triad_bytes_per_s))
            if band.read_bytes_per_s
            else "",
        ),
        ("Smallest kernel", units.duration(report.bandwidth.launch_ns)),
        ("fusion-advisor", env.tool),
        ("Commit", env.commit),
        ("Templates and kernels", env.templates),
        *clocks.environment_rows(report),
        ("torch", env.torch),
        ("triton", env.triton),
        ("transformers", env.transformers),
        ("CUDA", env.cuda),
        ("Driver", env.driver),
        ("Compiler", env.compiler),
        ("Python", env.python),
        ("System", f"{env.os}, {plural(env.cores, 'core')}" if env.cores else env.os),
        ("Container", env.container),
        ("Model", work.model_id),
        ("Revision", work.revision or "none recorded"),
        ("Weights", work.weights),
        (
            "Parameters",
            f"{units.number(work.parameter_count)} in {units.size(work.parameter_bytes)}" if work.parameter_count else "",
        ),
        ("Inputs", "; ".join(f"{name} {list(meta.shape)} {meta.dtype}" for name, meta in work.inputs)),
        ("Phase, dtype", f"{work.phase}, {work.dtype}"),
        ("Cached tokens", str(work.context) if work.context else ""),
        ("New tokens", str(work.new_tokens) if work.new_tokens else ""),
        ("Seed", str(work.seed)),
        ("Config hash", report.config_hash),
    )
    return tuple((name, value) for name, value in rows if value)
