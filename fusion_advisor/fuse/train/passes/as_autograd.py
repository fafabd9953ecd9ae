"""A backward pass as autograd calls a node: for outputs without a gradient, and for a batch of gradients at once.

AOTAutograd's function is given zeros for an output without a gradient, and makes zeros of them for each of its inputs. Zeros are
a gradient: AdamW decays such a weight and moves it by its momentum, where eager's gradient is None and the weight stays as it is.
So a model whose heads are trained in turn would become another model.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.fx import GraphModule, Node

from fusion_advisor.fuse.train.passes.freed_arguments import taking_a_list
from fusion_advisor.runtime.torch_internals import dispatcher

TANGENT = "tangents"
"""How AOTAutograd names the inputs of a backward pass that are gradients of outputs."""


class Pass(Protocol):
    """A backward pass that takes its arguments as a list."""

    def take(self, args: list[Any]) -> Any:
        """Run it on a list of arguments that may be emptied."""


class AsAutograd:
    """Runs a backward pass, and returns None for each gradient that none of those it was given leads to.

    Args:
        whole: the pass as AOTAutograd made it.
        fused: runs it; where it has the attribute ``takes_none`` it is given None for a gradient that is not there, else zeros.
    """

    takes_none = True

    def __init__(self, whole: GraphModule, fused: Pass) -> None:
        self._whole, self._fused = whole, fused
        given = whole.graph.find_nodes(op="placeholder")
        self._gradients = {place: node.meta["val"] for place, node in enumerate(given) if is_gradient(node)}
        self._led_by = _led_by(whole)

    def take(self, args: list[Any]) -> Any:
        """Run the pass.

        Args:
            args: what the forward pass kept, then a gradient for each output; None where there is none.
        """
        missing = frozenset(place for place, like in self._gradients.items() if args[place] is None and like is not None)
        # Autograd's vmap over gradients (is_grads_batched) hands over batches, of which no kernel knows.
        is_batched = any(dispatcher.is_batched(args[place]) for place in self._gradients if args[place] is not None)
        if is_batched or not getattr(self._fused, "takes_none", False):
            for place in missing:
                args[place] = zeros(self._gradients[place])
        results = taking_a_list(self._whole).forward(args) if is_batched else self._fused.take(args)
        if not missing:
            return results
        return [None if led and led <= missing else one for one, led in zip(results, self._led_by, strict=True)]


def is_gradient(node: Node) -> bool:
    """Whether an input of a backward pass is the gradient of an output."""
    return str(node.target).startswith(TANGENT)


def zeros(like: torch.Tensor) -> torch.Tensor:
    """Return zeros that are laid out like a tensor."""
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device).zero_()


def _led_by(whole: GraphModule) -> tuple[frozenset[int], ...]:
    """Return for each result of a backward pass the places of the outputs' gradients that it is made of."""
    found: dict[Node, frozenset[int]] = {}
    for place, node in enumerate(whole.graph.find_nodes(op="placeholder")):
        found[node] = frozenset((place,)) if is_gradient(node) else frozenset()
    for node in whole.graph.nodes:
        if node not in found:
            found[node] = frozenset().union(*(found[source] for source in node.all_input_nodes))
    results = whole.graph.output_node().args[0]
    assert isinstance(results, tuple | list)
    return tuple(found[one] if isinstance(one, Node) else frozenset() for one in results)
