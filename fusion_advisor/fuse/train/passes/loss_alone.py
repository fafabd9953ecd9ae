"""The backward pass of a step whose loss alone is given a gradient, though the step returns logits too.

Autograd gives a function zeros for an output that has no gradient. For GPT-2's logits (32 x 1,024 tokens, bf16) that is 3.3 GB to
write, and the kernel of the loss's gradient reads them to add them. All that is done with such a gradient is to add it, mostly. A
backward pass without the sums is another graph over what the same forward pass keeps. So which of the two runs is chosen when
the gradients are there.

Only that graph is rewritten. A step that gives the logits a gradient too runs the one with the sums as it was traced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fusion_advisor.capture.graph.fx_nodes import storages
from fusion_advisor.fuse.train.passes.as_autograd import Pass, is_gradient, zeros
from fusion_advisor.fuse.train.passes.freed_arguments import taking_a_list
from fusion_advisor.runtime.torch_internals import autograd_graphs, fake_mode, fx_trace

LEAST_BYTES = 16 << 20
"""Of a gradient that is left out: zeros of fewer take no time."""
OTHER_GRADIENTS = (
    "a backward pass was given the gradient of an output beside the loss, and what was verified is that of the loss alone"
)
_ATEN = torch.ops.aten
_PASSED_ON = (
    _ATEN.view.default, _ATEN._unsafe_view.default, _ATEN.reshape.default, _ATEN._to_copy.default, _ATEN.clone.default,
    _ATEN.alias.default, _ATEN.t.default, _ATEN.transpose.int, _ATEN.permute.default, _ATEN.unsqueeze.default,
    _ATEN.squeeze.dim, _ATEN.slice_backward.default,
)  # fmt: skip
"""What zeros are zeros after."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossAlone:
    """A backward pass without the gradients of some outputs.

    Attributes:
        graph: takes what the forward pass keeps, then the gradients of the other outputs.
        places: of the arguments of the whole pass that it does not take.
        outputs: places of the outputs whose gradients these are.
    """

    graph: GraphModule
    places: frozenset[int]
    outputs: frozenset[int]


def for_loss_alone(graph_module: GraphModule, least_bytes: int = LEAST_BYTES) -> LossAlone | None:
    """Return a backward pass for steps that give single numbers alone a gradient.

    None where no other output has a large gradient, where an output that is more than a number has a small one, or where a
    gradient is not merely added: in a part of a model that has graph breaks all outputs are given one.

    Args:
        graph_module: the backward pass, as AOTAutograd made it; it stays as it is.
        least_bytes: of a gradient.
    """
    copied = fx_trace.copied_graph(graph_module)
    given = [node for node in copied.graph.nodes if node.op == "placeholder"]
    gradients = [node for node in given if is_gradient(node)]
    large = {
        node: output for node in gradients
        if (output := autograd_graphs.output_of_gradient(node)) is not None and _elements(node) > 1
        and node.meta["val"].nbytes >= least_bytes
    }  # fmt: skip
    others = [node for node in gradients if node not in large]
    if not large or not others or any(_elements(node) != 1 for node in others) or not _take_out(copied, set(large)):
        return None
    places = frozenset(place for place, node in enumerate(given) if node in large)
    for node in large:
        copied.graph.erase_node(node)
    copied.graph.lint()
    copied.recompile()
    return LossAlone(graph=copied, places=places, outputs=frozenset(large.values()))


def _elements(node: Node) -> int:
    value = node.meta["val"]
    return int(value.numel()) if isinstance(value, torch.Tensor) else 0


def _take_out(graph_module: GraphModule, zeros: set[Node]) -> bool:
    """Replace sums with zeros by their other operand; returns whether nothing else reads zeros, else the graph is half done."""
    passed: list[Node] = []
    for node in list(graph_module.graph.nodes):
        read = [source for source in node.all_input_nodes if source in zeros]
        if not read or node in zeros:
            continue
        if node.target in _PASSED_ON:
            zeros.add(node)
            passed.append(node)
            continue
        rest = [source for source in node.all_input_nodes if source not in zeros]
        if node.target is not _ATEN.add.Tensor or node.kwargs or len(rest) != 1 or len(read) != 1 or not _is_like(rest[0], node):
            return False
        node.replace_all_uses_with(rest[0])
        graph_module.graph.erase_node(node)
        _move_views(graph_module, node, rest[0])
    for node in reversed(passed):
        graph_module.graph.erase_node(node)
    return True


def _move_views(graph_module: GraphModule, erased: Node, source: Node) -> None:
    """Let views of an erased op's result lie in the memory of what stands in its place: else they would count as copies."""
    (key,), moved = storages(erased), {source}
    for node in graph_module.graph.nodes:
        if not moved.isdisjoint(node.all_input_nodes) and key in storages(node):
            node.meta["val"] = fake_mode.fake_result(graph_module, node)
            moved.add(node)


def _is_like(one: Node, other: Node) -> bool:
    mine, own = one.meta["val"], other.meta["val"]
    return bool(mine.shape == own.shape and mine.dtype == own.dtype and mine.stride() == own.stride())


class EitherBackward:
    """Runs the backward pass that the gradients of a step are for.

    Args:
        whole: the pass as AOTAutograd made it.
        alone: of it.
        rewritten: runs ``alone``'s graph.
        say: is told the reason, the first time that the whole pass runs.
    """

    takes_none = True

    def __init__(self, whole: GraphModule, alone: LossAlone, rewritten: Pass, say: Callable[[str], object]) -> None:
        self._whole, self._alone, self._rewritten, self._say = whole, alone, rewritten, say
        self._given = [node.meta["val"] for node in whole.graph.nodes if node.op == "placeholder"]
        self._is_said = False

    def take(self, args: list[Any]) -> Any:
        """Run a pass; gradients that are not there are None.

        Args:
            args: what the forward pass kept, then a gradient for each output.
        """
        missing = frozenset(place for place, one in enumerate(args) if one is None and self._given[place] is not None)
        if missing == self._alone.places:
            kept = [one for place, one in enumerate(args) if place not in missing]
            args.clear()
            return self._rewritten.take(kept)
        if not self._is_said:
            self._is_said = True
            self._say(OTHER_GRADIENTS)
        whole = [zeros(self._given[place]) if place in missing else one for place, one in enumerate(args)]
        args.clear()
        return taking_a_list(self._whole).forward(whole)
