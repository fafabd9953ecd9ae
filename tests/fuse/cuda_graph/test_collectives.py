"""A recorded step with collectives: recorded where ranks do so together; those that launched in vain meet first."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fusion_advisor.capture.graph.tracer import capture_regions
from fusion_advisor.fuse.cuda_graph.capturable import has_collectives, host_work
from fusion_advisor.fuse.cuda_graph.replay import Graphs
from fusion_advisor.fuse.decide.session import Bench
from fusion_advisor.fuse.live.fused_model import FusedModel
from tests.fuse.cuda_graph.fake_graph import FakeRecorder


class Summed(nn.Module):
    """A product whose parts are summed over the ranks, and a residual."""

    def __init__(self, group):
        super().__init__()
        self.group = group
        self.lin = nn.Linear(32, 32, bias=False)
        self.scale = 1.0

    def forward(self, x):
        partial = self.lin(x) * self.scale
        return torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(partial, "sum", self.group)) + x


@pytest.fixture
def model():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with torch.no_grad():
        yield Summed(dist.group.WORLD.group_name).eval()
    dist.destroy_process_group()


def graphed(model, x, recorder, **options):
    live = capture_regions(model, (x,), {})
    graphs = Graphs(recorder, **options)
    modules = Bench(live, on_cuda=False).build((), ()).modules
    return FusedModel(model, live.regions, modules, (x,), {}, graphs=graphs).apply()


def test_ranks_that_record_together_launch_ahead_and_meet_where_it_was_in_vain(model):
    recorder, met = FakeRecorder(), []
    fused = graphed(model, torch.randn(4, 32), recorder, meet=lambda: met.append(recorder.replayed))
    for _ in range(4):
        x = torch.randn(4, 32)
        assert torch.equal(fused(x), model.lin(x) * 1.0 + x)
    assert (recorder.recorded, recorder.replayed, met) == (1, 3, []) and not fused.graphs.refusals
    assert fused.graphs.ahead == 2
    (recording,) = fused.graphs.recordings
    assert recording.may_be_undone(())
    model.scale = 2.0  # a guard fails after the launch
    x = torch.randn(4, 32)
    with pytest.warns(UserWarning, match="original ops"):
        assert torch.equal(fused(x), model.lin(x) * 2.0 + x)
    assert (recorder.replayed, fused.graphs.ahead, met) == (4, 3, [4])


def test_a_rank_that_launched_in_vain_alone_ends(model):
    def nobody_came():
        raise RuntimeError("rank 1 goes on")

    fused = graphed(model, torch.randn(4, 32), FakeRecorder(), meet=nobody_came)
    for _ in range(3):
        fused(torch.randn(4, 32))
    model.scale = 2.0
    with pytest.raises(RuntimeError, match="rank 1 goes on"):
        fused(torch.randn(4, 32))


def test_an_error_in_the_guards_waits_for_no_other_rank(model):
    met = []
    fused = graphed(model, torch.randn(4, 32), FakeRecorder(), meet=lambda: met.append(1))
    for _ in range(3):
        fused(torch.randn(4, 32))
    leaves, key = (torch.randn(4, 32),), next(iter(fused.graphs._latest))

    def broken():
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        fused.graphs.run(key, leaves, broken)
    assert not met


def test_one_process_alone_records_none(model):
    recorder = FakeRecorder()
    fused = graphed(model, torch.randn(4, 32), recorder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            fused(torch.randn(4, 32))
    assert recorder.recorded == 0
    assert [reason.startswith("processes meet in ") for reason in fused.graphs.refusals] == [True]


def test_a_collective_of_another_kind_is_left_to_the_host(model):
    graph = torch.fx.Graph()
    graph.output(graph.call_function(torch.ops.c10d.barrier.default, (graph.placeholder("x"),)))
    module = torch.fx.GraphModule(nn.Module(), graph)
    assert has_collectives(module) and host_work(module, holds_collectives=True).startswith("processes meet in ")
