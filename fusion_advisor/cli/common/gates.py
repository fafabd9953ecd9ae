"""Ends a command after its gates: lines for GitHub Actions, the command to repeat, the exit code."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusion_advisor.cli.common.console import annotate
from fusion_advisor.errors import GateFailed, GateNotJudged

if TYPE_CHECKING:
    from fusion_advisor.records import Gate
    from fusion_advisor.report.compare.gate_rules import Rule


def words(rules: tuple[Rule, ...], *, absolute: bool) -> list[str]:
    """Return the gates as they stand on a command line."""
    return [*(word for rule in rules for word in ("--fail-on", rule.text)), *(["--absolute"] if absolute and rules else [])]


def end(judged: tuple[Gate, ...], command: str) -> None:
    """Say what each gate found, and end the command where one failed or could not be judged.

    Raises:
        GateFailed: A figure is past its limit with its whole interval.
        GateNotJudged: None failed, but one had no figure to judge.
    """
    failed = [gate for gate in judged if gate.state == "failed"]
    missing = [gate for gate in judged if gate.state == "not judged"]
    for gate in missing if failed else ():
        annotate("warning", f"gate {gate.rule} could not be judged: {gate.reason}")
    if failed:
        raise GateFailed(failed=_listed(failed), command=command)
    if missing:
        raise GateNotJudged(missing=_listed(missing))


def _listed(judged: list[Gate]) -> str:
    return "; ".join(f"{gate.rule}: {gate.reason.rstrip('.')}" for gate in judged)
