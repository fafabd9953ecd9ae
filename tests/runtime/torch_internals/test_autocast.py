"""Autocast's casts in a dynamo graph: the dtypes, the numbers, and what is refused."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.nn import functional

from fusion_advisor.runtime.torch_internals import autocast
from tests.runtime.torch_internals.dynamo_graphs import dynamo_graph

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
W = torch.randn(6, 6, generator=torch.Generator().manual_seed(1))


def lower(x, w):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return functional.linear(x, w) * 2


def higher(x, w):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = functional.cross_entropy(functional.linear(x, w), torch.zeros(4, dtype=torch.long))
        return loss, functional.linear(x, w).norm(dim=-1)


def several(x, w):
    with torch.autocast("cpu", dtype=torch.float16):
        return torch.cat([x @ w, x]), torch.einsum("ij,kj->ik", x @ w, x)


def nested(x, w):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ w
        with torch.autocast("cpu", enabled=False):
            z = x @ w
        return y, z, x @ w


def in_place(x, w):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ w
        y.add_(1).unsqueeze_(0)
        return y


def off(x, w):
    with torch.autocast("cpu", enabled=False):
        return x @ w


def switches(graph_module):
    return [node for node in graph_module.graph.nodes if "autocast" in str(node.target)]


@pytest.mark.parametrize("function", [lower, higher, several, nested, in_place])
def test_the_casts_as_ops_give_the_bits_that_autocast_gives(function):
    graph_module = dynamo_graph(function, X, W)[0]
    before = str(graph_module.graph)
    written = autocast.with_casts(graph_module)
    assert str(graph_module.graph) == before and switches(graph_module) and not switches(written)
    for found, wanted in zip(written(X, W), graph_module(X, W), strict=True):
        assert found.dtype == wanted.dtype and torch.equal(found, wanted)
    values = [node.meta["example_value"].dtype for node in written.graph.find_nodes(op="call_method", target="to")]
    assert values


def test_a_graph_without_autocast_and_one_under_the_callers_is_left_alone():
    for function, around in ((off, contextlib.nullcontext()), (lower, torch.autocast("cpu", dtype=torch.bfloat16))):
        graph_module = dynamo_graph(function, X, W)[0]
        with around:
            assert autocast.with_casts(graph_module) is graph_module


def checkpointed(x, w):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.utils.checkpoint.checkpoint(torch.matmul, x, w, use_reentrant=False)


def test_an_op_that_holds_a_graph_is_refused_by_name():
    graph_module = dynamo_graph(checkpointed, X, W)[0]
    with pytest.raises(autocast.NotFollowed, match=r"`\w+` lies in torch\.autocast"):
        autocast.with_casts(graph_module)
