"""What dynamo traced under a transform becomes plain ops: the same numbers, equal subgraphs traced once, own lines."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fusion_advisor.capture.graph import func_transforms
from fusion_advisor.capture.graph.tracer import capture_regions
from tests.tiny import Calling


def scanned(x):
    """As Mamba: each token's state from the ones before it."""
    from torch._higher_order_ops.associative_scan import associative_scan

    def combine(left, right):
        return left[0] * right[0], right[0] * left[1] + right[1]

    return associative_scan(combine, (x, x * 2), dim=1, combine_mode="generic")


def scanned_as_one_op(x):
    """As Mamba on a GPU."""
    from torch._higher_order_ops.associative_scan import associative_scan_op

    def combine(left, decayed, right, added):
        return [left * right, right * decayed + added]

    _, states = associative_scan_op(combine, [x.transpose(0, 1), x.transpose(0, 1) * 2], ())
    return torch.nn.functional.silu(states)


def masked(x):
    return x * torch.vmap(lambda row: row >= 2)(torch.arange(8))[:, None]


def composite(x):
    return torch.vmap(lambda row: torch.nn.functional.layer_norm(row, (4,)) + row.softmax(-1))(x)


def nested(x):
    return torch.vmap(torch.vmap(lambda row: row * row.amax()))(x) + 1


def of_other_dims(x):
    one, two = torch.vmap(lambda row, scale: (row * scale, row.sum()), in_dims=(1, None), out_dims=(2, 0))(x, x[0, 0, 0])
    return one, two


def constant(x):
    return x * torch.tensor([4.0, 3.0, 2.0, 1.0]) + torch.vmap(lambda row: row * torch.tensor([1.0, 2.0, 3.0, 4.0]))(x)


def twice(x):
    one = torch.vmap(lambda row: row.exp() + 1)
    return one(one(x)) + one(x[:, :2]).sum()


def unread(x):
    torch.vmap(lambda row: row.exp() + 1)(x)
    return x * 2


def gradient(x):
    return torch.func.grad(lambda rows: torch.vmap(lambda row: row.sin())(rows).sum())(x) * 2


def tangent(x):
    return torch.func.jvp(torch.sin, (x,), (x * 2,))[1]


def of_each_row(x):
    return torch.vmap(torch.func.grad(lambda row: row.sin().sum()))(x)


def in_place(x):
    return torch.vmap(lambda row: row.clone().mul_(2).add_(1))(x)


def kept(x):
    """A checkpoint within another, in autocast of the model's own, with a constant and a transform inside."""
    place = torch.tensor([1.0, 2.0, 3.0, 4.0])

    def outer(rows, scale):
        one, _ = checkpoint(lambda row: (row.sin() * place, row), rows * scale, use_reentrant=False)
        return torch.vmap(lambda row: row * row.amax())(one), rows @ one.mT

    with torch.autocast("cpu", dtype=torch.bfloat16):
        first, product = checkpoint(outer, x + 1, 2.0, use_reentrant=False)
    return first, product


FUNCTIONS = [
    kept,
    scanned,
    scanned_as_one_op,
    masked,
    composite,
    nested,
    of_other_dims,
    constant,
    twice,
    unread,
    gradient,
    tangent,
    of_each_row,
    in_place,
]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_graph_computes_what_the_model_does(function):
    x = torch.randn(2, 8, 4)
    (region,) = capture_regions(Calling(function), (x,), {}).regions
    other = torch.randn(2, 8, 4)
    found, wanted = region.graph(other), torch.compile(function, backend="eager")(other)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    assert len(found) == len(wanted)
    for one, right in zip(found, wanted, strict=True):
        assert one.stride() == right.stride()
        torch.testing.assert_close(one, right)
    assert not any("checkpoint" in str(node.target) for node in region.graph.graph.nodes)
    assert not any("associative_scan" in str(node.target) for node in region.graph.graph.nodes)
    assert not any("_nesting" in str(node.target) or "batch_dim" in str(node.target) for node in region.graph.graph.nodes)


def test_ops_keep_the_line_that_vmap_was_called_in():
    (region,) = capture_regions(Calling(composite), (torch.randn(2, 8, 4),), {}).regions
    norms = [node for node in region.graph.graph.nodes if "layer_norm" in str(node.target)]
    assert norms and all("test_func_transforms.py" in node.meta["stack_trace"] for node in norms)


def test_equal_subgraphs_are_traced_once(monkeypatch):
    traced = []
    real = func_transforms._trace
    monkeypatch.setattr(func_transforms, "_trace", lambda *given: traced.append(given) or real(*given))
    capture_regions(Calling(twice), (torch.randn(2, 8, 4),), {})
    assert len(traced) == 2  # of three: the third is of another size


def test_a_graph_without_transforms_is_left_alone():
    from tests.runtime.torch_internals.dynamo_graphs import dynamo_graph

    _, same = dynamo_graph(lambda x: x * 2, torch.randn(3), then=lambda graph: func_transforms.without_transforms(graph) is graph)
    assert same
