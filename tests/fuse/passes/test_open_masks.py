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
    """Two attention calls that read one mask: of the keys whose first number is positive, or of the length alone."""

    def __init__(self, *, reads_keys=True):
        super().__init__()
        self.reads_keys = reads_keys

    def mask(self, x):
        batch, tokens, _ = x.shape
        allowed = x[..., 0] > 0 if self.reads_keys else torch.arange(tokens) % 3 < 2
        return allowed.reshape(-1, 1, 1, tokens).expand(batch, 1, tokens, tokens)

    def forward(self, hidden_states):
        x = functional.silu(hidden_states) * 1.5
        batch, tokens, _ = x.shape
        mask, q = self.mask(hidden_states), x.view(batch, tokens, 8, 4).transpose(1, 2)
        for _ in range(2):
            q = functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)
        return q.transpose(1, 2).reshape(x.shape)


def workpiece_of(maker):
    work = work_on(maker=maker, row_ns=0, op_ns=1000)
    return work, Workpiece(work.ranged.finder(work.capture).next())


def test_a_mask_is_converted_once_at_any_size():
    work, workpiece = workpiece_of(Padded)
    assert workpiece.by_one_size == frozenset()
    module = build(workpiece, [], ("share-masks",))
    targets = [node.target for node in module.graph.nodes]
    assert targets.count(torch.ops.aten.where.self) == 1
    (mask,) = {node.args[3] for node in module.graph.nodes if node.target is ATTENTION}
    assert mask.meta["val"].dtype == torch.float32
    torch.manual_seed(0)
    for batch, tokens in ((2, 2), (3, 17), (5, 64), (8, 31)):
        sizes = {"batch": batch, "seq": tokens}
        given, written = work.graph_call(workpiece.opened, sizes)
        given = [torch.randn_like(one) if isinstance(one, torch.Tensor) else one for one in given]
        expected = workpiece.opened.region.original.forward(*given)
        written.restore()
        assert all(torch.equal(*pair) for pair in zip(module.forward(*given), expected, strict=True)), sizes


def test_a_mask_of_sizes_alone_stays_boolean():
    """At sizes at which it allows all or is causal, a flag stands for it."""
    _, workpiece = workpiece_of(lambda: Padded(reads_keys=False))
    module = build(workpiece, [], ("share-masks",))
    assert torch.ops.aten.where.self not in [node.target for node in module.graph.nodes]


def test_another_kernel_at_an_end_of_the_range_keeps_the_pass_out():
    """No kernel takes an empty sequence: the formula stands for it, and may read another mask."""
    _, workpiece = workpiece_of(Padded)
    opened = workpiece.opened
    graph = opened.region.graph.graph
    ends = [opened.symbols({"batch": 2, "seq": seq}) for seq in (0, 64)]
    assert size_bound(graph, ends) == {"share-masks"}
    assert size_bound(graph, ends[1:]) == frozenset()
    workpiece.by_one_size = frozenset({"share-masks"})
    with pytest.raises(LooksAtSizes, match="share-masks"):
        build(workpiece, [], ("share-masks",))
