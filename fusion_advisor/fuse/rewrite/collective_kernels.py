"""The rewrite that lets one kernel sum over ranks, add the residual and normalise; ``fuse.stages.try_collectives`` tries it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch.fx import GraphModule

from fusion_advisor.collectives.group_kernels import GroupKernels
from fusion_advisor.fuse.rewrite.launch_count import mark, tally_of
from fusion_advisor.fuse.rewrite.record import CollectiveRewrite

TITLE, LAYER_TITLE = "all_reduce_add_rmsnorm", "all_reduce_add_layernorm"
TITLES = (TITLE, LAYER_TITLE)
"""Of every such kernel; reports and saved plans know them by these."""

ALL_REDUCE_NORM = CollectiveRewrite(
    id="all-reduce-norm",
    title="all-reduce kernels",
    after={
        "merge-gemms": "it rebuilds chains on a changed graph, where a call of the ranks would be lost",
    },
)


class GroupCall:
    """A launch in which this rank meets the others.

    Attributes:
        kernels: of the group.

    Args:
        name: of the kernel.
        call: launches it.
        kernels: see above.
    """

    def __init__(self, name: str, call: Callable[..., Any], kernels: GroupKernels) -> None:
        self.__name__ = self.__qualname__ = name
        self._call = call
        self.kernels = kernels
        tally = tally_of(call)
        if tally is not None:
            mark(self, tally)

    def __call__(self, *tensors: Any) -> Any:
        """Return what the launch gives."""
        return self._call(*tensors)


def group_kernels_in(modules: Iterable[GraphModule]) -> tuple[GroupKernels, ...]:
    """Return the kernels of groups that some graphs call, each once, in the order of the graphs.

    Args:
        modules: rewritten regions.
    """
    found: dict[int, GroupKernels] = {}
    for module in modules:
        for node in module.graph.nodes:
            if isinstance(node.target, GroupCall):
                found.setdefault(id(node.target.kernels), node.target.kernels)
    return tuple(found.values())
