"""Runs a region while it is recorded, and knows where a recording that failed had stopped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fusion_advisor.fuse.cuda_graph.capturable import place_of


class Watched(torch.fx.Interpreter):
    """Runs a region op by op and knows which op it is at: the error of a failed recording names its line.

    Args:
        module: the region.
        skipped: ops that are left out, with the ones whose values stand for theirs.
    """

    def __init__(self, module: GraphModule, skipped: Mapping[Node, Node]) -> None:
        super().__init__(module)
        self.extra_traceback = False
        self._skipped = skipped
        self._at: Node | None = None

    def run_node(self, n: Node) -> Any:
        """Run an op, or give the value that stands for one that is left out."""
        self._at = n
        if n in self._skipped:
            return self.env[self._skipped[n]]
        return super().run_node(n)

    def where(self) -> str:
        """Name the op that it is at."""
        return "no op had run" if self._at is None else place_of(self._at)
