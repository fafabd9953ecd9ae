"""``torch.compile(model, backend="fusion_advisor")``: what it cannot trace runs as it is, with the reason in a warning."""

from __future__ import annotations

import copy

import pytest
import torch

from fusion_advisor.fuse.plan.options import ApplyOptions
from tests.capture.graph.test_contiguous_rows import SOUND, Speech, captured, marks
from tests.fuse.conftest import backend_with


class Slope(torch.nn.Module):
    """Asks for a gradient in its forward."""

    def forward(self, x):
        with torch.enable_grad():
            at = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(torch.tanh(at).pow(2).sum(), at)
        return slope.detach()


class Jacobian(torch.nn.Module):
    def forward(self, x):
        return torch.func.jacrev(torch.sin)(x[0])


class Checkpointed(torch.nn.Module):
    def forward(self, x):
        return torch.cond(x.sum() > 0, self.checked, torch.cos, (x,)) * 2

    def checked(self, x):
        return torch.utils.checkpoint.checkpoint(torch.tanh, x, use_reentrant=False)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Slope(), "asks for gradients by itself"),
        (Jacobian(), "reads what a transform of torch.func computes"),
        (Checkpointed(), "it holds an op of graphs"),
    ],
    ids=["gradients", "jacrev", "checkpoint in a branch"],
)
def test_what_cannot_be_traced_runs_as_it_is_and_says_why(model, reason):
    x = torch.randn(4, 8)
    torch.compiler.reset()
    with torch.no_grad(), pytest.warns(UserWarning, match=reason):
        assert torch.equal(torch.compile(model.eval(), backend=backend_with(ApplyOptions()))(x), model(x))


def test_a_graph_whose_trace_holds_copies_of_layouts_is_fused_without_them():
    model = Speech().eval()
    assert marks(captured(model))
    torch.compiler.reset()
    with torch.no_grad():
        exact, eager = copy.deepcopy(model).double()(SOUND.double()), model(SOUND)
        compiled = torch.compile(model, backend=backend_with(ApplyOptions(keep="verified", min_share=0.0)))
        assert (compiled(SOUND) - exact).norm() <= 2 * (eager - exact).norm()
