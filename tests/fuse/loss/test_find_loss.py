"""Losses are found in dynamo's graphs; look-alikes are left alone, with the reason."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional

from fusion_advisor.fuse.loss.find_loss import find_losses
from fusion_advisor.fuse.loss.put_loss import with_chunked_losses
from fusion_advisor.fuse.loss.record import plan_losses, spared_bytes
from fusion_advisor.records import Status

BATCH, LENGTH, WIDTH, COLUMNS = 2, 6, 8, 19
flat = functools.partial(functional.cross_entropy, ignore_index=-100)


@pytest.fixture(autouse=True)
def _forget():
    yield
    torch.compiler.reset()


class Head(nn.Module):
    """A linear layer whose logits ``loss`` reads; ``result`` is what the step returns."""

    def __init__(self, loss, *, has_bias=False, returns=lambda loss, _: loss):
        super().__init__()
        self.head = nn.Linear(WIDTH, COLUMNS, bias=has_bias)
        self.loss, self.returns = loss, returns

    def forward(self, x, labels):
        logits = self.head(x.tanh())
        return self.returns(self.loss(logits, labels), logits)


def batch():
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, COLUMNS, (BATCH, LENGTH), generator=generator)
    labels[0, :3] = -100
    return torch.randn(BATCH, LENGTH, WIDTH, generator=generator), labels


def captured(model, *args):
    """Dynamo's graph of a call, and the inputs that it is called with."""
    found = []

    def backend(graph_module, _):
        def run(*inputs):
            found.append((graph_module, inputs))
            return graph_module(*inputs)

        return run

    torch.compile(model, backend=backend, dynamic=False)(*args)
    return found[0]


def plain(logits, labels):
    return flat(logits.view(-1, COLUMNS), labels.view(-1))


def shifted(logits, labels):
    """As models of transformers wrote it for years."""
    return flat(logits.float()[..., :-1, :].contiguous().view(-1, COLUMNS), labels[..., 1:].contiguous().view(-1))


def padded(logits, labels):
    """As they write it now, with the number of labels of all accumulated batches."""
    labels = functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
    return flat(logits.float().view(-1, COLUMNS), labels, reduction="sum") / 7


def module(logits, labels):
    return nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=3)(logits.reshape(-1, COLUMNS), labels.reshape(-1).clamp(min=0))


def flattened(logits, labels):
    return functional.cross_entropy(logits[:, 1:].flatten(0, 1), labels[:, 1:].flatten())


def palm(logits, labels):
    return plain(logits, labels) + 1e-2 * torch.logsumexp(logits.float(), dim=-1).square().mean()


def olmo(logits, labels):
    """The logarithms come first, of rows as they are; rows without a label count in neither sum."""
    logits, labels = logits.view(-1, COLUMNS), labels.view(-1)
    is_counted = labels != -100
    squares = logits.logsumexp(-1).pow(2)
    return flat(logits, labels) + 1e-2 * (squares * is_counted).sum() / is_counted.sum()


def sums_first(logits, labels):
    """The labels' view is made after the logarithms."""
    z = 1e-2 * logits.logsumexp(-1, keepdim=True).square().mean()
    return flat(logits.view(-1, COLUMNS), labels.view(-1)) + z


def sums_of_shifted(logits, labels):
    shift_logits, shift_labels = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
    z, width = shift_logits.double().logsumexp([-1]).square().sum(), shift_logits.size(-1)
    return flat(shift_logits.view(-1, width), shift_labels.view(-1), reduction="sum") + 1e-2 * z


WITH_SUMS = (palm, olmo, sums_first, sums_of_shifted)
FORMS = {one.__name__: one for one in (plain, shifted, padded, module, flattened, *WITH_SUMS)}


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_a_loss_is_found_in_each_form_and_computed_in_chunks(name, has_bias):
    torch.manual_seed(0)
    model = Head(FORMS[name], has_bias=has_bias)
    graph, inputs = captured(model, *batch())
    (site,) = find_losses(graph.graph)
    assert (site.refusal, site.returned, len(site.log_sums.nodes)) == ("", (), FORMS[name] in WITH_SUMS)
    found = with_chunked_losses(graph, [site])
    assert not any(
        node.target in (functional.linear, functional.cross_entropy, torch.logsumexp, "logsumexp")
        for node in found.module.graph.nodes
    )
    model.double()
    wide = [one.double() if one.is_floating_point() else one for one in inputs]
    grads = []
    for one in (graph, found.module):
        leaves = [leaf.detach().clone().requires_grad_(leaf.is_floating_point()) for leaf in wide]
        (loss,) = one(*leaves)
        loss.backward()
        grads.append([loss.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)])
    # The logits' dtype is the traced one, fp32.
    assert len(grads[0]) == len(grads[1]) == 3 + has_bias
    for mine, own in zip(grads[1], grads[0], strict=True):
        torch.testing.assert_close(mine.double(), own.double(), rtol=1e-5, atol=1e-6)


def reads_too(logits, labels):
    return plain(logits, labels) + logits.square().mean()


def capped(logits, labels):
    return plain(torch.tanh(logits / 30) * 30, labels)


def weighed(logits, labels):
    return functional.cross_entropy(logits.view(-1, COLUMNS), labels.view(-1), weight=torch.ones(COLUMNS))


def unreduced(logits, labels):
    return functional.cross_entropy(logits.view(-1, COLUMNS), labels.view(-1), reduction="none").sum()


def of_classes(logits, labels):
    return functional.cross_entropy(logits.view(-1, COLUMNS)[:, :7], labels.view(-1).clamp(-1, 6), ignore_index=-1)


def soft(logits, _):
    return functional.cross_entropy(logits.view(-1, COLUMNS), torch.full((BATCH * LENGTH, COLUMNS), 1 / COLUMNS))


def written(logits, labels):
    logits[..., 0] = 0.0
    return plain(logits, labels)


def sums_of_other_rows(logits, labels):
    return shifted(logits, labels) + logits.logsumexp(-1).square().mean()


def sums_of_positions(logits, labels):
    return plain(logits, labels) + logits.logsumexp(1).square().mean()


def sums_in_the_labels(logits, labels):
    flat_labels = (labels.view(-1) * (logits.logsumexp(-1).view(-1) < 100)).clamp(min=0)
    return functional.cross_entropy(logits.view(-1, COLUMNS), flat_labels)


def sums_before_the_labels(logits, labels):
    z = logits.logsumexp(-1).square().mean()
    return functional.cross_entropy(logits.view(-1, COLUMNS), labels.view(-1).clamp(min=0)) + z


REFUSED = {
    sums_of_other_rows: "`logsumexp` reads other rows of the logits than the loss",
    sums_of_positions: "`logsumexp` reads the logits too", sums_in_the_labels: "the labels are computed after `logsumexp`",
    sums_before_the_labels: "the labels are computed after `logsumexp`",
    reads_too: "`square` reads the logits too", capped: "`mul` changes the logits before the loss",
    weighed: "the loss weighs its classes", unreduced: "the loss is not reduced to one number",
    of_classes: "`getitem` changes the logits before the loss", soft: "the labels are not one int64 for each row",
    written: "`setitem` reads the logits too",
}  # fmt: skip


@pytest.mark.parametrize("loss", REFUSED, ids=lambda one: one.__name__)
def test_a_look_alike_is_left_alone_with_the_reason(loss):
    graph, _ = captured(Head(loss), *batch())
    plan = plan_losses(graph, drops_logits=True, least_bytes=0)
    assert plan.chunked is None and plan.row.status is Status.NOT_REPLACED
    assert REFUSED[loss] in plan.row.reason


def test_a_loss_of_no_linear_layer_is_no_site():
    class Other(nn.Module):
        def forward(self, x, labels):
            return functional.cross_entropy(x.exp().view(-1, WIDTH), labels.view(-1) % WIDTH)

    graph, _ = captured(Other(), *batch())
    assert find_losses(graph.graph) == [] and plan_losses(graph, drops_logits=True, least_bytes=0) is None


def test_small_logits_are_left_alone():
    graph, _ = captured(Head(plain), *batch())
    assert plan_losses(graph, drops_logits=False) is None
    assert plan_losses(graph, drops_logits=False, least_bytes=BATCH * LENGTH * COLUMNS * 4).chunked is not None


def test_logits_that_are_returned_stay_unless_they_may_be_dropped():
    graph, inputs = captured(Head(shifted, returns=lambda loss, logits: (loss, logits)), *batch())
    kept = plan_losses(graph, drops_logits=False, least_bytes=0)
    assert kept.chunked is None and kept.row.status is Status.NOT_REPLACED
    assert "the step returns its logits (912 B)" in kept.row.reason and "--drop-logits" in kept.row.reason
    dropped = plan_losses(graph, drops_logits=True, least_bytes=0)
    loss, logits = dropped.chunked.module(*inputs)
    own, own_logits = graph(*inputs)
    assert logits is None and dropped.chunked.dropped == (1,)
    torch.testing.assert_close(loss, own)
    assert own_logits.shape == (BATCH, LENGTH, COLUMNS)
    assert dropped.chunked.like(graph)(*inputs)[1] is None


def test_what_is_spared_at_least_is_the_logits_and_their_gradient_less_a_chunk():
    graph, _ = captured(Head(plain), *batch())
    (site,) = find_losses(graph.graph)
    # Chunks of 3 of 12 rows: logits, which their gradient replaces, and softmax.
    assert spared_bytes(site) == 12 * COLUMNS * (4 + 4) - 3 * COLUMNS * (4 + 4)
