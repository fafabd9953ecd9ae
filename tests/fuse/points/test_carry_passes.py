"""Graph passes that pay at the largest sizes alone: they are added there to what was decided at other sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from fusion_advisor.capture.sizes.one_size import at_one_size
from fusion_advisor.codegen.cpp.backend import find_compiler
from fusion_advisor.fuse.passes import registry
from fusion_advisor.fuse.passes.attention import GROUP_HEADS
from fusion_advisor.fuse.points.carry import carried, with_more_passes
from fusion_advisor.fuse.points.in_full import decided
from fusion_advisor.fuse.shapes.sized_fusion import LooksAtSizes, Workpiece
from tests.fuse.points.test_choose_layouts import work_on

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="kernels of a CPU need a C++ compiler: apt-get install g++")


class SharedHeads(torch.nn.Module):
    """Attention whose two KV heads are copied for eight query heads, behind a gate that one kernel computes."""

    def forward(self, hidden_states):
        x = functional.silu(hidden_states) * 1.5
        batch, tokens, _ = x.shape
        q = x.view(batch, tokens, 8, 4).transpose(1, 2)
        kv = q[:, :2]
        copied = kv[:, :, None].expand(batch, 2, 4, tokens, 4).reshape(batch, 8, tokens, 4)
        return functional.scaled_dot_product_attention(q, copied, copied).transpose(1, 2).reshape(x.shape)


@pytest.fixture(params=[False, True], ids=["launch by launch", "in graphs"])
def point(request):
    """The work on a piece, the piece, a point at which the heads are copied, its graph and what that is called with."""
    work = work_on(maker=SharedHeads, row_ns=0, op_ns=1000, in_graph=request.param, skip=("group-*",), keep="verified")
    with torch.no_grad():
        piece = work.ranged.finder(work.capture).next()
        workpiece, sizes = Workpiece(piece), {"batch": 8, "seq": 64}
        one = decided(work, workpiece, sizes, (), {})
        assert one.fusions and not one.row.reason and "group-heads" not in one.row.passes
        work.options = replace(work.options, skip=(), keep="paying")
        given, written = work.graph_call(workpiece.opened, sizes)
        yield work, workpiece, one, at_one_size(workpiece.opened, given, written), given


def heads_are_shared(one):
    attention = torch.ops.aten.scaled_dot_product_attention.default
    return [node.kwargs.get("enable_gqa", False) for node in one.served.module.graph.nodes if node.target is attention] == [True]


def test_a_pass_that_pays_is_added(point):
    work, _, one, _, _ = point
    more = with_more_passes(*point)
    assert "group-heads" in more.row.passes and "group-heads" in more.row.rewrites
    assert heads_are_shared(more) and not heads_are_shared(one) and more.fusions == one.fusions
    assert work.progress.notes[-1] == "grouped KV heads at batch=8, seq=64 as well"


def test_a_pass_that_does_not_pay_or_is_not_wanted_is_not_added(point):
    work, *_ = point
    work.instruments.timer.op_ns = -1000  # a step of fewer ops takes longer
    assert "group-heads" not in with_more_passes(*point).row.passes
    work.instruments.timer.op_ns, work.options = 1000, replace(work.options, skip=("group-*",))
    assert "group-heads" not in with_more_passes(*point).row.passes


def test_only_a_run_that_times_rewrites_adds_some(point):
    work, workpiece, one, *_ = point
    work.options = replace(work.options, keep="verified")
    found = carried(work, workpiece, one, {"batch": 3, "seq": 17}, tries_passes=True)
    assert found.row.reason == "" and found.row.passes == one.row.passes


def test_a_pass_that_looks_at_a_size_is_told_of(point, monkeypatch):
    def curious(graph, region, constants):
        sizes = [size for node in graph.nodes for size in getattr(node.meta.get("val"), "shape", ())]
        return 2 if any(size == 5 for size in sizes) else 1

    monkeypatch.setitem(registry.PASSES, "group-heads", replace(GROUP_HEADS, apply=curious))
    with pytest.raises(LooksAtSizes, match="group-heads"):
        with_more_passes(*point)


def test_a_pass_may_ask_again_what_the_trace_asked(point, monkeypatch):
    """An image that is laid out again is asked whether its batch is 1, as in the trace: no further size is looked at."""
    guards = point[1].opened.environment.guards
    assert guards

    def repeating(graph, region, constants):
        guards.append(guards[-1])
        return 1

    monkeypatch.setitem(registry.PASSES, "group-heads", replace(GROUP_HEADS, apply=repeating))
    with_more_passes(*point)
    assert len(guards) > len({str(one.expr) for one in guards})
