"""Buffers that a training step writes to, with checkpoints around the model and inside: as often as eager writes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import fusion_advisor as fa
from fusion_advisor.fuse.train.trained_graph import WRITTEN_AGAIN
from tests.fuse.train.kept_graphs import KeptGraphs
from tests.fuse.train.test_trained_graph import gradients
from tests.fuse.train.test_trained_model import OPTIONS, applied, compare

STEPS = 5


class Net(nn.Module):
    """A convolution and a batch norm; a counter that the batch norm's gradient does not depend on."""

    def __init__(self, is_checkpointed=False):
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(8, 4)
        self.register_buffer("seen", torch.zeros(2))
        self.is_checkpointed = is_checkpointed

    def normed(self, x):
        self.seen[0].add_(1)
        return functional.gelu(self.norm(self.first(x)))

    def forward(self, x):
        normed = checkpoint(self.normed, x, use_reentrant=False) if self.is_checkpointed else self.normed(x)
        return self.last(normed.mean((2, 3)))


def images(count, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 3, 8, 8, generator=generator).to(dtype) for _ in range(count)]


def around(model, x, *, use_reentrant):
    if not use_reentrant:
        return checkpoint(model, x, use_reentrant=False)
    return checkpoint(lambda x, _: model(x), x, torch.ones((), requires_grad=True), use_reentrant=True)


def trained(model, call):
    """Return the model's parameters and buffers after some steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x in images(STEPS, model.last.weight.dtype):
        optimizer.zero_grad()
        call(model, x).square().mean().backward()
        optimizer.step()
    return model.state_dict()


def is_as_near_to_fp64_as_eager(ours, eagers, truth):
    for name, true in truth.items():
        if not true.is_floating_point():
            assert torch.equal(ours[name], true) and torch.equal(eagers[name], true), name
            continue
        own, theirs = (float((one[name].double() - true).norm() / true.norm()) for one in (ours, eagers))
        assert own <= 3 * theirs + 2e-6, (name, own, theirs)


@pytest.fixture(scope="module")
def fused():
    torch.manual_seed(0)
    model = Net().train()
    yield applied(model, (images(1)[0],)), copy.deepcopy(model)
    torch.compiler.reset()


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.filterwarnings("ignore:fusion-advisor runs the original ops. gradients are disabled")
def test_a_checkpoint_around_the_model_writes_twice(fused, use_reentrant):
    live, start = fused
    live.model.load_state_dict(start.state_dict())
    before = live.launches
    plain, wide = copy.deepcopy(start), copy.deepcopy(start).double()
    rows = [
        trained(model, lambda model, x: around(model, x, use_reentrant=use_reentrant)) for model in (live.model, plain, wide)
    ]  # fmt: skip
    is_as_near_to_fp64_as_eager(*rows)
    assert int(rows[0]["norm.num_batches_tracked"]) == 2 * STEPS and live.launches > before


def test_hooks_on_what_is_kept_write_once_and_may_raise(fused):
    live, start = fused
    live.model.load_state_dict(start.state_dict())
    with torch.autograd.graph.save_on_cpu():
        live.model(images(1)[0])
    assert int(live.model.norm.num_batches_tracked) == 1

    def failing(_):
        raise ValueError("said by a hook")

    with pytest.raises(ValueError, match="said by a hook"), torch.autograd.graph.saved_tensors_hooks(failing, failing):
        live.model(images(1)[0])


def test_a_checkpoint_inside_that_writes_runs_the_original_ops_with_the_reason():
    torch.manual_seed(0)
    model = Net(is_checkpointed=True).train()
    plain, wide, backend = copy.deepcopy(model), copy.deepcopy(model).double(), KeptGraphs()
    compiled = torch.compile(model, backend=backend, dynamic=False)
    with pytest.warns(UserWarning, match="a checkpoint inside the model writes to a buffer"):
        ours = trained(model, lambda _, x: compiled(x))
    eagers, truth = trained(plain, Net.__call__), trained(wide, Net.__call__)
    is_as_near_to_fp64_as_eager(ours, eagers, truth)
    assert int(ours["norm.num_batches_tracked"]) == int(ours["seen"][0]) == 2 * STEPS
    (graph,) = backend.graphs
    assert graph.outcome.reason == WRITTEN_AGAIN
    compare(gradients(model), gradients(plain))
    torch.compiler.reset()


def test_apply_says_so_too():
    torch.manual_seed(0)
    model = Net(is_checkpointed=True).train()

    with pytest.warns(UserWarning, match="a checkpoint inside the model writes to a buffer"):
        fused = fa.apply(model, (images(1)[0],), **OPTIONS)
    assert not fused.is_applied and WRITTEN_AGAIN in " ".join(
        [*fused.report.warnings, *(row.reason for row in fused.report.rewrites)]
    )
