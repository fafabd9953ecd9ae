"""Boolean masks of open sizes that several attention calls read: converted once, for every size alike."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from fusion_advisor.codegen.cpp.backend import find_compiler
from fusion_advisor.fuse.passes.registry import size_bound
from fusion_advisor.fuse.shapes.sized_fusion import LooksAtSizes, Workpiece, build
from tests.fuse.points.test_choose_layouts import work_on

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="kernels of a CPU need a C++ compiler: apt-get install g++")

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


class Padded(torch.nn.Module):
    """Attention calls that read one mask: of the keys whose first number is positive, or of the length alone."""

    def __init__(self, form="expanded"):
        super().__init__()
        self.form = form

    def mask(self, x):
        batch, tokens, _ = x.shape
        allowed = (x[..., 0] > 0)[:, None, None]
        if self.form == "causal":
            return allowed & torch.ones(tokens, tokens, dtype=torch.bool).tril()
        if self.form == "pairs":
            return (allowed | allowed.transpose(-1, -2)).transpose(-1, -2)
        if self.form == "of sizes":
            allowed = torch.arange(tokens) % 3 < 2
        return allowed.expand(batch, 1, tokens, tokens)

    def forward(self, hidden_states):
        x = functional.silu(hidden_states) * 1.5
        batch, tokens, _ = x.shape
        mask, q = self.mask(hidden_states), x.view(batch, tokens, 8, 4).transpose(1, 2)
        for _ in range(2):
            q = functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)
        return q.transpose(1, 2).reshape(x.shape)


def workpiece_of(form="expanded"):
    work = work_on(maker=lambda: Padded(form), row_ns=0, op_ns=1000, shapes="batch=2..8,seq=1..64")
    return work, Workpiece(work.ranged.finder(work.capture).next())


@pytest.mark.parametrize("form", ["expanded", "causal", "pairs"])
def test_a_mask_is_converted_once_at_any_size(form):
    """A size of 1 among them: how the mask lies asks nothing of it."""
    work, workpiece = workpiece_of(form)
    assert workpiece.by_one_size == frozenset()
    module = build(workpiece, [], ("share-masks",))
    targets = [node.target for node in module.graph.nodes]
    assert targets.count(torch.ops.aten.where.self) == 1
    (mask,) = {node.args[3] for node in module.graph.nodes if node.target is ATTENTION}
    assert mask.meta["val"].dtype == torch.float32
    torch.manual_seed(0)
    least = workpiece.piece.box[1].least
    for batch, tokens in ((2, least), (3, 17), (5, 64), (8, 31)):
        sizes = {"batch": batch, "seq": tokens}
        given, written = work.graph_call(workpiece.opened, sizes)
        given = [torch.randn_like(one) if isinstance(one, torch.Tensor) else one for one in given]
        expected = workpiece.opened.region.original.forward(*given)
        written.restore()
        for found, value in zip(module.forward(*given), expected, strict=True):
            torch.testing.assert_close(found, value, rtol=0, atol=0, equal_nan=True)


def test_a_mask_of_sizes_alone_stays_boolean():
    """At sizes at which it allows all or is causal, a flag stands for it."""
    _, workpiece = workpiece_of("of sizes")
    module = build(workpiece, [], ("share-masks",))
    assert torch.ops.aten.where.self not in [node.target for node in module.graph.nodes]


def test_another_kernel_at_an_end_of_the_range_keeps_the_pass_out():
    """No kernel takes an empty sequence: the formula stands for it, and may read another mask."""
    _, workpiece = workpiece_of()
    opened = workpiece.opened
    graph = opened.region.graph.graph
    ends = [opened.symbols({"batch": 2, "seq": seq}) for seq in (0, 64)]
    assert size_bound(graph, ends) == {"share-masks"}
    assert size_bound(graph, ends[1:]) == frozenset()
    workpiece.by_one_size = frozenset({"share-masks"})
    with pytest.raises(LooksAtSizes, match="share-masks"):
        build(workpiece, [], ("share-masks",))
