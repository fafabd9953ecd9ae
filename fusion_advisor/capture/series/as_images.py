"""Series as images one pixel high, so that their convolutions can read channels last.

PyTorch copies what ``conv1d`` reads to ``[batch, channels, steps]``, unless it lies so, and runs the convolution of an image one
pixel high. cuDNN then copies it to channels last and the result back. Written out in the graph, as ``unsqueeze``, ``conv2d`` and
``squeeze``, the same convolution takes an image as it lies (``channels_last``).

The results are the same with the same layouts. Where no copy to channels last stays, the graph gets its ``conv1d`` back.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fusion_advisor.runtime.torch_internals import fake_mode, symbolic_sizes

SHOWN_FOR = "is_series_shown_for"
"""In the ``meta`` of the ``squeeze`` that ends a convolution: the id of the rule that it is an image for."""
_ATEN = torch.ops.aten
_CONV1D, _CONV2D = _ATEN.conv1d.default, _ATEN.conv2d.default
_DEFAULTS = (None, None, None, 1, 0, 1, 1)
_HEIGHT = 2
"""The dim that a series has not."""
_FEWEST_CHANNELS = 8
"""In and out: fewer fill no tensor core, and a mono sound lies the same in both layouts."""


def is_served(node: Node) -> bool:
    """Whether a node is a convolution of a series, of one group, whose operands have known layouts.

    Args:
        node: of a traced graph.
    """
    if node.target is not _CONV1D or node.kwargs or not all("val" in source.meta for source in node.all_input_nodes):
        return False
    read = [source.meta["val"] for source in node.args[:2] if isinstance(source, Node)]
    series, kernel, out = map(symbolic_sizes.at_example, (*read, node.meta["val"]))
    if series.dim() != 3 or not series.is_contiguous() or not out.numel() or _options(node)[-1] != 1:
        return False
    return bool(min(kernel.shape[:2]) >= _FEWEST_CHANNELS)


def show_as_images(graph_module: GraphModule, convolutions: Sequence[Node], kind: str) -> list[Node]:
    """Write convolutions of series as convolutions of images; those whose result would be laid out otherwise stay.

    Args:
        graph_module: traced on fake tensors; rewritten in place.
        convolutions: served ones (:func:`is_served`), in the order of the graph.
        kind: id of the rule that wants images.

    Returns:
        The new convolutions.
    """
    images: dict[Node, Node] = {}
    made = []
    for node in convolutions:
        shown = _show(graph_module, node, images)
        if shown.meta["val"].stride() != node.meta["val"].stride():
            _erase(graph_module.graph, shown)
            continue
        shown.meta[SHOWN_FOR] = kind
        node.replace_all_uses_with(shown)
        graph_module.graph.erase_node(node)
        made.append(shown.all_input_nodes[0])
    graph_module.recompile()
    return made


def show_as_series(graph: Graph, kind: str | None = None) -> set[Node]:
    """Give a graph the convolutions of series back that are images for a rule.

    Args:
        graph: changed in place. A convolution that a rewrite has taken, or whose image is copied, stays as it is.
        kind: of one rule; None: of all.

    Returns:
        The new nodes.
    """
    found = [node for node in graph.nodes if node.meta.get(SHOWN_FOR, "") and kind in (None, node.meta[SHOWN_FOR])]
    return {new for shown in found for new in _as_series(graph, shown)}


def keep_images(graph: Graph, kind: str) -> None:
    """Let the convolutions that are images for a rule be images for good.

    Args:
        graph: changed in place.
        kind: the rule.
    """
    for node in graph.nodes:
        if node.meta.get(SHOWN_FOR) == kind:
            del node.meta[SHOWN_FOR]


def _show(graph_module: GraphModule, node: Node, images: dict[Node, Node]) -> Node:
    """Put the convolution of an image before one of a series; ``images`` are those of the series seen so far."""
    series, kernel, bias, *numbers, groups = _options(node)
    options = [[other, number] for other, number in zip((1, 0, 1), map(_number, numbers), strict=True)]
    origin: dict[str, Any] = {key: node.meta[key] for key in ("nn_module_stack", "stack_trace") if key in node.meta}

    def add(target: torch._ops.OpOverload, *args: Any, value: torch.Tensor | None = None) -> Node:
        made = graph_module.graph.call_function(target, args)
        made.meta = dict(origin)
        made.meta["val"] = fake_mode.fake_result(graph_module, made) if value is None else value
        return made

    # A convolution in C++ asks for an open batch, to choose its layout.
    known = node.meta["val"].unsqueeze(_HEIGHT) if symbolic_sizes.is_symbolic(node.meta["val"]) else None

    with graph_module.graph.inserting_before(node):
        if series not in images or not images[series].users:
            images[series] = add(_ATEN.unsqueeze.default, series, _HEIGHT)
        window = add(_ATEN.unsqueeze.default, kernel, _HEIGHT)
        return add(_ATEN.squeeze.dim, add(_CONV2D, images[series], window, bias, *options, groups, value=known), _HEIGHT)


def _as_series(graph: Graph, shown: Node) -> list[Node]:
    """Replace what shows one image as a series, and its convolution; the bias may have become an op of its own between them."""
    last = shown.all_input_nodes[0]
    added = last if last.target is _ATEN.add.Tensor else None
    bare = last.all_input_nodes[0] if added is not None else last
    chain = [bare, added, shown] if added is not None else [bare, shown]
    if bare.target is not _CONV2D or any(list(node.users) != [after] for node, after in pairwise(chain)):
        return []
    image, window, bias, *numbers, groups = _options(bare)
    if image.target is not _ATEN.unsqueeze.default or window.target is not _ATEN.unsqueeze.default:
        return []
    column = added.args[1] if added is not None else None
    with graph.inserting_before(bare):
        series = graph.call_function(
            _CONV1D, (image.args[0], window.args[0], bias, *([number[-1]] for number in numbers), groups)
        )  # fmt: skip
    series.meta = {**bare.meta, "val": bare.meta["val"].squeeze(_HEIGHT)}
    made = [series]
    if added is not None and isinstance(column, Node):
        with graph.inserting_before(bare):
            to_channels = graph.call_function(_ATEN.view.default, (column.args[0], [-1, 1]))
        with graph.inserting_before(added):
            total = graph.call_function(_ATEN.add.Tensor, (series, to_channels))
        to_channels.meta, total.meta = {**column.meta, "val": column.meta["val"].squeeze(-1)}, dict(added.meta)
        made += [to_channels, total]
    made[-1].meta["val"] = shown.meta["val"]
    shown.replace_all_uses_with(made[-1])
    _erase(graph, shown)
    return made


def _erase(graph: Graph, last: Node) -> None:
    """Take out a node that nobody reads, and what it alone was made of: ops of the convolution, no op before it."""
    sources = last.all_input_nodes
    graph.erase_node(last)
    for source in sources:
        if not source.users and source.target in _OWN:
            _erase(graph, source)


_OWN = (_CONV2D, _ATEN.add.Tensor, _ATEN.unsqueeze.default, _ATEN.view.default)


def _options(node: Node) -> list[Any]:
    """A convolution's seven arguments; defaults stand where the call leaves one out."""
    return [*node.args, *_DEFAULTS[len(node.args) :]]


def _number(option: Any) -> int:
    return int(option if isinstance(option, int) else option[0])
