"""Slices that take all of an open size are not in the graph, and all others are."""

from __future__ import annotations

import pytest
import torch

from fusion_advisor.capture.sizes.one_size import at_one_size
from fusion_advisor.capture.sizes.open_capture import capture_open
from fusion_advisor.fuse.decide.session import Bench
from fusion_advisor.fuse.shapes.decide_at import example_args


class Of(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def opened(function, *shape):
    torch.compiler.reset()
    torch.manual_seed(0)
    with torch.no_grad():
        return capture_open(Of(function).eval(), (), {"x": torch.randn(shape)}, {"x": ("batch", "", "tokens", "")[: len(shape)]})


def run(found, **sizes):
    """The graph and the function at other sizes."""
    _, kwargs = found.call
    shape = [sizes.get(name, size) for name, size in zip(found.dims["x"], kwargs["x"].shape, strict=True)]
    x = torch.randn(shape)
    given = example_args(found, (), {"x": x})
    return found.region.graph(*given)[0], x


def slices(found):
    return [node.args[1:] for node in found.region.graph.graph.nodes if node.target is torch.ops.aten.slice.Tensor]


@pytest.mark.parametrize(
    ("function", "left"),
    [
        (lambda x: x[:, :, None] * 2, 0),
        (lambda x: x[:, :, :, :3] * 2, 1),
        (lambda x: x[:, :, 1:] * 2, 1),
        (lambda x: x[:, :, ::2] * 2, 1),
        (lambda x: x[:, :, :-1] * 2, 1),
    ],
    ids=["all", "columns", "but the first", "every other", "but the last"],
)
def test_only_slices_that_take_all_are_left_out(function, left):
    found = opened(function, 3, 2, 5, 4)
    assert len(slices(found)) == left
    for batch, tokens in ((3, 5), (2, 17)):
        with torch.no_grad():
            ours, x = run(found, batch=batch, tokens=tokens)
            torch.testing.assert_close(ours, function(x))


def test_a_slice_that_is_returned_stays_a_tensor_of_its_own():
    found = opened(lambda x: (x + 1)[:, :, :], 3, 2, 5, 4)
    with torch.no_grad():
        ours, x = run(found, batch=2, tokens=7)
        torch.testing.assert_close(ours, x + 1)


def test_what_is_written_through_such_a_slice_is_written():
    def write(x):
        y = x * 2
        y[:, :, :].add_(1)
        return y * 3

    found = opened(write, 3, 2, 5, 4)
    assert slices(found) == []
    with torch.no_grad():
        ours, x = run(found, batch=2, tokens=7)
        torch.testing.assert_close(ours, write(x))


def test_copied_heads_are_found_in_a_graph_of_open_sizes():
    def attend(x):
        batch, _, tokens, width = x.shape
        copied = x[:, :2, None, :, :].expand(batch, 2, 4, tokens, width).reshape(batch, 8, tokens, width)
        return torch.nn.functional.scaled_dot_product_attention(x * 2, copied, copied)

    found = opened(attend, 3, 8, 5, 4)
    with torch.no_grad():
        given = example_args(found, (), {"x": torch.randn(2, 8, 7, 4)})
        live = at_one_size(found, given)
    assert Bench(live, on_cuda=False).with_passes(["group-heads"]).changed["group-heads"] == 1
