"""What follows from sizes alone is computed once for each shape; a mask is a flag only at shapes where it says no more."""

from __future__ import annotations

import pytest
import torch

from fusion_advisor.capture.sizes.open_capture import capture_open
from fusion_advisor.capture.sizes.size_nodes import let_nodes_stand_for_sizes
from fusion_advisor.fuse.shapes.size_values import SizeValues, flagged, keep_size_values

WINDOW = 20


class Attention(torch.nn.Module):
    """Attention under a causal mask, of a window that short lengths do not notice."""

    def __init__(self, *, returns_mask=False):
        super().__init__()
        self.returns_mask = returns_mask

    def forward(self, x):
        places = torch.arange(x.shape[1])
        distance = places[:, None] - places[None, :]
        mask = (distance >= 0) & (distance < WINDOW)
        heads = x.unsqueeze(1)
        found = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)
        return (found, mask) if self.returns_mask else found


def graph_of(model):
    opened = capture_open(model.eval(), (), {"x": torch.randn(3, 11, 8)}, {"x": ("batch", "seq", "")})
    let_nodes_stand_for_sizes(opened.region.graph)
    return opened, opened.region.graph


def run(opened, module, x):
    opened.region.route.seen = seen = []
    with torch.no_grad():
        expected = opened.live.compiled.call(x=x)
    opened.region.route.seen = None
    with torch.no_grad():
        return module(*seen[0][1])[0], expected


def ops_of(module):
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


def test_a_mask_is_computed_once_for_each_shape():
    opened, module = graph_of(Attention())
    assert keep_size_values(module) > 3
    (values,) = [node.target for node in module.graph.nodes if isinstance(node.target, SizeValues)]
    assert not any("arange" in op for op in ops_of(module))
    for length in (5, 9, 5):
        found, expected = run(opened, module, torch.randn(2, length, 8))
        torch.testing.assert_close(found, expected)
    held = values.held_bytes
    run(opened, module, torch.randn(7, 9, 8))  # another batch has the same masks
    assert values.held_bytes == held == 25 + 81


def test_nothing_is_kept_that_a_recording_makes():
    _, module = graph_of(Attention())
    keep_size_values(module)
    (found,) = [node.target for node in module.graph.nodes if isinstance(node.target, SizeValues)]
    recordings = iter([True, False])
    values = SizeValues(found._compute, lambda: next(recordings))
    assert torch.equal(*(values(9)[0] for _ in range(2)))
    assert values.held_bytes == 81 and values(9)[0] is values(9)[0]


def test_a_shape_without_room_computes_its_values_each_time():
    opened, module = graph_of(Attention())
    keep_size_values(module)
    (values,) = [node.target for node in module.graph.nodes if isinstance(node.target, SizeValues)]
    values.most_bytes = 50
    for length in (5, 9, 9):
        found, expected = run(opened, module, torch.randn(2, length, 8))
        torch.testing.assert_close(found, expected)
    assert values.held_bytes == 25


def test_what_the_caller_is_given_is_not_kept():
    _, module = graph_of(Attention(returns_mask=True))
    keep_size_values(module)
    output = next(node for node in module.graph.nodes if node.op == "output")
    (mask,) = [node for node in output.all_input_nodes if node.meta["val"].dtype == torch.bool]
    assert "getitem" not in str(mask.target)


def test_a_mask_becomes_a_flag_at_shapes_where_it_says_no_more():
    opened, module = graph_of(Attention())
    (seq,) = [opened.places()["seq"].name]
    found = flagged(module, [seq], [11])
    assert found is not None
    with_flag, says_flags = found
    assert says_flags(WINDOW)
    assert not says_flags(WINDOW + 1)  # the window cuts a key off
    assert not any("arange" in op for op in ops_of(with_flag))
    assert any("arange" in op for op in ops_of(module))
    for length in (5, WINDOW):
        ours, expected = run(opened, with_flag, torch.randn(2, length, 8))
        torch.testing.assert_close(ours, expected)
    ours, expected = run(opened, with_flag, torch.randn(2, 40, 8))
    assert not torch.allclose(ours, expected)  # why each shape's mask is looked at


@pytest.mark.parametrize("at", [WINDOW + 5, 64])
def test_masks_that_say_more_stay(at):
    opened, module = graph_of(Attention())
    assert flagged(module, [opened.places()["seq"].name], [at]) is None


class Scaled(torch.nn.Module):
    """Reads one range of sizes ahead of the sum that another one is made of."""

    def forward(self, x):
        places = x + torch.arange(x.shape[1])[:, None]
        return (torch.tanh(places) * torch.arange(1, x.shape[1] + 1)[:, None],)


def test_a_value_of_sizes_may_be_read_above_the_sum_that_a_later_one_needs():
    opened, module = graph_of(Scaled())
    assert keep_size_values(module) > 1
    assert not any("arange" in op for op in ops_of(module))
    for length in (1, 5, 9):
        found, expected = run(opened, module, torch.randn(2, length, 8))
        torch.testing.assert_close(found, expected[0])
