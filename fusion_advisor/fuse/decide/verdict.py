"""The keep rule's answer for one rewrite."""

from __future__ import annotations

from dataclasses import dataclass

from fusion_advisor.records import Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer of the step's own time on one rewrite."""

    id: str
    status: Status
    reason: str
    delta_ns: int
    interval_ns: tuple[int, int]
    is_timed: bool = True
    """False: it stays because its numbers pass; the two figures say nothing."""

    @property
    def step_delta_ns(self) -> int | None:
        """The difference for a report; None where nothing was timed."""
        return self.delta_ns if self.is_timed else None

    @property
    def step_delta_ci_ns(self) -> tuple[int, int] | None:
        """Its interval, likewise."""
        return self.interval_ns if self.is_timed else None
