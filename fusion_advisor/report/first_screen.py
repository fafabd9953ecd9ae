"""The first screen: every way to run the step as a bar, our speed against the others in sentences, and the next command."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass

from fusion_advisor import units
from fusion_advisor.records import COMPILED, EAGER, OURS, OURS_COMPILED, Report, Status, Timing
from fusion_advisor.report import baseline_rows, shared_rows
from fusion_advisor.report.escape import visible
from fusion_advisor.report.shapes.rows import asked_text, is_served

RESTED = "single steps at full clock"
_PLACE = "fusion-runs/"
"""Where the command line leaves runs."""
NEED_LAYOUT = frozenset({"merge-gemms", "pad-gemm", "odd-width-gemm"})
"""Rewrites whose GEMMs read weights that lie together, or the room after them; copies of weights need none (``--freeze``)."""
_SHIP = (
    "Or ship them for calls of these sizes, without fusion-advisor: as a Python package, or with --format kernels (Hugging Face's"
    " kernels library), pt2 (AOTInductor) or patch (a diff against the model's source):"
)


@dataclass(frozen=True, slots=True)
class Way:
    """One bar."""

    name: str
    note: str
    """The mode of torch.compile; empty for the others."""
    timing: Timing
    length: float
    """Of the bar, in percent of the longest end of all bars and intervals."""
    interval: tuple[float, float] | None
    """The whisker's ends in percent; None where no interval was recorded."""
    is_ours: bool

    @property
    def figure(self) -> str:
        """The median, for example ``18.26 ms``."""
        return units.duration(self.timing.median_ns)

    @property
    def spread(self) -> str:
        """The interval; empty where none was recorded."""
        return "" if self.interval is None else units.duration_interval(self.timing.ci_low_ns, self.timing.ci_high_ns)


@dataclass(frozen=True, slots=True)
class NextStep:
    """What to do with the result."""

    sentence: str
    code: str
    """To copy; empty where there is nothing to run."""


def ways(report: Report) -> tuple[Way, ...]:
    """Return the bars in a fixed order: eager, its CUDA graph, torch.compile's fastest mode, every other way, ours."""
    compiled = baseline_rows.best_compile(report)
    best = "" if compiled is None else f"{COMPILED}{compiled[0]}"
    rows = [(name, timing) for name, timing in baseline_rows.timed(report) if not name.startswith(COMPILED) or name == best]
    rows = [row for row in rows if row[0] != OURS_COMPILED]
    rows.sort(key=lambda row: (row[0] == OURS, row[0] != EAGER))
    longest = max((max(timing.median_ns, timing.ci_high_ns) for _, timing in rows), default=0)
    if not longest:
        return ()

    def percent(ns: int) -> float:
        return round(100 * ns / longest, 2)

    return tuple(
        Way(
            name="torch.compile" if name == best else name,
            note=f"best mode: {name.removeprefix(COMPILED)}" if name == best else "",
            timing=timing,
            length=percent(timing.median_ns),
            interval=(percent(timing.ci_low_ns), percent(timing.ci_high_ns)) if timing.ci_high_ns > timing.ci_low_ns else None,
            is_ours=name == OURS,
        )
        for name, timing in rows
    )


def compared(before: Timing, after: Timing, rival: str) -> tuple[str, str]:
    """Return a tone and how the step after compares with a rival's: ``1.49× faster than eager (95% CI 1.46–1.67)``."""
    ratio, low, high = shared_rows.speedup_bounds(before, after)
    if before.ci_low_ns == before.ci_high_ns or after.ci_low_ns == after.ci_high_ns:
        low = high = ratio  # no interval was recorded
    if low > 1:
        return "gain", f"{units.speedup(ratio)} faster than {rival}{interval(low, high)}"
    if high < 1:
        return "loss", f"{units.speedup(1 / ratio)} slower than {rival}{interval(1 / high, 1 / low)}"
    return "warn", f"no measurable difference from {rival}: {units.speedup(ratio)}{interval(low, high)}"


def interval(low: float, high: float) -> str:
    """`` (95% CI 1.46–1.67)``; empty where both ends are one, for then no interval was recorded."""
    return f" (95% CI {units.speedup(low)[:-1]}–{units.speedup(high)[:-1]})" if high > low else ""


def against_others(report: Report) -> list[str]:
    """Return our speed against torch.compile's fastest mode and against any other way that is faster still."""
    own, compiled = baseline_rows.own_wall(report), baseline_rows.best_compile(report)
    if report.after is None or baseline_rows.is_unchanged(report):
        return [] if report.after is None or compiled else [baseline_rows.why_no_compile(report)]
    lines = []
    if compiled is None:
        lines.append(baseline_rows.why_no_compile(report))
    elif own is not None and report.baseline == "eager":
        lines.append(compared(compiled[1], own, f"torch.compile {compiled[0]}")[1])
    peer = baseline_rows.best_peer(report)
    if own is not None and peer is not None and peer[0] != EAGER and not peer[0].startswith(COMPILED):
        lines.append(compared(peer[1], own, peer[0])[1])
    rested, rested_peer = baseline_rows.own_rested(report), baseline_rows.best_rested_peer(report)
    if rested is not None and rested_peer is not None:
        lines.append(f"{RESTED}: {compared(rested_peer[1], rested, rested_peer[0])[1]}")
    return lines


def sentence(point: str) -> str:
    """Return a point as a sentence's beginning; a name such as torch.compile keeps its small letter."""
    return point if "." in point.split(" ", maxsplit=1)[0] or not point[:1].isalpha() else f"{point[0].upper()}{point[1:]}"


def next_step(report: Report) -> NextStep | None:
    """Return what to do next; None where the run failed or its numbers did."""
    if report.status in ("failed", "interrupted") or (report.model_check is not None and not report.model_check.is_passed):
        return None
    if report.status == "profiled":
        folder = _folder(report)
        is_usual = folder in ("", f"{_PLACE}{report.run_id}")
        run = visible(report.run_id, 60) or "@last" if is_usual else shlex.quote(folder)
        return NextStep("Build, check and time the kernels of this run:", f"fusion-advisor apply {run}")
    if compiled := baseline_rows.faster_compile(report):
        mode = "" if compiled[0] == "default" else f', mode="{visible(compiled[0], 40)}"'
        return NextStep("torch.compile is faster here:", f"model = torch.compile(model{mode})")
    if report.shapes is not None and any(map(is_served, report.shapes.pieces)):
        code = f'{_setup(report)}fused = fa.apply(model, inputs, shapes="{visible(asked_text(report.shapes), 200)}")'
        return NextStep("Serve these sizes in your program; each rewrite is checked and timed there again:", code)
    statuses = [row.status for row in report.fusions] + [row.status for row in report.rewrites]
    if report.after is None or Status.KEPT not in statuses:
        return NextStep("Nothing was kept, so there is nothing to install.", "")
    if report.training is not None:
        code = f'import fusion_advisor as fa\n\nfused = fa.apply(model, inputs, phase="train"{_training_options(report.command)})'
        return NextStep("Fuse the training step in your program; its kernels are built, checked and timed there again:", code)
    place = json.dumps(folder, ensure_ascii=False) if (folder := _folder(report)) else "run_dir"
    code = f"{_setup(report)}fused = fa.apply(model, inputs, plan=fa.load_plan({place}))"
    return NextStep("Install these kernels in your program; they are built and checked again, not timed:", code)


def _setup(report: Report) -> str:
    """Return what stands ahead of ``fa.apply``: a user's own model has its weights elsewhere than the one that we loaded."""
    kept = [row for row in report.rewrites if row.status is Status.KEPT]
    needs_layout = any(row.id in NEED_LAYOUT and not row.held_bytes for row in kept)
    lay_out = "fa.lay_out_weights(model)  # side by side, as this run had them\n" if needs_layout else ""
    return f"import fusion_advisor as fa\n\n{lay_out}"


def _folder(report: Report) -> str:
    """Return the directory that holds the run; empty where a program made it and kept none."""
    default = f"{_PLACE}{report.run_id}" if report.command and report.run_id else ""
    return visible(report.folder or default, 400)


def _training_options(command: str) -> str:
    """Return the options of a training run that change what is kept in memory, as further arguments of ``fa.apply``."""
    asked = re.search(r" --memory-budget (0?\.\d+)(?= |$)", command)
    budget = f", memory_budget={asked[1]}" if asked else ""
    return f"{budget}, drop_logits=True" if "--drop-logits" in command.split() else budget


def next_steps(report: Report) -> tuple[NextStep, ...]:
    """Return :func:`next_step`, and after kernels that can be installed the command that writes them for other programs.

    Args:
        report: of a run.
    """
    first = next_step(report)
    if first is None:
        return ()
    has_kernels = any(row.chain_id and row.status is Status.KEPT for row in report.fusions)
    if "fa.load_plan" not in first.code or not has_kernels or not _folder(report) or report.ranks is not None:
        return (first,)
    code = f"fusion-advisor export {shlex.quote(_folder(report))} --to fused_kernels"
    return first, NextStep(_SHIP, code)
