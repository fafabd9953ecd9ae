"""A loss of each row and their sum: the numbers of the one op, in one chain with the log-softmax that it reads."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional

from fusion_advisor.capture.graph.op_records import describe
from fusion_advisor.capture.graph.tracer import Region
from fusion_advisor.chains.find import find_groups
from fusion_advisor.fuse.plan.plan import judge_with
from fusion_advisor.fuse.train.passes.row_losses import split_losses
from fusion_advisor.records.op_facts import overload_free
from tests.fuse.train.passes.test_gradient_parts import passes, targets

_aten = torch.ops.aten
WORDS, WIDTH, ROWS = 96, 16, 12


class Head(nn.Module):
    """A linear layer and its loss, which transformers takes in fp32; returns the logits too."""

    def __init__(self, *, reduction="mean", weight=None, is_fp32=True):
        super().__init__()
        self.linear, self.is_fp32 = nn.Linear(WIDTH, WORDS, bias=False), is_fp32
        self.loss = functools.partial(functional.cross_entropy, reduction=reduction, weight=weight)

    def forward(self, x, labels):
        logits = self.linear(x)
        return self.loss(logits.float() if self.is_fp32 else logits, labels), logits


def batch():
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, WORDS, (ROWS,), generator=generator)
    labels[::3] = -100
    return torch.randn(ROWS, WIDTH, generator=generator), labels


def forward_of(labels=None, **kind):
    """The forward graph of a head in fp32, and inputs for it."""
    torch.manual_seed(0)
    x, own = batch()
    model = Head(**kind)
    labels = own if labels is None else labels
    (graph,) = passes(model, x=x, labels=labels)["forward"]
    torch.compiler.reset()
    shapes = {tuple(model.linear.weight.shape): model.linear.weight.detach(), tuple(x.shape): x, tuple(labels.shape): labels}
    return graph, [shapes[tuple(node.meta["val"].shape)] for node in graph.graph.nodes if node.op == "placeholder"]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_split_losses_are_the_ops_own(reduction):
    graph, inputs = forward_of(reduction=reduction)
    before = graph(*inputs)
    assert _aten.nll_loss_forward.default in targets(graph)
    after = split_losses(graph)(*inputs)
    assert _aten.nll_loss_forward.default not in targets(graph) and _aten.nll_loss.default in targets(graph)
    x, weight, labels = (next(one for one in inputs if one.shape == shape) for shape in ((ROWS, WIDTH), (WORDS, WIDTH), (ROWS,)))
    truth = functional.cross_entropy(x.double() @ weight.double().T, labels, reduction=reduction)
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=0)
    assert (after[0].double() - truth).abs() <= 2 * (before[0].double() - truth).abs() + 1e-6


def test_the_mean_of_no_rows_is_no_number():
    graph, inputs = forward_of(labels=torch.full((ROWS,), -100))
    assert split_losses(graph)(*inputs)[0].isnan()


def test_losses_that_weigh_classes_or_are_of_16_bits_are_left_alone():
    x, labels = batch()
    narrow = Head(is_fp32=False).bfloat16(), x.bfloat16()
    for model, rows in ((Head(weight=torch.rand(WORDS)), x), narrow):
        (graph,) = passes(model, x=rows, labels=labels)["forward"]
        torch.compiler.reset()
        before = targets(graph)
        assert targets(split_losses(graph)) == before and _aten.nll_loss_forward.default in before


def chains_of(graph):
    """The ops of each chain of a pass that a kernel can take."""
    names = tuple(node.name for node in graph.graph.nodes if node.op == "placeholder")
    region = Region(index=0, graph=graph, original=graph, names=names, roles=("input",) * len(names))
    ops, _ = describe(region)
    groups = find_groups(ops, functools.partial(judge_with, ops))
    return [{overload_free(ops[place].target) for place in group.members} for group in groups if group.verdict.is_fusible]


def test_no_pass_of_a_16_bit_loss_writes_the_log_softmax():
    """Forward it is summed up in the kernel that computes it; the gradient's kernel computes it again of the logits."""
    x, labels = batch()
    found = passes(Head().bfloat16(), x=x.bfloat16(), labels=labels)
    torch.compiler.reset()
    (forward,), (backward,) = found["forward"], found["backward"]
    assert {"_to_copy", "_log_softmax", "nll_loss"} in chains_of(split_losses(forward))
    wanted = {"_log_softmax", "nll_loss_backward", "_log_softmax_backward_data", "_to_copy"}
    assert any(wanted <= chain for chain in chains_of(backward))
    kept = [node.meta["val"] for node in backward.graph.nodes if node.op == "placeholder"]
    assert [value.dtype for value in kept if value.shape == (ROWS, WORDS)] == [torch.bfloat16] * 2  # logits, their gradient
