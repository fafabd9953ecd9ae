"""A captured step: the op graph joined to its launches."""

from __future__ import annotations

from dataclasses import dataclass

from fusion_advisor.records.graph import Launch, OpNode
from fusion_advisor.records.run import Bandwidth, DataQuality, Environment, Timing, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """The whole observation of a step; enough to find, rank, match and plan with no GPU (``capture.json``)."""

    workload: Workload
    environment: Environment
    ops: tuple[OpNode, ...]
    launches: tuple[Launch, ...]
    """The captured step, op by op: shares come from these."""
    eager_launches: tuple[Launch, ...]
    """The eager step: totals and categories only (``op_index`` is None)."""
    eager_step: Timing
    bandwidth: Bandwidth
    quality: DataQuality
    region_runs: tuple[int, ...] = ()
    """Runs of each captured graph in one step; empty: once each."""

    def runs_of(self, op: OpNode) -> int:
        """Return how often a step runs an op."""
        return self.region_runs[op.region] if self.region_runs else 1
