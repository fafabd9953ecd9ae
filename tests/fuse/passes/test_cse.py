"""Values that layers share: what is computed once, and above all what must be computed again."""

from __future__ import annotations

import pytest
import torch

from fusion_advisor.fuse.passes.constant_folding import fold_constants
from fusion_advisor.fuse.passes.cse import share_values
from fusion_advisor.fuse.rewrite.graph_rewriter import rewrite_region
from tests.tiny import region_of

X = torch.randn(4, 6)


def shared(function, *inputs, passes=(share_values,)):
    """Share values in a function; return (ops that are left, how many were gone) after comparing it with the function."""
    region, _, index_of = region_of(function, *inputs)
    module, changed = rewrite_region(region, index_of, [], passes)
    for _ in range(2):
        mine, theirs = ([value.clone() for value in inputs] for _ in range(2))
        torch.testing.assert_close(module(*mine), function(*theirs), rtol=0, atol=0)
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"], changed[0]


def test_equal_ops_are_one_and_so_is_what_follows_from_them():
    ops, gone = shared(lambda x: (x + 1).exp() * 2 - (x + 1).exp() * 3, X)
    assert gone == 2 and ops.count("aten.add.Tensor") == ops.count("aten.exp.default") == 1


def test_views_and_ops_that_change_nothing_are_seen_through_but_not_counted():
    ops, gone = shared(lambda x: (x.t() + 1).sum() + (x.to(torch.float32).t() + 1).prod(), X)
    assert gone == 1 and ops.count("aten.add.Tensor") == 2  # one of them adds the results


ALIKE = {
    "int and float": lambda x: x * 2 + x * 2.0,
    "bool and int": lambda x: torch.full_like(x, True) + torch.full_like(x, 1),
    "zeros of either sign": lambda x: x.clamp(min=0.0) + x.clamp(min=-0.0),
    "dtypes": lambda x: x.to(torch.float64) + x.to(torch.float16),
    "order of operands": lambda x: (x - x.t().reshape(4, 6)) + (x.t().reshape(4, 6) - x),
    "dims": lambda x: x.sum(0).sum() + x.sum(1).sum(),
}


@pytest.mark.parametrize("name", ALIKE)
def test_what_is_alike_is_not_equal(name):
    _, gone = shared(ALIKE[name], X)
    assert gone == (1 if name == "order of operands" else 0)  # the transposed copy is


def write_between(x):
    before = x + 1
    x.mul_(2)
    return before * (x + 1)


def write_through_a_view(x):
    before = x + 1
    x[0].mul_(2)
    return before * (x + 1)


def result_is_written(x):
    a, b = x + 1, x + 1
    b.mul_(2)
    return a * b


def result_is_written_through_a_view(x):
    a, b = x + 1, x + 1
    b[0].mul_(2)
    return a * b


def both_are_given_to_the_caller(x):
    return x + 1, x + 1


@pytest.mark.parametrize(
    "function",
    [write_between, write_through_a_view, result_is_written, result_is_written_through_a_view, both_are_given_to_the_caller],
)
def test_memory_that_changes_or_leaves_is_not_shared(function):
    ops, gone = shared(function, X.clone())
    assert gone == 0 and ops.count("aten.add.Tensor") == 2


def test_what_is_written_afterwards_may_be_read_once():
    def function(x, y):
        a, b = y + 1, y + 1
        x.mul_(2)
        return a * b * x

    assert shared(function, X.clone(), torch.randn(4, 6))[1] == 1


@pytest.mark.parametrize(
    "draw",
    [
        torch.rand_like,
        lambda x: torch.nn.functional.dropout(x, 0.5, True),
        lambda x: torch.randint(0, 9, (4, 6)),
        lambda x: torch.bernoulli(x.sigmoid()),
    ],
)
def test_random_numbers_are_drawn_as_often_as_before(draw):
    region, _, index_of = region_of(lambda x: draw(x) + draw(x), X)
    module, _ = rewrite_region(region, index_of, [], (share_values,))
    torch.manual_seed(0)
    ours = module(X)
    torch.manual_seed(0)
    assert torch.equal(ours, region.graph(X))


def test_nothing_is_shared_across_what_changes_the_meaning_of_ops():
    """A call that is no op (entering autocast) may make the next ops other ones."""

    def mode():
        return None

    region, _, _ = region_of(lambda x: (x + 1) * (x + 1), X)
    graph = region.graph.graph
    second = [node for node in graph.nodes if node.target is torch.ops.aten.add.Tensor][1]
    with graph.inserting_before(second):
        graph.call_function(mode)
    assert share_values(graph, region, {}) == 0


def test_shared_values_are_folded_once():
    def function(x):
        return (x + torch.arange(6).to(torch.float32)) * torch.arange(6).to(torch.float32)

    region, _, index_of = region_of(function, X)
    module, _ = rewrite_region(region, index_of, [], (share_values, fold_constants))
    assert len(list(module.buffers())) == 1
    torch.testing.assert_close(module(X), function(X))
