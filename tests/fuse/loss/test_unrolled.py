"""A loss in chunks as the ops of its chunks: the op's results, aligned products, one chunk's logits at a time, one kernel."""

from __future__ import annotations

import operator

import pytest
import torch
from torch.fx import Graph, GraphModule

from fusion_advisor.fuse.loss.chunked_loss import MEAN, SUM
from fusion_advisor.fuse.loss.peak_memory import step_peak_bytes
from fusion_advisor.fuse.loss.unrolled import unroll_losses
from fusion_advisor.runtime.torch_internals import fake_mode
from tests.fuse.loss.test_chunked_loss import Products, assert_as_near, eager, operands, step

OP = torch.ops.fusion_advisor.linear_cross_entropy.default


def graph_of(tensors, dtype, *, reduction=MEAN, smoothing=0.0, rows=10, asked=(True, True, False), read=3):
    """A pass that holds the op and returns its results."""
    graph, fakes = Graph(), fake_mode.fake_tensors(list(tensors))
    given = [None if one is None else graph.placeholder(f"primals_{number}") for number, one in enumerate(tensors)]
    for node, fake in zip(given, fakes, strict=True):
        if node is not None:
            node.meta["val"] = fake
    node = graph.call_function(OP, (*given, dtype, reduction, -100, smoothing, rows, list(asked)))
    module = GraphModule(torch.nn.Module(), graph)
    node.meta["val"] = fake_mode.fake_result(module, node)
    parts = [graph.call_function(operator.getitem, (node, number)) for number in range(read)]
    for number, part in enumerate(parts):
        part.meta["val"] = node.meta["val"][number]
    graph.output(tuple(parts))
    module.recompile()
    return module


def both(tensors, dtype, **form):
    module = graph_of(tensors, dtype, **form)
    given = [one for one in tensors if one is not None]
    before = module(*given)
    assert OP not in {node.target for node in unroll_losses(module).graph.nodes}
    return before, module(*given), module


@pytest.mark.parametrize("reduction", [MEAN, SUM])
@pytest.mark.parametrize("rows", [1, 10, 37])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_results_are_as_near_to_fp64_as_eagers(dtype, rows, reduction):
    hidden, weight, _, labels = operands(torch.float32, has_bias=False)
    tensors = (hidden.to(dtype), weight.to(dtype), None, labels)
    _, ours, _ = both(tensors, dtype, rows=rows, reduction=reduction)
    truth = step(eager, [tensors[0].double(), tensors[1].double(), None], labels, reduction=reduction)
    theirs = step(eager, tensors[:3], labels, reduction=reduction)
    assert_as_near([one.double() for one in ours], theirs, truth, dtype)
    assert [one.dtype for one in ours] == [torch.float64 if dtype == torch.float64 else torch.float32, dtype, dtype]


def test_results_have_the_layout_of_the_ops_and_the_same_bits_every_time():
    hidden, weight, _, labels = operands(torch.bfloat16, has_bias=False)
    before, after, module = both((hidden, weight, None, labels), torch.bfloat16)
    assert [(one.shape, one.stride(), one.dtype) for one in before] == [(one.shape, one.stride(), one.dtype) for one in after]
    assert all(torch.equal(one, other) for one, other in zip(after, module(hidden, weight, labels), strict=True))


def test_where_all_rows_are_ignored_the_mean_is_nan_and_gradients_are_zero():
    hidden, weight, _, labels = operands(torch.bfloat16, has_bias=False)
    _, (loss, *gradients), _ = both((hidden, weight, None, torch.full_like(labels, -100)), torch.bfloat16)
    assert loss.isnan() and not any(one.any() for one in gradients)


def test_a_wider_weight_gets_its_own_gradient():
    hidden, weight, _, labels = operands(torch.float32, has_bias=False)
    before, after, _ = both((hidden, weight, None, labels), torch.bfloat16)
    assert [one.dtype for one in after] == [torch.float32, torch.bfloat16, torch.float32]
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("asked", [(True, False, False), (False, True, False)])
def test_what_nobody_asks_for_is_not_computed(asked):
    hidden, weight, _, labels = operands(torch.float32, has_bias=False)
    module = graph_of((hidden, weight, None, labels), torch.float32, asked=asked, read=2 if asked[0] else 1)
    before = module(hidden, weight, labels)
    torch.testing.assert_close(unroll_losses(module)(hidden, weight, labels), before)
    products = sum(node.target is torch.ops.aten.mm.default for node in module.graph.nodes)
    assert products == (2 if asked[0] else 1) * 4 + (0 if asked[0] else 4)


LEFT = {
    "bias": ({}, True, torch.float32), "smoothing": ({"smoothing": 0.1}, False, torch.float32),
    "computed again": ({}, False, torch.float16), "nothing asked": ({"asked": (False, False, False)}, False, torch.float32),
    "a result that is empty is read": ({"read": 4}, False, torch.float32),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_what_stays_one_op(name):
    form, has_bias, dtype = LEFT[name]
    hidden, weight, bias, labels = operands(dtype, has_bias=has_bias)
    module = unroll_losses(graph_of((hidden, weight, bias, labels), dtype, **form))
    assert OP in {node.target for node in module.graph.nodes}


def test_all_products_of_an_odd_vocabulary_have_aligned_rows():
    hidden, weight, _, labels = operands(torch.bfloat16, has_bias=False)
    module = unroll_losses(graph_of((hidden, weight, None, labels), torch.bfloat16))
    with Products() as ours:
        module(hidden, weight, labels)
    assert ours.products == 3 * 4 and not any(one % 16 for one in ours.strides)


def test_one_chunks_logits_are_there_at_a_time():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(count, 4, generator=generator).bfloat16() for count in (256, 1001))
    labels, nothing, peaks = torch.zeros(256, dtype=torch.int64), Graph(), []
    nothing.output(())
    for rows in (32, 256):
        module = unroll_losses(graph_of((hidden, weight, None, labels), torch.bfloat16, rows=rows))
        peaks.append(step_peak_bytes(module, GraphModule(torch.nn.Module(), nothing)))
    assert peaks[0] < 0.25 * peaks[1]


def test_what_pads_nine_words_to_sixteen_has_no_share():
    hidden, weight, _, labels = operands(torch.bfloat16, has_bias=False)
    tensors = (hidden, weight[:9].contiguous(), None, labels.where(labels < 0, labels % 9))
    _, ours, _ = both(tensors, torch.bfloat16)
    truth = step(eager, [tensors[0].double(), tensors[1].double(), None], tensors[3])
    theirs = step(eager, tensors[:3], tensors[3])
    assert_as_near([one.double() for one in ours], theirs, truth, torch.bfloat16)
