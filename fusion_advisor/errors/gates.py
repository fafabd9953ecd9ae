"""FA7xx: gates of compare and apply."""

from __future__ import annotations

from fusion_advisor.errors.base import AdvisorError


class GateFailed(AdvisorError):
    """A --fail-on limit was exceeded."""

    code = "FA701"
    message = "gate failed: {failed}"
    hint = "reproduce: {command}"
    exit_code = 10


class GateNotJudged(AdvisorError):
    """A --fail-on limit names something that the run did not measure."""

    code = "FA702"
    message = "gate could not be judged: {missing}"
    hint = "a gate that cannot be judged does not pass; compare runs of the same device and workload, or leave the gate out"
    exit_code = 6
