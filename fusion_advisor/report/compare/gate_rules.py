"""Gates: limits that end a command with exit code 10, for a pull request's checks.

By default a gate judges ratios of times measured in one run, for milliseconds of two runs differ between two machines of the same
name, two drivers and two days. A gate fails only where the whole confidence interval is past its limit, so noise alone does not
turn a check red; and a gate whose figure was not measured is an error of its own rather than a pass.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from fusion_advisor import units
from fusion_advisor.errors import UsageError
from fusion_advisor.records import Gate
from fusion_advisor.report.compare.comparison import Comparison, Speedup, TimeChange, regression

_RULE = re.compile(r"(?P<metric>[a-z]+)(?:(?P<sign>[<>])(?P<limit>\d+(?:\.\d+)?)(?P<unit>[a-z%×µ]*))?")
_NS = {"ms": 1e6, "us": 1e3, "µs": 1e3, "s": 1e9}
_FORMS = "use speedup<1.05, regression>2%, numerics, or with --absolute step>15ms"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A gate as it was asked for."""

    text: str
    metric: str
    """``speedup``, ``regression``, ``step`` or ``numerics``."""
    limit: float = 0.0
    """A ratio, a share, or nanoseconds."""
    is_absolute: bool = False
    """Whether times of different runs are compared, rather than ratios within each."""


def parse_rules(texts: Iterable[str], *, absolute: bool) -> tuple[Rule, ...]:
    """Read what ``--fail-on`` was given.

    Raises:
        UsageError: Not a gate, or one that needs ``--absolute``.
    """
    return tuple(dict.fromkeys(_parse(text, absolute=absolute) for text in texts))


def judge(rules: tuple[Rule, ...], shown: Comparison) -> Comparison:
    """Return the comparison with its gates."""
    return replace(shown, gates=tuple(_judge(rule, shown) for rule in rules))


def unjudged(rules: tuple[Rule, ...], reason: str) -> tuple[Gate, ...]:
    """Return gates of a run that measured nothing to judge."""
    return tuple(Gate(rule=rule.text, state="not judged", reason=reason) for rule in rules)


def mark(gate: Gate) -> str:
    """The sign in front of a gate's line."""
    return {"passed": "✓", "failed": "✗"}.get(gate.state, "!")


def _parse(text: str, *, absolute: bool) -> Rule:
    compact = "".join(text.split()).lower()
    found = _RULE.fullmatch(compact)
    if found is None:
        raise UsageError(detail=f"--fail-on '{text}' is not a gate", help=_FORMS)
    metric, sign, limit, unit = found["metric"], found["sign"], found["limit"], found["unit"]
    form = (metric, sign)
    if form == ("numerics", None):
        return Rule(text=compact, metric=metric)
    if form == ("speedup", "<") and unit in ("", "x", "×"):
        return Rule(text=compact, metric=metric, limit=float(limit))
    if form == ("regression", ">") and unit == "%":
        return Rule(text=compact, metric=metric, limit=float(limit) / 100, is_absolute=absolute)
    if form == ("step", ">") and unit in _NS:
        if not absolute:
            detail = f"--fail-on '{text}' compares absolute times, which differ between machines of the same name"
            raise UsageError(detail=detail, help="add --absolute if that is meant; speedup and regression judge ratios instead")
        return Rule(text=compact, metric=metric, limit=float(limit) * _NS[unit], is_absolute=True)
    raise UsageError(detail=f"--fail-on '{text}' is not a gate", help=_FORMS)


def _judge(rule: Rule, shown: Comparison) -> Gate:
    if not shown.obstacles:
        return _judge_comparable(rule, shown)
    words = ", ".join(f"{row.name} {row.a} vs {row.b}" for row in shown.obstacles)
    reason = f"The runs are not comparable: {words}."
    if rule.metric == "regression":
        return Gate(rule=rule.text, state="not judged", reason=reason)
    of_b = _judge_comparable(rule, shown)
    # A gate on B alone fails whatever A is. A pass would look like the result of a comparison that was not made.
    return replace(of_b, state="not judged", reason=f"{reason} B by itself: {of_b.reason}") if of_b.state == "passed" else of_b


def _judge_comparable(rule: Rule, shown: Comparison) -> Gate:
    if rule.metric == "numerics":
        return _numerics(rule, shown)
    if rule.metric == "speedup":
        return _speedup(rule, shown.b_speedup)
    if rule.metric == "step":
        return _step(rule, shown)
    return _absolute_regression(rule, shown) if rule.is_absolute else _regression(rule, shown)


def _numerics(rule: Rule, shown: Comparison) -> Gate:
    if shown.b.wrong:
        return Gate(rule=rule.text, state="failed", reason=f"Numbers changed: {'; '.join(shown.b.wrong)}.")
    if not shown.b.is_checked:
        return Gate(rule=rule.text, state="not judged", reason="The whole model's numbers were not checked.")
    return Gate(rule=rule.text, state="passed", reason=f"Numerics {shown.b.numerics or '✓ nothing was changed'}.")


def _speedup(rule: Rule, found: Speedup | None) -> Gate:
    if found is None:
        return Gate(rule=rule.text, state="not judged", reason="Eager and rewritten step were not both timed.")
    figures = f"{units.speedup(found.ratio)} {units.speedup_interval(found.low, found.high)} over eager in the same run"
    return _ranged(rule, "ratio", found.ratio, (found.low, found.high), figures, is_floor=True)


def _regression(rule: Rule, shown: Comparison) -> Gate:
    if shown.a_speedup is None or shown.b_speedup is None:
        return Gate(rule=rule.text, state="not judged", reason="A side has no step to compare with its own run's eager step.")
    value, low, high = regression(shown.a_speedup, shown.b_speedup)
    figures = (
        f"{_signed(value)} [{_signed(low)}, {_signed(high)}] step time over each run's own eager step "
        f"({units.speedup(shown.a_speedup.ratio)} → {units.speedup(shown.b_speedup.ratio)})"
    )
    return _ranged(rule, "share", value, (low, high), figures)


def _absolute_regression(rule: Rule, shown: Comparison) -> Gate:
    row = _timed(shown)
    if row is None or row.a_ci_ns is None or row.b_ci_ns is None or not row.a_ns or not row.b_ns:
        return Gate(rule=rule.text, state="not judged", reason="The step was not timed on both sides.")
    value, low, high = row.b_ns / row.a_ns - 1, row.b_ci_ns[0] / row.a_ci_ns[1] - 1, row.b_ci_ns[1] / row.a_ci_ns[0] - 1
    figures = (
        f"{_signed(value)} [{_signed(low)}, {_signed(high)}] in absolute time "
        f"({units.duration(row.a_ns)} → {units.duration(row.b_ns)})"
    )
    return _ranged(rule, "share", value, (low, high), figures)


def _step(rule: Rule, shown: Comparison) -> Gate:
    row = _timed(shown)
    if row is None or row.b_ci_ns is None or row.b_ns is None:
        return Gate(rule=rule.text, state="not judged", reason="The step was not timed.")
    figures = f"{units.duration(row.b_ns)} {units.duration_interval(*row.b_ci_ns)} per step"
    return _ranged(rule, "ns", row.b_ns, row.b_ci_ns, figures)


def _ranged(rule: Rule, unit: str, value: float, ci: tuple[float, float], figures: str, *, is_floor: bool = False) -> Gate:
    low, high = ci
    is_failed = high < rule.limit if is_floor else low > rule.limit
    is_past = value < rule.limit if is_floor else value > rule.limit
    words = "past the limit with its whole interval" if is_failed else "past the limit, but its interval is not: passed"
    reason = f"{figures[0].upper()}{figures[1:]}{f': {words}' if is_past or is_failed else ''}."
    return Gate(
        rule=rule.text, state="failed" if is_failed else "passed", reason=reason, unit=unit, limit=rule.limit, value=value, ci=ci
    )


def _timed(shown: Comparison) -> TimeChange | None:
    return next((row for row in shown.steps if row.delta_ci_ns is not None), None)


def _signed(share: float) -> str:
    text = f"{share * 100:+.1f}%"
    return "±0.0%" if text in ("+0.0%", "-0.0%") else text.replace("-", "−")
