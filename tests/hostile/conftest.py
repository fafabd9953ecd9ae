"""Says at the end how many random graphs ran: a test that says it by itself is heard only where it fails."""

from __future__ import annotations

from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, ())]
    counts = [value for report in reports for name, value in report.user_properties if name == "random graphs"]
    if counts:
        tried, kernels, launches, failed = map(sum, zip(*counts, strict=True))
        terminalreporter.write_line(f"random graphs: {tried} tried, {kernels} kernels, {launches} launches, {failed} failed")
