"""Convolutions of series in channels last: the same numbers and strides outside, and series again where that is undone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fusion_advisor.capture.graph.channels_last import ID, lay_channels_last
from fusion_advisor.capture.graph.contiguous_rows import lay_rows_out
from fusion_advisor.capture.graph.layout_copies import kinds_of, result_of, take_copies_out, undo
from fusion_advisor.capture.graph.split_bias import is_slower_with_bias, join_bias, split_bias
from fusion_advisor.capture.graph.tracer import capture_regions
from fusion_advisor.fuse.decide.session import Bench

LAST = torch.channels_last
CONV1D, CONV2D = torch.ops.aten.conv1d.default, torch.ops.aten.conv2d.default


class Speech(nn.Module):
    """The start of a speech encoder: two convolutions, whose result is read as rows."""

    def __init__(self, channels=16, groups=1, between=lambda series: series, end=None):
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.Conv1d(channels, 32, 3, padding=1, groups=groups)
        self.two = nn.Conv1d(32, 32, 3, stride=2, padding="same" if end == "same" else 2, dilation=2, groups=groups)
        self.norm, self.between, self.end = nn.LayerNorm(32), between, end

    def forward(self, series):
        series = nn.functional.gelu(self.two(self.between(nn.functional.gelu(self.one(series)))))
        return series if self.end else self.norm(series.permute(0, 2, 1) + 1.0)


def sound(batch=2, channels=16, steps=24):
    return torch.randn(batch, channels, steps, generator=torch.Generator().manual_seed(1))


def captured(model, series):
    with torch.no_grad():
        return capture_regions(model.eval(), (series,), {})


def ops_of(graph_module):
    return [
        (str(node.target), node.meta["val"].shape, node.meta["val"].stride())
        for node in graph_module.graph.nodes
        if node.op == "call_function"
    ]


def is_right(graph_module, model, series):
    """Whether a graph is as close to the model in fp64 as the model is, and its result laid out as the model's."""
    (region,) = captured(model, series).regions
    with torch.no_grad():
        expected = model(series)
        got = graph_module(*region.example_args)[0]
        truth = model.double()(series.double())
        model.float()
    own = (expected - truth).abs().max().item()
    return (got - truth).abs().max().item() <= 2 * own + 1e-6 and got.stride() == expected.stride()


@pytest.mark.parametrize("batch", [1, 2])
def test_one_copy_lays_out_a_speech_encoder(batch):
    model, series = Speech(), sound(batch)
    live = captured(model, series)
    (region,) = live.regions
    assert not kinds_of(region.graph.graph)  # a CPU has no need for it
    assert lay_channels_last(region.graph, lambda _: True) == 1
    images = [node.all_input_nodes[0].meta["val"] for node in region.graph.graph.nodes if node.target is CONV2D]
    assert len(images) == 2 and all(image.is_contiguous(memory_format=LAST) for image in images)
    rows = next(node for node in region.graph.graph.nodes if node.target is torch.ops.aten.permute.default)
    assert rows.meta["val"].is_contiguous()  # a layer norm copies nothing
    assert is_right(region.graph, model, series)
    bench = Bench(live, on_cuda=False)
    bench.observe_values(set(), {op.index for op in bench.ops if op.outputs})
    assert not bench.surprises  # what runs is laid out as the graph says


def test_what_the_model_returns_is_copied_back():
    model, series = Speech(end="whole"), sound()
    (region,) = captured(model, series).regions
    assert lay_channels_last(region.graph, lambda _: True) == 2
    assert is_right(region.graph, model, series)


@pytest.mark.parametrize("is_split", [False, True], ids=["whole", "biases written out"])
def test_undone_it_is_as_before(is_split):
    model, series = Speech(), sound()
    (region,) = captured(model, series).regions
    before = ops_of(region.graph)
    assert lay_channels_last(region.graph, lambda _: True) == 1 and ops_of(region.graph) != before
    assert split_bias(region.graph, lambda *_: is_split, is_slower_with_bias) == 2 * is_split
    assert is_right(region.graph, model, series)
    undo(region.graph, ID)
    assert [node.target for node in region.graph.graph.nodes].count(CONV1D) == 2
    assert (ops_of(region.graph) == before) is not is_split
    assert is_right(region.graph, model, series)
    join_bias(region.graph.graph)
    assert ops_of(region.graph) == before


@pytest.mark.parametrize("is_split", [False, True], ids=["whole", "biases written out"])
def test_what_is_a_series_again_has_its_shape_before_anybody_computes_it(is_split):
    (region,) = captured(Speech(), sound()).regions
    lay_channels_last(region.graph, lambda _: True)
    split_bias(region.graph, lambda *_: is_split, is_slower_with_bias)
    take_copies_out(region.graph.graph)
    assert [node.target for node in region.graph.graph.nodes].count(CONV1D) == 2
    for node in region.graph.graph.nodes:
        if node.op == "call_function":
            assert node.meta["val"].shape == result_of(region.graph, node).shape, node


def back_and_forth(series):
    for _ in range(3):
        series = torch.relu(series.view(series.shape[0], -1).view(series.shape))
        series = nn.functional.conv1d(series, series.new_ones(32, 32, 1))
    return series


@pytest.mark.parametrize(
    ("model", "series"),
    [
        (Speech(groups=2), sound()),
        (Speech(channels=4), sound(channels=4)),
        (Speech(), sound().transpose(1, 2).contiguous().transpose(1, 2)),
        (Speech(between=back_and_forth), sound()),
    ],
    ids=["groups", "few channels", "rows already", "back to channels first again and again"],
)
def test_other_series_are_left_alone(model, series):
    (region,) = captured(model, series).regions
    before = ops_of(region.graph)
    assert lay_channels_last(region.graph, lambda _: True) == 0
    assert ops_of(region.graph) == before and not kinds_of(region.graph.graph)
    region.graph.graph.lint()


def test_images_stay_laid_out_where_series_do_not():
    class Both(Speech):
        def __init__(self):
            super().__init__(between=back_and_forth)
            self.stem = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(3))

        def forward(self, series):
            images = series[:, :, None].expand(-1, -1, 4, -1).contiguous()
            for one in self.stem:
                images = torch.relu(one(images))
            return super().forward(series) + images.mean((1, 2, 3))[:, None, None]

    model, series = Both(), sound()
    (region,) = captured(model, series).regions
    assert lay_channels_last(region.graph, lambda _: True) == 1
    targets = [node.target for node in region.graph.graph.nodes]
    assert targets.count(CONV2D) == 3 and targets.count(CONV1D) == 5
    assert is_right(region.graph, model, series)


def test_rows_that_were_copied_already_stay_right():
    class Read(Speech):
        def forward(self, series):
            rows = nn.functional.gelu(self.two(nn.functional.gelu(self.one(series)))).permute(0, 2, 1) + 1.0
            return self.norm(rows) + self.norm(rows * 2.0)

    model, series = Read(), sound(steps=512)
    (region,) = captured(model, series).regions
    found = kinds_of(region.graph.graph)
    assert found or lay_rows_out(region.graph) == 1
    assert lay_channels_last(region.graph, lambda _: True) == 1
    assert is_right(region.graph, model, series)
    undo(region.graph, ID)
    assert is_right(region.graph, model, series)


def test_it_is_for_sixteen_bits_on_a_gpu():
    (region,) = captured(Speech().bfloat16(), sound().bfloat16()).regions
    assert lay_channels_last(region.graph) == 0
