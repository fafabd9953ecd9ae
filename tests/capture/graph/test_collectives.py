"""Ops between processes in a captured step: a class of their own, and the border of chains."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fusion_advisor.capture.graph.op_records import describe
from fusion_advisor.capture.graph.tracer import capture_regions
from fusion_advisor.capture.trace.attribute import category_of
from fusion_advisor.chains.find import find_groups
from fusion_advisor.fuse.cuda_graph.capturable import host_work
from fusion_advisor.fuse.decide.session import Bench
from fusion_advisor.fuse.plan.plan import judge_with
from fusion_advisor.records import OpClass


class Block(nn.Module):
    """Pointwise ops, a sum over the processes, the addition of a residual and a norm."""

    def __init__(self, group):
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(torch.ones(32))

    def forward(self, x):
        partial = torch.relu(x * 2 + 1)
        total = torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(partial, "sum", self.group)) + x
        return self.weight * total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6)


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


def test_chains_end_and_begin_at_a_collective(group):
    live = capture_regions(Block(group), (torch.randn(4, 32),), {})
    ops, _ = describe(live.regions[0])
    between = [op for op in ops if op.op_class is OpClass.COLLECTIVE]
    assert [op.target for op in between] == ["_c10d_functional.all_reduce.default", "_c10d_functional.wait_tensor.default"]
    reduced, waited = (op.index for op in between)
    groups = find_groups(ops, lambda members, outputs: judge_with(ops, members, outputs))
    chains = [set(found.members) for found in groups if found.verdict.is_fusible]
    assert len(chains) == 2 and not any({reduced, waited} & members for members in chains)
    before, after = sorted(chains, key=min)
    assert max(before) < reduced and min(after) > waited and len(after) >= 6


def test_a_step_with_one_is_held_by_no_cuda_graph(group):
    x = torch.randn(4, 32)
    live = capture_regions(Block(group), (x,), {})
    assert host_work(live.regions[0].graph).startswith("processes meet in ")
    alone = capture_regions(nn.Sequential(nn.ReLU()), (x,), {})
    benches = [Bench(one, on_cuda=False) for one in (live, alone)]
    assert [bench.is_alone for bench in benches] == [False, True]


def test_kernels_of_a_collective_are_known_by_their_op_or_their_name():
    assert category_of("ncclDevKernel_AllReduce_Sum_bf16", "") == category_of("k", "nccl:all_reduce") == "collective"
    assert category_of("k", "c10d::allreduce_") == "collective" and category_of("k", "") == "other"
