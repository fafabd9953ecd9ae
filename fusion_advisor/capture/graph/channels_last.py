"""Channels last: the images of a convolution net lie in memory as its convolutions read them.

cuDNN's kernels for 16 bits read ``[batch, height, width, channels]``. Given channels first they are put between two copies: in a
ResNet-50 step (bf16, 16 images, H200) 67 such copies take 361 of 1,384 µs, and a 1 x 1 convolution, a plain GEMM on channels
last, runs on a slower kernel. So the first image is copied to channels last (``layout_copies``), and what follows keeps that
layout, as convolutions, norms, pools and pointwise ops do by themselves.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import GraphModule, Node

from fusion_advisor.capture.graph.layout_copies import Relayout

ID = "channels-last"
_CONVOLUTION = torch.ops.aten.conv2d.default
_FEWEST = 3
"""Convolutions: fewer gain less than the first and the last copy cost."""
_COPIES_EACH = 3
"""Convolutions for each copy at least; a net whose ops keep going back to channels first is left alone."""


def is_quicker_channels_last(image: torch.Tensor) -> bool:
    """Whether convolutions of such images have kernels for channels last alone: 16 bits on a GPU."""
    return image.is_cuda and image.element_size() == 2


def lay_channels_last(graph_module: GraphModule, is_quicker: Callable[[torch.Tensor], bool] = is_quicker_channels_last) -> int:
    """Give the convolutions of a graph channels-last images; returns how many copies that takes.

    Args:
        graph_module: traced on fake tensors; rewritten in place.
        is_quicker: given an image, says whether convolutions of it are.
    """
    convolutions = [node for node in graph_module.graph.nodes if node.target is _CONVOLUTION and _image(node).dim() == 4]
    first = [node for node in convolutions if not _is_channels_last(_image(node)) and is_quicker(_image(node))]
    if len(first) < _FEWEST:
        return 0
    change = Relayout(graph_module, ID)
    for node in first:
        if _is_channels_last(_image(node)):
            continue
        source = node.all_input_nodes[0]
        same = [other for other in first if other.all_input_nodes[0] is source]
        if not change.copy(source, torch.channels_last, same) or len(change.copies) * _COPIES_EACH > len(first) + _COPIES_EACH:
            change.undo()
            return 0
    return len(change.copies) if change.keep() else 0


def _image(convolution: Node) -> torch.Tensor:
    value = convolution.all_input_nodes[0].meta["val"]
    assert isinstance(value, torch.Tensor)
    return value


def _is_channels_last(image: torch.Tensor) -> bool:
    return image.is_contiguous(memory_format=torch.channels_last)
