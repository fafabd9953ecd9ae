"""The ways to run a training step, with AdamW's step behind each and without: times, rates, memory, errors of their gradients."""

from __future__ import annotations

from dataclasses import dataclass

from fusion_advisor import units
from fusion_advisor.records import EAGER, OURS, OURS_COMPILED, Baseline, Report, Timing
from fusion_advisor.report.training.step_rows import mfu

RANDOM = "other random numbers"
"""As the record's oracle says it."""


@dataclass(frozen=True, slots=True)
class WayRow:
    """One way, formatted; a dash stands for what was not measured.

    Attributes:
        name: of the way.
        step: forward, loss and backward.
        whole: that and AdamW's step.
        spread: of ``whole``; of ``step`` where no optimizer was timed.
        against: ``whole`` over ours.
        rate: tokens or samples in a second, of ``whole``.
        mfu: share of the device's datasheet rate, likewise; empty where that is not known.
        memory: peak of the step.
        whole_memory: peak with AdamW's step, without its state.
        check: of loss and gradients.
        is_wrong: whether these are wrong.
    """

    name: str
    step: str
    whole: str
    spread: str
    against: str
    rate: str
    mfu: str
    memory: str
    whole_memory: str
    check: str
    is_wrong: bool


@dataclass(frozen=True, slots=True)
class WayTable:
    """All ways; ``rate_word`` is the heading of the rates, and ``lines`` say what the figures are."""

    rows: tuple[WayRow, ...]
    rate_word: str
    lines: tuple[str, ...]


def way_table(report: Report) -> WayTable:
    """Return the table; without rows where no step with an optimizer was timed and none was checked."""
    return WayTable(way_rows(report), rate_word(report), way_lines(report))


def way_rows(report: Report) -> tuple[WayRow, ...]:
    """Return each way that was timed; empty where no step with an optimizer was timed and none was checked."""
    rows = [row for row in report.baselines if row.step is not None and row.step.wall is not None]
    if report.training is None or not any(row.with_optimizer or row.check for row in rows):
        return ()
    own = next((time_of(row) for row in rows if row.name == OURS), None)
    return tuple(_row(report, row, own) for row in rows)


def time_of(row: Baseline) -> Timing | None:
    """Return a way's time with AdamW's step; of the step alone where no optimizer was timed.

    Args:
        row: of the report.
    """
    return row.with_optimizer or (None if row.step is None else row.step.wall)


def _row(report: Report, row: Baseline, own: Timing | None) -> WayRow:
    step, time = row.step, time_of(row)
    assert step is not None and step.wall is not None and time is not None
    parts = report.training.parts if report.training else None
    return WayRow(
        name=row.name, step=units.duration(step.wall.median_ns),
        whole=units.duration(row.with_optimizer.median_ns) if row.with_optimizer else "–",
        spread=units.duration_interval(time.ci_low_ns, time.ci_high_ns),
        against="–" if own is None else units.speedup(time.median_ns / max(own.median_ns, 1)),
        rate=units.number(round(parts.tokens * 1e9 / time.median_ns)) if parts and parts.tokens else "–",
        mfu=mfu(report, time.median_ns), memory=units.size(step.peak_memory_bytes) if step.peak_memory_bytes else "–",
        whole_memory=units.size(row.optimizer_peak_bytes) if row.optimizer_peak_bytes else "–",
        check=_checked(row), is_wrong=not row.is_right,
    )  # fmt: skip


def _checked(row: Baseline) -> str:
    check = row.check
    if check is None:
        return "the others are compared with it" if row.name == EAGER else "not checked"
    if not check.is_passed:
        return f"wrong: {check.reason}"
    loss = f"loss {check.loss:.5g}"
    if check.oracle == "eager":
        return f"{loss}, gradients differ from eager's by {units.error(check.rel_l2)}"
    if check.rel_l2 == 0:
        return f"{loss}, the gradients of eager"
    measure = "the distance between eager's seeds" if check.oracle == RANDOM else "eager's error"
    return f"{loss}, {check.rel_l2 / max(check.eager_rel_l2, 1e-300):.2f} × {measure}"


def rate_word(report: Report) -> str:
    """Return what a step trains on: ``Tokens/s``."""
    parts = report.training.parts if report.training else None
    return f"{(parts.token_word if parts else '').capitalize() or 'Samples'}/s"


def way_lines(report: Report) -> tuple[str, ...]:
    """Say what the table's times, memory and checks are of, and which way is the fastest; empty without a table."""
    if not way_rows(report):
        return ()
    lines = [line for line in (best_line(report), _optimizer_line(report), _check_line(report)) if line]
    wrong = [row.name for row in report.baselines if not row.is_right]
    if wrong:
        lines.append(f"Not counted as another way, since it computes something else: {', '.join(wrong)}.")
    return tuple(lines)


def best_way(report: Report) -> Baseline | None:
    """Return the fastest other way that computes what eager does, eager among them; None where none was timed."""
    rows = [row for row in report.baselines if row.name not in (OURS, OURS_COMPILED) and row.is_right and time_of(row)]
    return min(rows, key=lambda row: _ns(time_of(row)), default=None)


def best_line(report: Report) -> str:
    """Say how our step, AdamW's with it where that was timed, stands beside the fastest other way."""
    own = next((row for row in report.baselines if row.name == OURS), None)
    best = best_way(report)
    if own is None or best is None or time_of(own) is None:
        return ""
    ratio = _ns(time_of(own)) / _ns(time_of(best))
    what = "forward, backward and AdamW" if own.with_optimizer and best.with_optimizer else "forward and backward"
    return f"{sentence(what)}: ours takes {ratio:.2f} of the time of {best.name}, the fastest other way measured."


def sentence(text: str) -> str:
    """Return a text with a capital letter."""
    return f"{text[:1].upper()}{text[1:]}"


def _ns(timing: Timing | None) -> int:
    return max(timing.median_ns, 1) if timing is not None else 1


def _optimizer_line(report: Report) -> str:
    if not any(row.with_optimizer for row in report.baselines):
        return ""
    parts = report.training.parts if report.training else None
    state = f" Its state, {units.size(parts.state_bytes)}, comes on top of every peak." if parts and parts.state_bytes else ""
    return (
        "AdamW (fused=True) was timed after the step of each way, in the same rounds. It reads the gradients that the way has "
        f"just made, and writes copies of the parameters.{state}"
    )


def _check_line(report: Report) -> str:
    check = next((row.check for row in report.baselines if row.check is not None), None)
    if check is None:
        return ""
    if check.oracle == RANDOM:
        return (
            "The step draws random numbers, and each way draws its own: loss and gradients were compared with eager's within the "
            "distances between eager's steps of four seeds. That shows what is wrong, not small errors."
        )
    if check.oracle == "eager":
        return "No copy of the model in a wider dtype ran here: loss and gradients were compared with eager's own."
    return (
        f"Loss and all gradients were compared with the same step in {check.oracle}; eager's own error of all gradients together "
        f"is {units.error(check.eager_rel_l2)}."
    )
