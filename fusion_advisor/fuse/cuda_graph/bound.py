"""The memory that CUDA graphs of ranges of sizes may hold together, which sizes have none for it, and what they hold.

A graph is counted ahead of being recorded, by its ops (:mod:`fusion_advisor.fuse.cuda_graph.graph_bytes`), and what the pool
holds is read after it. What the count misses (workspaces of GEMMs, holes between tensors) is added to later counts.

Graphs share what passes in them only where the largest was recorded first: the pool keeps the segments of smaller ones, and a
larger tensor fits into none of them. So a larger graph adds all that passes in it, until all are dropped and it comes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from fusion_advisor import units
from fusion_advisor.fuse.cuda_graph.graph_bytes import GraphBytes, TooLarge
from fusion_advisor.fuse.cuda_graph.recording import Recorder, Recording

if TYPE_CHECKING:
    from fusion_advisor.fuse.cuda_graph.graphed_region import GraphedRegion
    from fusion_advisor.fuse.cuda_graph.segmented_region import SegmentedRecording


class Bound:
    """The bound on the recordings of one fused model. Recordings of exactly the verified sizes do not count.

    Args:
        recorder: whose memory is read.
        most_bytes: that recordings of ranges may hold.
    """

    def __init__(self, recorder: Recorder, most_bytes: int) -> None:
        self._recorder = recorder
        self._most_bytes = most_bytes
        self._missed = 0
        """Bytes that counts of single graphs were too low."""
        self._missed_together = 0
        """Bytes that counts of several in one pool were too low."""
        self._pool = 0
        """Bytes of the pool after the latest recording."""
        self._exact = 0
        """Bytes of it that recordings of exact sizes added."""
        self._passing = 0
        """Bytes of it that pass in recordings of ranges."""
        self._largest_passing = 0
        """By the one of them in which most passes."""
        self._recorded = 0
        """Recordings of ranges in this pool, also those that were dropped since."""
        self._refused = 0
        self._largest = 0

    @property
    def sentence(self) -> str:
        """How many sizes have no graph for what it would hold, with a space ahead; empty where all may have one."""
        if not self._refused:
            return ""
        many = self._refused > 1
        who = f"{self._refused} sizes run launch by launch: their graphs" if many else "1 size runs launch by launch: its graph"
        each = " each" if many else ""
        most, largest = units.size(self._most_bytes), units.size(self._largest)
        return f" {who} would hold up to {largest}{each}, and all together may hold {most}."

    @property
    def too_large(self) -> str:
        """Why the largest graph that was refused is not recorded; empty where none was."""
        if not self._refused:
            return ""
        return f"it would hold {units.size(self._largest)}, and all graphs together may hold {units.size(self._most_bytes)}"

    def restart(self) -> None:
        """Begin with an empty pool: no recording is left, so its memory is given back ahead of the next one."""
        self._pool = self._exact = self._passing = self._largest_passing = self._recorded = 0

    def refuse(self, region: GraphedRegion, nbytes: int) -> None:
        """Let a region run launch by launch from now on.

        Args:
            region: of one size.
            nbytes: that its graph would hold.
        """
        region.is_too_large = True
        self._refused += 1
        self._largest = max(self._largest, nbytes)

    def require_room(self, needed: GraphBytes) -> None:
        """Refuse a graph that does not fit by itself.

        Raises:
            TooLarge: with what it would hold.
        """
        if needed.total + self._missed > self._most_bytes:
            raise TooLarge(needed.total + self._missed)

    def has_room(self, recorded: Iterable[GraphedRegion], needed: GraphBytes) -> bool:
        """Whether the pool has room for one more graph.

        Args:
            recorded: the regions that have graphs.
            needed: by the other one.
        """
        if not self._recorded:
            return True  # that it fits by itself is known
        kept = needed.kept + sum(one.held.kept for one in recorded if one.held is not None)
        return self._passing_with(needed) + kept + max(self._missed, self._missed_together) <= self._most_bytes

    def overflow(self, latest: GraphedRegion, recordings: Mapping[GraphedRegion, Recording | SegmentedRecording]) -> int:
        """Return how many bytes recordings of ranges hold if these are more than they may, else 0.

        Args:
            latest: that was recorded just now.
            recordings: all, by region.
        """
        before, self._pool = self._pool, self._recorder.pool_bytes()
        if latest.held is None:
            self._exact += max(0, self._pool - before)
            return 0
        self._passing = self._passing_with(latest.held)
        self._largest_passing = max(self._largest_passing, latest.held.passing)
        self._recorded += 1
        held = self._pool - self._exact + sum(one.input_bytes for region, one in recordings.items() if region.held is not None)
        missed = held - self._passing - sum(one.held.kept for one in recordings if one.held is not None)
        if self._recorded == 1:
            self._missed = max(self._missed, missed)
        else:
            self._missed_together = max(self._missed_together, missed)
        return held if held > self._most_bytes else 0

    def _passing_with(self, other: GraphBytes) -> int:
        """Return the bytes of the pool that pass in recordings of ranges once there is another one."""
        return self._passing + (other.passing if other.passing > self._largest_passing else 0)
