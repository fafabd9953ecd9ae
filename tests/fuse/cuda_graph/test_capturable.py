"""Where attention's seeds lie: a backward pass reads them in host memory when it is launched, on the device in a graph."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.fx import Graph, GraphModule

from fusion_advisor.capture.graph.tracer import LiveCapture, Region
from fusion_advisor.fuse.cuda_graph.capturable import has_host_seeds, seed_slots
from fusion_advisor.fuse.decide.session import Bench

EFFICIENT = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
SEED, OFFSET = 6, 7
"""Places among the inputs below."""


def backward_of(op, dropout):
    graph = Graph()
    names = ("grad", "query", "key", "value", "out", "logsumexp", "seed", "offset")
    grad, query, key, value, out, logsumexp, seed, offset = map(graph.placeholder, names)
    if op is EFFICIENT:
        args = (grad, query, key, value, None, out, logsumexp, seed, offset, dropout, [True, True, True, False])
    else:
        args = (grad, query, key, value, out, logsumexp, None, None, 8, 8, dropout, True, seed, offset)
    graph.output(graph.call_function(op, args))
    return GraphModule({}, graph)


@pytest.mark.parametrize(
    ("op", "dropout", "slots"), [(EFFICIENT, 0.1, (SEED, OFFSET)), (EFFICIENT, 0.0, ()), (FLASH, 0.1, ())],
    ids=["efficient", "no dropout", "flash"],
)  # fmt: skip
def test_seeds_are_found_where_dropout_reads_them(op, dropout, slots):
    assert seed_slots(backward_of(op, dropout)) == slots


def test_a_backward_pass_with_seeds_of_the_host_is_not_recorded():
    module = backward_of(EFFICIENT, 0.1)
    on_device, on_host = SimpleNamespace(is_cuda=True), torch.zeros((), dtype=torch.int64)
    assert has_host_seeds(module, [torch.zeros(1)] * SEED + [on_host] * 2)
    assert not has_host_seeds(module, [torch.zeros(1)] * SEED + [on_device] * 2)
    assert not has_host_seeds(backward_of(FLASH, 0.1), [on_host] * 8)


@pytest.mark.parametrize(("dropout", "is_recorded"), [(0.1, False), (0.0, True)])
def test_its_step_is_timed_launch_by_launch(dropout, is_recorded):
    module = backward_of(EFFICIENT, dropout)
    region = Region(index=0, graph=module, original=module, example_args=tuple(torch.zeros(1) for _ in range(8)))
    bench = Bench(LiveCapture(), on_cuda=False)
    bench.live.regions.append(region)
    assert (bench.recorder is not None) == is_recorded
