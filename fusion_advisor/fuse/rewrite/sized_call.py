"""A fused call whose tensors' sizes vary: bound to each sizes when they first come, and looked up from then on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fusion_advisor.fuse.rewrite.launch_count import Tally, mark

MOST_BOUND = 4096
"""Sizes that a call remembers; a bound kernel is a closure of a few hundred bytes, and is made again in half a millisecond."""


def sized_call(name: str, open_dims: int, bind: Callable[[tuple[int, ...]], Callable[..., Any]]) -> Callable[..., Any]:
    """Return a function of sizes and input tensors that launches a kernel bound to these sizes, and counts that in its tally.

    Args:
        name: the kernel's entry point.
        open_dims: how many sizes come ahead of the tensors.
        bind: returns the fused call for some sizes (:func:`~fusion_advisor.fuse.rewrite.graph_rewriter.fused_call`).
    """
    bound: dict[tuple[int, ...], Callable[..., Any]] = {}
    tally = Tally()

    def call(*given: Any) -> Any:
        sizes = given[:open_dims]
        fused = bound.get(sizes)
        if fused is None:
            if len(bound) >= MOST_BOUND:
                bound.clear()
            fused = bound[sizes] = bind(sizes)
        tally.launches += 1
        return fused(*given[open_dims:])

    call.__name__ = call.__qualname__ = name
    mark(call, tally)
    return call
