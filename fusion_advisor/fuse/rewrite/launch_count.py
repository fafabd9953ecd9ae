"""How often generated kernels were launched: counted in the fused call itself, where the kernel is called.

A count costs the host one addition, 30 to 50 ns of the 4 to 6 µs that a launch takes. It is not locked: threads that run one
model at the same time may lose counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch.fx import GraphModule

_ATTRIBUTE = "tally"


class Tally:
    """Counts the launches of one fused call.

    Attributes:
        launches: since it was made; a CUDA graph's recording counts once, its replays do not.
    """

    __slots__ = ("launches",)

    def __init__(self) -> None:
        self.launches = 0


def mark(call: Callable[..., Any], tally: Tally) -> None:
    """Let a call carry the tally that it counts in, so that what runs a graph finds it there."""
    vars(call)[_ATTRIBUTE] = tally


def tally_of(call: object) -> Tally | None:
    """Return the tally of a fused call; None for any other op."""
    found = getattr(call, _ATTRIBUTE, None)
    return found if isinstance(found, Tally) else None


def tallies_in(modules: Iterable[GraphModule]) -> tuple[Tally, ...]:
    """Return the tallies of the fused calls in some graphs, each once."""
    found = (tally_of(node.target) for module in modules for node in module.graph.nodes if node.op == "call_function")
    return tuple({id(tally): tally for tally in found if tally is not None}.values())


def total(tallies: Iterable[Tally]) -> int:
    """Return how many launches some tallies have counted together."""
    return sum(tally.launches for tally in tallies)
