"""Convolution nets in channels last: the same numbers and strides outside, one copy in, copies out where they must be."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fusion_advisor.capture.graph import channels_last, contiguous_rows
from fusion_advisor.capture.graph.channels_last import is_quicker_channels_last, lay_channels_last
from fusion_advisor.capture.graph.contiguous_rows import lay_rows_out
from fusion_advisor.capture.graph.layout_copies import LAID_OUT, keep_copies, kinds_of, result_of, undo
from fusion_advisor.capture.graph.tracer import capture_regions

IMAGES = torch.randn(2, 3, 16, 16)


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.one, self.two = nn.Conv2d(channels, channels, 3, padding=1), nn.Conv2d(channels, channels, 1)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, images):
        return torch.relu(images + self.norm(self.two(torch.relu(self.one(images)))))


class NormedBlock(nn.Module):
    """PoolFormer's: means less themselves and two convolutions, each after a norm over all of an image."""

    def __init__(self, channels, groups=1, wide=4):
        super().__init__()
        self.first, self.second = (nn.GroupNorm(groups, channels) for _ in range(2))
        self.one, self.two = nn.Conv2d(channels, wide * channels, 1), nn.Conv2d(wide * channels, channels, 1)

    def forward(self, images):
        normed = self.first(images)
        images = images + nn.functional.avg_pool2d(normed, 3, 1, 1, count_include_pad=False) - normed
        return images + self.two(torch.relu(self.one(self.second(images))))


class Net(nn.Module):
    def __init__(self, end=lambda images: images.mean((2, 3)), between=lambda images: images, block=Block):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.blocks = nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.ModuleList(block(16) for _ in range(3))
        self.end, self.between = end, between

    def forward(self, images):
        images = torch.nn.functional.max_pool2d(self.stem(images), 2)
        for block in self.blocks:
            images = self.between(block(images))
        return self.end(images)


def as_on_cuda(graph_module, node):
    """A node's fake result, where group norms return contiguous images as they do on CUDA."""
    result = result_of(graph_module, node)
    return result.contiguous() if node.target is torch.ops.aten.group_norm.default else result


def laid_out(model, fake_result=None):
    with torch.no_grad():
        (region,) = capture_regions(model.eval(), (IMAGES,), {}).regions
        assert not kinds_of(region.graph.graph)  # a CPU has no need for it
        count = lay_channels_last(region.graph, lambda _: True, fake_result)
        got, expected = region.graph(*region.example_args), model(IMAGES)
    got = got if isinstance(got, tuple | list) else (got,)
    expected = expected if isinstance(expected, tuple) else (expected,)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        assert one.stride() == other.stride()
    return region.graph, count


def images_of(graph_module):
    nodes = [node for node in graph_module.graph.nodes if node.target is torch.ops.aten.conv2d.default]
    return [node.all_input_nodes[0].meta["val"] for node in nodes]


def test_one_copy_lays_out_the_whole_net():
    graph, count = laid_out(Net())
    assert count == 1
    assert all(image.is_contiguous(memory_format=torch.channels_last) for image in images_of(graph))


def test_what_the_model_returns_is_copied_back():
    graph, count = laid_out(Net(end=lambda images: (images, images.sum())))
    assert count == 2
    assert [node.kwargs["memory_format"] for node in graph.graph.nodes if LAID_OUT in node.meta] == [
        torch.channels_last, torch.contiguous_format,
    ]  # fmt: skip


def test_a_view_that_needs_channels_first_gets_a_copy():
    _, count = laid_out(Net(end=lambda images: images.view(2, -1)))
    assert count == 2


def write_to(images):
    images[:, 0] = 0.0
    return images


@pytest.mark.parametrize(
    "between",
    [write_to, lambda images: images.view(2, -1).view(images.shape) * 2],
    ids=["written to", "back to channels first again and again"],
)
def test_a_net_that_does_not_keep_the_layout_is_left_alone(between):
    graph, count = laid_out(Net(between=between))
    assert count == 0 and not kinds_of(graph.graph)


def test_undone_it_is_as_before():
    graph, _ = laid_out(Net())
    with torch.no_grad():
        (before,) = capture_regions(Net().eval(), (IMAGES,), {}).regions
    undo(graph, channels_last.ID)
    assert [str(node.target) for node in graph.graph.nodes] == [str(node.target) for node in before.graph.graph.nodes]
    strides = [
        [node.meta["val"].stride() for node in one.graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)]
        for one in (graph, before.graph)
    ]
    assert strides[0] == strides[1]


def test_it_is_for_sixteen_bits_on_a_gpu():
    assert not is_quicker_channels_last(IMAGES) and not is_quicker_channels_last(IMAGES.half())


def test_a_dropout_in_place_that_is_off_writes_nothing():
    _, count = laid_out(Net(between=lambda images: torch.nn.functional.dropout(images, 0.5, training=False, inplace=True)))
    assert count == 1


def test_padding_by_name_is_a_convolution_too():
    net = Net()
    for block in net.blocks:
        block.one.padding = "same"
    _, count = laid_out(net)
    assert count == 1


def after_norms(graph):
    return [
        node for node in graph.graph.nodes
        if LAID_OUT in node.meta and node.all_input_nodes[0].target is torch.ops.aten.group_norm.default
    ]  # fmt: skip


def test_the_layout_spans_group_norms_that_do_not_keep_it():
    graph, count = laid_out(Net(block=NormedBlock), as_on_cuda)
    assert count == 7 and len(after_norms(graph)) == 6
    assert all(image.is_contiguous(memory_format=torch.channels_last) for image in images_of(graph))
    pools = [node for node in graph.graph.nodes if node.target is torch.ops.aten.avg_pool2d.default]
    assert len(pools) == 3 and all(not node.meta["val"].is_contiguous() for node in pools)
    undo(graph, channels_last.ID)
    assert not kinds_of(graph.graph) and all(image.is_contiguous() for image in images_of(graph))


def test_a_group_norm_that_keeps_the_layout_gets_no_copy():
    graph, count = laid_out(Net(block=NormedBlock))
    assert count == 1 and not after_norms(graph)


def test_what_a_norm_returns_to_the_caller_stays_as_it_was():
    model = Net(block=NormedBlock, end=lambda images: nn.functional.group_norm(images, 1))
    with torch.no_grad():
        (region,) = capture_regions(model.eval(), (IMAGES,), {}).regions
    output = next(node for node in region.graph.graph.nodes if node.op == "output")
    before = [node.meta["val"].stride() for node in output.all_input_nodes]
    assert lay_channels_last(region.graph, lambda _: True, as_on_cuda) == 7  # not run: a CPU's norm keeps the layout
    assert len(after_norms(region.graph)) == 6
    assert [node.meta["val"].stride() for node in output.all_input_nodes] == before


def test_a_view_of_a_norm_keeps_the_norms_memory():
    def flattened(images):
        return images + nn.functional.group_norm(images, 1).flatten(2).softmax(-1).view(images.shape)

    _, count = laid_out(Net(block=NormedBlock, between=flattened), as_on_cuda)
    assert count > 0


class Attended(NormedBlock):
    """A diffusion net's attention block: a norm's pixels are rows, and the rows become an image for a convolution."""

    def __init__(self, channels):
        super().__init__(channels)
        self.project, self.out = nn.Linear(channels, channels), nn.Conv2d(channels, channels, 1)

    def forward(self, images):
        batch, channels, height, width = images.shape
        rows = self.project(self.first(images).permute(0, 2, 3, 1).reshape(batch, height * width, channels))
        rows = rows.reshape(batch, height, width, channels).permute(0, 3, 1, 2).contiguous()
        return super().forward(images + self.out(rows))


def test_pixels_as_rows_read_a_norm_in_channels_last_and_are_an_image_without_a_copy():
    graph, count = laid_out(Net(block=Attended), as_on_cuda)
    permuted = [node for node in graph.graph.nodes if node.target is torch.ops.aten.permute.default]
    to_rows = [node for node in permuted if node.args[1] == [0, 2, 3, 1]]
    assert len(to_rows) == 3 and all(node.meta["val"].is_contiguous() for node in to_rows)
    copies = [node for node in graph.graph.nodes if node.target is torch.ops.aten.contiguous.default]
    assert len(copies) == count + 3  # the model's own
    assert keep_copies(graph.graph, channels_last.ID) == count
    graph.recompile()
    left = [node for node in graph.graph.nodes if node.target is torch.ops.aten.contiguous.default]
    assert len(left) == count
    last = {node.all_input_nodes[0] for node in left} & set(permuted)
    assert len(last) == 3 and all(node.meta["val"].is_contiguous(memory_format=torch.channels_last) for node in last)
    model = Net(block=Attended).eval()
    with torch.no_grad():
        (region,) = capture_regions(model, (IMAGES,), {}).regions
        torch.testing.assert_close(graph(*region.example_args)[0], model(IMAGES), rtol=1e-4, atol=1e-5)


def test_an_image_before_a_convolution_is_laid_out_as_no_rows():
    """An attention block's result lies in channels last, and a sum that begins with it."""

    class Summed(NormedBlock):
        def forward(self, images):
            rows = images.flatten(2).transpose(1, 2).contiguous()
            image = rows.transpose(1, 2).reshape(images.shape)
            return super().forward(image + images)

    with torch.no_grad():
        (region,) = capture_regions(Net(block=Summed).eval(), (torch.randn(2, 3, 64, 64),), {}).regions
        found = kinds_of(region.graph.graph)
        undo(region.graph, contiguous_rows.ID)
        assert lay_rows_out(region.graph, lambda _: True) == 0
        assert found == (contiguous_rows.ID,) and lay_rows_out(region.graph) > 0


def test_norms_that_cost_more_than_the_convolutions_spare_are_not_spanned():
    class Narrow(NormedBlock):
        def __init__(self, channels):
            super().__init__(channels, wide=1)

        def forward(self, images):
            for _ in range(8):
                images = torch.relu(self.first(images))
            return super().forward(images)

    graph, count = laid_out(Net(block=Narrow), as_on_cuda)
    assert count == 0 and not kinds_of(graph.graph)
