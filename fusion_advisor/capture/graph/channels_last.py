"""Channels last: the images and series of a convolution net lie in memory as its convolutions read them.

cuDNN's kernels for 16 bits read ``[batch, height, width, channels]``. Given channels first they are put between two copies: in a
ResNet-50 step (bf16, 16 images, H200) 67 such copies take 361 of 1,384 µs, and a 1 x 1 convolution, a plain GEMM on channels
last, runs on a slower kernel. So the first image is copied to channels last (``layout_copies``), and what follows keeps that
layout, as convolutions, norms, pools and pointwise ops do by themselves.

A group norm does not on CUDA: torch copies what it reads to channels first and returns that. Its result is copied back where the
convolutions spare more bytes than our norm moves. A chain of norm and copy (``chains.op_inputs.relaid_norm``) needs neither copy.

Series are images one pixel high (``capture.series``): Whisper's two convolutions of bf16 take 155 and 200 µs on an H100, 94 and
120 in channels last (``docs/measurements/zoo.md``). What follows often wants rows of channels, which then lie so.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import GraphModule, Node

from fusion_advisor.capture.graph.layout_copies import FakeResult, Relayout
from fusion_advisor.capture.graph.op_classes import base_name, class_of
from fusion_advisor.capture.series.as_images import is_served, show_as_images, show_as_series
from fusion_advisor.records import OpClass
from fusion_advisor.runtime.torch_internals import symbolic_sizes

ID = "channels-last"
CONVOLUTION = torch.ops.aten.conv2d.default
GROUP_NORM = torch.ops.aten.group_norm.default
_PERMUTE = torch.ops.aten.permute.default
_COPIES = (torch.ops.aten.contiguous.default, torch.ops.aten.clone.default)
_FEWEST = 3
"""Convolutions: fewer gain less than the first and the last copy cost."""
_FEWEST_OF_SERIES = 2
"""Convolutions of series: a speech encoder has no more, and reads their result as rows, which lie so in channels last."""
_COPIES_EACH = 3
"""Convolutions for each copy at least; a net whose ops keep going back to channels first is left alone."""


def is_quicker_channels_last(image: torch.Tensor) -> bool:
    """Whether convolutions of such images have kernels for channels last alone: 16 bits on a GPU."""
    return image.is_cuda and image.element_size() == 2


def lay_channels_last(
    graph_module: GraphModule,
    is_quicker: Callable[[torch.Tensor], bool] = is_quicker_channels_last,
    fake_result: FakeResult | None = None,
) -> int:
    """Give the convolutions of a graph channels-last images; returns how many copies that takes.

    Args:
        graph_module: traced on fake tensors; rewritten in place.
        is_quicker: given an image or a series, says whether convolutions of it are.
        fake_result: returns a node's fake result; left out, torch says.
    """
    return _lay_images(graph_module, is_quicker, fake_result) + _lay_series(graph_module, is_quicker, fake_result)


def _lay_series(
    graph_module: GraphModule, is_quicker: Callable[[torch.Tensor], bool], fake_result: FakeResult | None
) -> int:  # fmt: skip
    """Show series as images and give their convolutions channels last; returns how many copies that takes; 0: all is undone."""
    served = [node for node in graph_module.graph.nodes if is_served(node) and is_quicker(_image(node))]
    if len(served) < _FEWEST_OF_SERIES:
        return 0
    shown = show_as_images(graph_module, served, ID)
    change = Relayout(graph_module, ID, fake_result=fake_result)
    if _lay(change, shown) and change.keep():
        return len(change.copies)
    change.undo()
    show_as_series(graph_module.graph, ID)
    return 0


def _lay_images(
    graph_module: GraphModule, is_quicker: Callable[[torch.Tensor], bool], fake_result: FakeResult | None
) -> int:  # fmt: skip
    """Give the convolutions of images channels last; returns how many copies that takes."""
    convolutions = [node for node in graph_module.graph.nodes if node.target is CONVOLUTION and _image(node).dim() == 4]
    first = [node for node in convolutions if not is_channels_last(_image(node)) and is_quicker(_image(node))]
    if len(first) < _FEWEST:
        return 0
    ways: tuple[Callable[[Node], list[Node]], ...] = (_readers_after_norm, lambda _: [])
    for losers in ways:
        change = Relayout(graph_module, ID, losers=losers, fake_result=fake_result)
        is_laid_out, norms = _lay(change, first), len(change.restored)
        if is_laid_out and _norm_bytes(change) <= _convolution_bytes(first):
            return len(change.copies) if change.keep() else 0
        change.undo()
        if not norms:
            return 0
    return 0


def _lay(change: Relayout, first: list[Node]) -> bool:
    """Copy images for the convolutions that have none in channels last yet; False where that takes too many copies."""
    for node in first:
        if is_channels_last(_image(node)):
            continue
        source = node.all_input_nodes[0]
        same = [other for other in first if other.all_input_nodes[0] is source]
        if not change.copy(source, torch.channels_last, same):
            return False
        if (len(change.copies) - len(change.restored)) * _COPIES_EACH > len(first) + _COPIES_EACH:
            return False
    return True


def _readers_after_norm(norm: Node) -> list[Node]:
    """Return what reads a group norm's result and gets it in channels last; none unless the norm alone leaves that layout."""
    if norm.target is not GROUP_NORM:
        return []
    image, result = norm.all_input_nodes[0].meta["val"], norm.meta["val"]
    if result.dim() != 4 or not is_channels_last(image) or is_channels_last(result):
        return []
    return [user for user in norm.users if _takes_any_layout(user)]


def _takes_any_layout(reader: Node) -> bool:
    """Whether an op takes images as they lie: no copy, and no view, which shows the norm's memory.

    An attention block's permuted view is none of these: it makes rows of pixels, which lie so in channels last and are copied
    otherwise.
    """
    if reader.target is _PERMUTE:
        return reader.args[1] == [0, 2, 3, 1]
    if not isinstance(reader.target, torch._ops.OpOverload) or reader.target in _COPIES:
        return False
    return class_of(base_name(str(reader.target))) is not OpClass.VIEW


def _norm_bytes(change: Relayout) -> int:
    """Bytes that norms in channels last move more: our kernel reads an image twice, and without it what it reads is copied."""
    return sum(2 * _bytes(copy.meta["val"]) for copy in change.restored)


def _convolution_bytes(convolutions: list[Node]) -> int:
    """Bytes that convolutions move less: what they read and what they return is not copied."""
    return sum(2 * (_bytes(_image(node)) + _bytes(node.meta["val"])) for node in convolutions)


def _bytes(value: torch.Tensor) -> int:
    return symbolic_sizes.at_example(value).numel() * value.element_size()


def _image(convolution: Node) -> torch.Tensor:
    value = convolution.all_input_nodes[0].meta["val"]
    assert isinstance(value, torch.Tensor)
    return value


def is_channels_last(image: torch.Tensor) -> bool:
    """Whether an image lies in channels last, at the captured call's sizes where these are open."""
    return symbolic_sizes.at_example(image).is_contiguous(memory_format=torch.channels_last)
