"""A comparison in words and tables, with the same format in terminal, HTML and markdown."""

from __future__ import annotations

from dataclasses import dataclass

from fusion_advisor import units
from fusion_advisor.records import Status
from fusion_advisor.report import shared_rows
from fusion_advisor.report.compare.comparison import (
    TRACE_TOLERANCE_SHARE,
    Comparison,
    Difference,
    Side,
    Speedup,
    State,
    TimeChange,
    Verdict,
)
from fusion_advisor.report.compare.rewrites import RewriteChange
from fusion_advisor.report.compare.scaling import Scaling
from fusion_advisor.report.escape import plural, visible
from fusion_advisor.report.headline import Headline


def title(shown: Comparison) -> str:
    """The compared runs, in a few words."""
    a, b = shown.a, shown.b
    models = b.model_id if a.model_id == b.model_id else f"{a.model_id} and {b.model_id}"
    return f"{models}: two {'steps of one run' if a.run_id == b.run_id else 'runs'}"


def headline(shown: Comparison) -> Headline:
    """The comparison in one sentence, and its caveats."""
    failed = [gate.rule for gate in shown.gates if gate.state == "failed"]
    tone, text = _result(shown)
    points = [f"differs: {row.name} {_pair(row)}" for row in shown.differences if not row.is_obstacle]
    for label, side, ratio in (("A", shown.a, shown.a_speedup), ("B", shown.b, shown.b_speedup)):
        if ratio is not None and side.state != "eager":
            kept = f", {plural(side.kept, 'rewrite')} kept" if side.state == "applied" else ""
            points.append(f"{label} over its own eager step: {_speed(ratio)}{kept}")
        if side.numerics:
            points.append(f"{label} numerics {side.numerics}")
    if failed:
        return Headline("loss", f"Gate failed: {', '.join(failed)}. {text}", tuple(points))
    return Headline(tone, text, tuple(points))


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table, with the same format in every view."""

    name: str
    a: str
    b: str
    change: str
    verdict: shared_rows.Verdict
    spread: str = ""
    """Widest range of the change; empty where nothing gives one."""
    launches: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows that changed, largest first, and how many are folded away."""

    title: str
    rows: tuple[Row, ...]
    unchanged: tuple[Row, ...]
    is_named: bool = False
    """Whether names come from the model, rather than from us."""


_VERDICTS: dict[Verdict, shared_rows.Verdict] = {
    "faster": shared_rows.Verdict("✓", "faster", "gain"),
    "slower": shared_rows.Verdict("✗", "slower", "loss"),
    "less": shared_rows.Verdict("", "less in this trace", "plain"),
    "more": shared_rows.Verdict("", "more in this trace", "plain"),
    "unchanged": shared_rows.Verdict("~", "no change", "plain"),
    "only in A": shared_rows.Verdict("–", "only in A", "plain"),
    "only in B": shared_rows.Verdict("+", "only in B", "plain"),
    "not compared": shared_rows.Verdict("–", "not compared", "plain"),
}
_NO_VERDICT = shared_rows.Verdict("", "", "plain")
_STATE_WORDS: dict[State, str] = {
    "eager": "the eager step",
    "applied": "with its kept rewrites",
    "compile": "under torch.compile",
}


def side_line(label: str, side: Side) -> str:
    """Description of A or B: the run, its state, and the workload."""
    run = f"{side.run_id}, " if side.run_id else ""
    return f"{label}  {run}{_STATE_WORDS[side.state]}: {side.context}"


def step_table(shown: Comparison) -> Table:
    """The step's times, launches, memory and speedups: always shown whole, in this order."""
    rows = [_time_row(row) for row in shown.steps]
    for row in shown.counts:
        text = units.number if row.unit == "launches" else units.size
        change = "" if shown.obstacles else units.relative_change(row.a, row.b)
        rows.append(Row(row.name, text(row.a), text(row.b), change, _NO_VERDICT))
    if shown.scaling is not None:
        rows.append(_scaling_row(shown.scaling))
    a, b = shown.a_speedup, shown.b_speedup
    if a is not None and b is not None and (shown.a.state, shown.b.state) != ("eager", "eager"):
        rows.append(Row("Speed over its own eager", units.speedup(a.ratio), units.speedup(b.ratio), "", _NO_VERDICT))
    return Table("Step", tuple(rows), ())


def _scaling_row(found: Scaling) -> Row:
    share = found.efficiency_share
    words = "" if share is None or found.a_ranks == found.b_ranks else f"{units.share(share)} of linear scaling"
    return Row("Ranks", units.number(found.a_ranks), units.number(found.b_ranks), words, _NO_VERDICT)


def change_tables(shown: Comparison) -> tuple[Table, ...]:
    """Changes by rewrite, category, kernel and chain; unchanged rows are listed separately."""
    tables = []
    if shown.rewrites:
        rows = [(row.is_changed is not False, _rewrite_row(row)) for row in shown.rewrites]
        tables.append(_folded("Rewrite, change of the step", rows, is_named=True))
    for group, title in (("category", "Category"), ("kernel", "Kernel"), ("chain", "Chain")):
        timed = [(row.verdict != "unchanged", _time_row(row)) for row in shown.changes if row.group == group]
        if timed:
            tables.append(_folded(f"{title}, one traced step", timed, is_named=group != "category"))
    return tuple(tables)


def method_line(shown: Comparison) -> str:
    """How the verdicts were reached, or why there are none."""
    if shown.obstacles:
        names = ", ".join(row.name for row in shown.obstacles)
        return f"Nothing is judged across these runs and no gate passes: they differ in {names}."
    noise = max(shown.a.noise_share or 0.0, shown.b.noise_share or 0.0)
    return (
        "Ranges are the widest that both 95% intervals allow; a step counts as changed when the whole range exceeds the larger "
        f"A/A noise ({units.share(noise)}). Rows of a single traced step have no interval: below "
        f"{units.share(max(noise, TRACE_TOLERANCE_SHARE))} they count as unchanged."
    )


def reproduce_lines(shown: Comparison) -> tuple[str, ...]:
    """The commands that measured both sides."""
    commands = ((label, side.command) for label, side in (("A", shown.a), ("B", shown.b)) if side.command)
    return tuple(f"{label}: {command}" for label, command in commands)


def _folded(title: str, rows: list[tuple[bool, Row]], *, is_named: bool) -> Table:
    changed = tuple(row for is_changed, row in rows if is_changed)
    return Table(title, changed, tuple(row for is_changed, row in rows if not is_changed), is_named)


def _time_row(row: TimeChange) -> Row:
    a, b = ("–" if ns is None else units.duration(ns) for ns in (row.a_ns, row.b_ns))
    counts = (row.a_count, row.b_count)
    launches = "" if not any(counts) else f"{row.a_count or 0:,} → {row.b_count or 0:,}"
    if row.verdict == "not compared":
        return Row(row.name, a, b, "", _VERDICTS[row.verdict], launches=launches)
    change = units.delta(row.delta_ns)
    if row.a_ns and row.b_ns:
        change += f" ({units.relative_change(row.a_ns, row.b_ns)})"
    spread = "" if row.delta_ci_ns is None else units.delta_interval(*row.delta_ci_ns)
    return Row(row.name, a, b, change, _VERDICTS[row.verdict], spread, launches)


def _rewrite_row(row: RewriteChange) -> Row:
    a, b = ("–" if ns is None else units.delta(ns) for ns in (row.a_step_delta_ns, row.b_step_delta_ns))
    is_timed = row.a_step_delta_ns is not None or row.b_step_delta_ns is not None
    change = units.delta((row.b_step_delta_ns or 0) - (row.a_step_delta_ns or 0)) if row.is_changed and is_timed else ""
    return Row(row.name, a, b, change, _rewrite_verdict(row))


def _rewrite_verdict(row: RewriteChange) -> shared_rows.Verdict:
    if row.is_changed is None:
        kept = " and ".join(label for label, status in (("A", row.a_status), ("B", row.b_status)) if status is Status.KEPT)
        return shared_rows.Verdict("–", f"kept in {kept or 'neither'}", "plain")
    if row.a_status is row.b_status:
        return (
            shared_rows.Verdict("!", "other gain", "warn") if row.is_changed else shared_rows.Verdict("~", "no change", "plain")
        )
    if row.a_status is Status.KEPT:
        return shared_rows.Verdict("✗", "not kept in B", "loss")
    if row.b_status is Status.KEPT:
        return shared_rows.Verdict("✓", "kept in B", "gain")
    status = row.b_status or row.a_status
    words = "" if status is None else f"{shared_rows.VERDICTS[status].words.partition(',')[0]} in {'B' if row.b_status else 'A'}"
    return shared_rows.Verdict("!", words, "warn")


def _result(shown: Comparison) -> tuple[str, str]:
    if shown.obstacles:
        words = "; ".join(f"{row.name} {_pair(row)}" for row in shown.obstacles)
        return "warn", f"Not comparable: {words}. Times are shown side by side, without a verdict."
    timed = [row for row in shown.steps if row.delta_ci_ns is not None]
    if not timed:
        return "plain", "Neither wall nor device time of the step was measured on both sides."
    first = timed[0]
    assert first.a_ns is not None and first.b_ns is not None
    times = f"{units.duration(first.a_ns)} → {units.duration(first.b_ns)} per step ({shown.clock})"
    ratio = units.speedup(first.a_ns / max(first.b_ns, 1))
    if first.verdict == "faster":
        return "gain", f"B is {ratio} faster than A: {times}."
    if first.verdict == "slower":
        return "loss", f"B is {units.speedup(first.b_ns / max(first.a_ns, 1))} slower than A: {times}."
    return "plain", f"No change beyond the noise: {times}."


def _pair(row: Difference) -> str:
    return f"{visible(row.a, 80) or 'none'} vs {visible(row.b, 80) or 'none'}"


def _speed(found: Speedup) -> str:
    return f"{units.speedup(found.ratio)} (95% CI {units.speedup(found.low)[:-1]}–{units.speedup(found.high)[:-1]})"
