"""What a graph pass does to the traced step: the figures from which its record predicts a saving."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from fusion_advisor.records import Capture, Launch, OpNode, Ref
from fusion_advisor.records.op_facts import PRODUCTS

_PRODUCTS = {f"aten.{name}.default": place for name, place in PRODUCTS.items()}
"""Position of the left matrix; GPT-2's layers call ``addmm``."""


def busy_ns(launches: Sequence[Launch]) -> int:
    """Return for how long at least one of some launches runs; their sum where the trace does not say when they start.

    Args:
        launches: of one traced step.
    """
    if len({launch.start_ns for launch in launches}) < len(launches):
        return sum(launch.duration_ns for launch in launches)
    total, until = 0, -math.inf
    for launch in sorted(launches, key=lambda one: one.start_ns):
        end = launch.start_ns + launch.duration_ns
        total += int(max(0, end - max(launch.start_ns, until)))
        until = max(until, end)
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class PassEffect:
    """The captured step with one more pass in place."""

    capture: Capture
    modules: Sequence[GraphModule]
    """The regions with this pass and those kept before it."""
    index_of: Sequence[Mapping[Node, int]]
    """Op indices of the captured nodes, per region."""
    runs: Sequence[int]
    """How often a step runs each region."""
    removed: Collection[int]
    """Captured ops that the step no longer runs."""
    newly_removed: Collection[int]
    """Those that this pass took away."""
    sites: int
    launch_cost_ns: int
    """What a launch costs the step besides its kernel."""

    @property
    def saved_ns(self) -> int:
        """The traced time of the launches that it took away, with their cost.

        Time in which several of them run counts once: cuDNN serves a grouped convolution of wav2vec2 by kernels that take 31 ms
        together, in 12 ms of a step.
        """
        saved = [launch for launch in self.capture.launches if launch.op_index in self.newly_removed]
        return busy_ns(saved) + len(saved) * self.launch_cost_ns

    def copy_ns(self, moved_bytes: int) -> float:
        """Return how long bytes take at the copy bandwidth that was measured.

        Args:
            moved_bytes: read and written.
        """
        return moved_bytes * 1e9 / self.capture.bandwidth.copy_bytes_per_s

    def copies_ns(self, moved_bytes: int, launches: int) -> float:
        """Return how long copies of one size take together, the smallest kernel's time each at least.

        Args:
            moved_bytes: read and written by all of them.
            launches: how many.
        """
        return max(self.copy_ns(moved_bytes), launches * self.capture.bandwidth.launch_ns)

    def gemms_ns(self, products: int, moved_bytes: int, launches: int) -> float:
        """Return how long GEMMs of one size would take together.

        That is the time of their products at the rate of the quickest GEMM that stays, or of their bytes at the copy bandwidth,
        or as many times the shortest GEMM of the step: the longest of the three.

        Args:
            products: multiplications of all of them.
            moved_bytes: operands and results of all of them.
            launches: how many.
        """
        took: dict[int, int] = {}
        for launch in self.capture.launches:
            if launch.op_index is not None:
                took[launch.op_index] = took.get(launch.op_index, 0) + launch.duration_ns
        ops = self.capture.ops
        left = [op for op in ops if op.target in _PRODUCTS and took.get(op.index) and op.index not in self.newly_removed]
        rate = min((took[op.index] / self.products(op) for op in left), default=0.0)
        shortest = min((took[op.index] / self.capture.runs_of(op) for op in left), default=self.capture.bandwidth.launch_ns)
        return max(products * rate, self.copy_ns(moved_bytes), launches * shortest)

    def products(self, op: OpNode) -> int:
        """Return how many multiplications a GEMM makes in a step."""
        source = op.args[_PRODUCTS[op.target]]
        width = self.capture.ops[source.index].outputs[0].shape[-1] if isinstance(source, Ref) else 1
        return self.capture.runs_of(op) * math.prod(op.outputs[0].shape) * int(width)

    def nodes(self) -> Iterator[tuple[Node, int | None, int]]:
        """Yield the nodes of the rewritten graphs with the index of the captured op, if they stand for one, and their runs."""
        for module, index_of, often in zip(self.modules, self.index_of, self.runs, strict=True):
            index_at = {node.name: index for node, index in index_of.items()}
            for node in module.graph.nodes:
                yield node, index_at.get(node.name), often
