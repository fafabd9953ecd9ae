"""Counters of a fused model: calls that ran the original ops, by reason, and launches of generated kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch.fx import GraphModule

from fusion_advisor.fuse.cuda_graph.replay import Graphs
from fusion_advisor.fuse.rewrite.launch_count import Tally, tallies_in, total
from fusion_advisor.runtime.fallback_warning import warn_caller


class Fallbacks:
    """Why calls ran the original ops, and how often.

    Attributes:
        counts: calls by reason.
    """

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def add(self, reason: str, detail: str = "") -> None:
        """Count a call that runs the original ops, and warn at the first for each reason."""
        self.counts[reason] = self.counts.get(reason, 0) + 1
        if self.counts[reason] == 1:
            warn_caller(f"fusion-advisor runs the original ops: {reason}" + (f": {detail}" if detail else ""))


class Replays(Protocol):
    """What replays graphs.

    Attributes:
        launches: generated kernels that replays launched.
    """

    launches: int


class LaunchCounter:
    """Counts the launches of a fused model's graphs."""

    def __init__(self, graphs: Graphs | None) -> None:
        self._replays: list[Replays] = [] if graphs is None else [graphs]
        self._tallies: dict[int, Tally] = {}
        self._before = 0

    def include(self, modules: Sequence[GraphModule]) -> None:
        """Count the launches of further graphs, from now on."""
        for tally in tallies_in(modules):
            if id(tally) not in self._tallies:
                self._tallies[id(tally)] = tally
                self._before += tally.launches

    def include_replays(self, replays: Sequence[Replays]) -> None:
        """Count what further CUDA graphs replay, from now on."""
        self._replays += replays
        self._before += sum(one.launches for one in replays)

    def restart(self) -> None:
        """Count from zero."""
        self._before = self._all()

    @property
    def count(self) -> int:
        """Launches since the last :meth:`restart`."""
        return self._all() - self._before

    def _all(self) -> int:
        return total(self._tallies.values()) + sum(one.launches for one in self._replays)
