"""Counters of all layers in one launch: what moves together, and every reason why one stays where it is."""

from __future__ import annotations

import pytest
import torch

from fusion_advisor.capture.graph.tracer import capture_regions
from fusion_advisor.fuse.decide.session import Bench
from fusion_advisor.fuse.passes.foreach_counters import MOST_ELEMENTS, batch_counters
from fusion_advisor.fuse.rewrite.graph_rewriter import rewrite_region
from tests.tiny import LAYERS, decode_step, qwen2, region_of


def counts(number=3, elements=None):
    return [torch.tensor(7 + place) if elements is None else torch.arange(elements) + place for place in range(number)]


def batched(function, *inputs):
    """Batch a function's counters; return (ops that are left, launches saved) after comparing it with the function."""
    region, _, index_of = region_of(function, *inputs)
    module, (saved,) = rewrite_region(region, index_of, [], (batch_counters,))
    module.graph.lint()
    mine, theirs = ([value.clone() for value in inputs] for _ in range(2))
    for _ in range(2):
        assert torch.equal(module(*mine), function(*theirs))
        assert all(map(torch.equal, mine, theirs))
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"], saved


def cache_step(*counters):
    """Each layer reads its count, moves it on and uses what it read."""
    positions = []
    for count in counters:
        positions.append(torch.arange(1) + count)
        count.add_(1)
    return torch.cat(positions)


def test_positions_and_counts_of_all_layers_take_two_launches():
    ops, saved = batched(cache_step, *counts(4))
    assert saved == 6
    assert ops.count("aten._foreach_add.List") == ops.count("aten._foreach_add_.Scalar") == 1
    assert not {"aten.add.Tensor", "aten.add_.Tensor"} & set(ops)


def test_a_decode_step_of_a_model():
    model = qwen2()[0]
    bench = Bench(capture_regions(model, (), decode_step(model, batch=1)), on_cuda=False)
    written = bench.live.written
    expected = bench.run(bench.build((), ()))[0].clone()
    moved = {name: value.clone() for name, value in written.tensors.items()}
    written.rewind()
    variant = bench.build((), ("share-values", "batch-counters"))
    assert variant.changed["batch-counters"] == 2 * (LAYERS - 1)
    assert torch.equal(bench.run(variant)[0], expected)
    assert moved and all(torch.equal(written.tensors[name], value) for name, value in moved.items())


@pytest.mark.parametrize("count_of", [lambda a: a, lambda a: a.view(1)], ids=["itself", "through a view"])
def test_sums_read_before_a_count_moves_on_and_after_it_are_different_sums(count_of):
    def function(a, b):
        before = torch.arange(1) + a
        count_of(a).add_(1)
        after = torch.arange(1) + a
        other = torch.arange(1) + b
        return torch.cat([before, after, other])

    ops, saved = batched(function, *counts(2))
    # `after` cannot go up past the write, so it begins a batch of its own, which `other` joins.
    assert saved == 1 and ops.count("aten.add.Tensor") == 1


def test_a_count_that_is_read_between_stays():
    def function(a, b):
        a.add_(1)
        read = b * 2
        b.add_(1)
        return read + a * b

    assert batched(function, *counts(2))[1] == 0


def test_a_count_that_is_moved_on_twice_is_moved_on_twice():
    def function(a, b):
        a.add_(1)
        b.add_(1)
        a.add_(1)
        return a * b

    ops, saved = batched(function, *counts(2))
    assert saved == 1 and ops.count("aten.add_.Tensor") == 1


def test_a_sum_of_what_is_computed_later_stays():
    def function(a, b):
        first = a + b
        return first * (first * 2 + b)

    assert batched(function, *counts(2))[1] == 0


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: (a + b) * torch.add(a, b, alpha=2),
        lambda a, b: (a + 1) * (b + 2),
        lambda a, b: (a.double() + b.double()) * (b.double() + a.double()),
        lambda a, b: (a.expand(4) + b.expand(4)) * (b.expand(4) + a.expand(4)),
        lambda a, b: a.add_(1) * b.add_(2),
        lambda a, b: a.add_(b) * b.add_(a),
    ],
    ids=["alpha", "numbers", "floats", "expanded", "other steps", "by a tensor"],
)
def test_other_additions_stay(function):
    assert batched(function, *counts(2))[1] == 0


def test_large_sums_stay():
    def function(a, b):
        return (a + b) * (b + a)

    assert batched(function, *counts(2, MOST_ELEMENTS))[1] == 1
    assert batched(function, *counts(2, MOST_ELEMENTS + 1))[1] == 0


@pytest.mark.gpu
def test_counters_of_28_layers_are_two_launches_on_a_gpu():
    from torch.profiler import ProfilerActivity, profile

    given = [count.cuda() for count in counts(28)]

    def function(*counters):
        positions = []
        for count in counters:
            positions.append(torch.arange(1, device="cuda") + count)
            count.add_(1)
        return torch.cat(positions)

    region, _, index_of = region_of(function, *given)
    module, _ = rewrite_region(region, index_of, [], (batch_counters,))
    module(*given)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        module(*given)
        torch.cuda.synchronize()
    kernels = [event.key for event in seen.key_averages() for _ in range(event.count)]
    assert sum("multi_tensor_apply" in name for name in kernels) == 2
