"""PoolFormer: its pools stand in chains, and its norms write channels last where their copies ask for it."""

from __future__ import annotations

import math
import shutil

import pytest
import torch
from torch import nn

import fusion_advisor as fa
from fusion_advisor.capture.graph.channels_last import lay_channels_last
from fusion_advisor.capture.graph.op_records import describe
from fusion_advisor.capture.graph.tracer import capture_regions
from fusion_advisor.chains.find import find_groups
from fusion_advisor.fuse.plan.options import Budgets
from fusion_advisor.fuse.plan.plan import judge_with
from fusion_advisor.lowering.lower import lower
from tests.capture.graph.test_channels_last import as_on_cuda
from tests.kernel_cases.evaluate import evaluate
from tests.tiny import BANDWIDTH
from tools.zoo.workloads import Size, make

POOL = ("avg_pool2d", "sub", "mul", "add")


def pool_former():
    """The zoo's, at a width for a CPU."""
    model, inputs = make("poolformer", Size(is_tiny=True, layers=0, dtype=torch.float32))
    return model, inputs


def captured():
    model, inputs = pool_former()
    with torch.no_grad():
        model(**inputs)
        (region,) = capture_regions(model, (), inputs).regions
    return region


def chains(ops):
    groups = find_groups(ops, lambda members, outputs: judge_with(ops, members, outputs))
    return [(tuple(ops[index].target.split(".")[1] for index in group.members), group) for group in groups]


def test_pools_take_in_what_follows_them():
    ops = describe(captured())[0]
    assert [names for names, _ in chains(ops)].count(POOL) == 4


def laid_out():
    region = captured()
    assert lay_channels_last(region.graph, lambda _: True, as_on_cuda) == 10  # the image, and after each of nine norms
    return describe(region)[0]


def test_a_norm_and_the_copy_that_lays_it_out_are_one_chain():
    ops = laid_out()
    found = chains(ops)
    normed = [group for names, group in found if names[-2:] == ("group_norm", "contiguous")]
    assert len(normed) == 9 and all(group.verdict.is_fusible for group in normed)
    assert [names for names, _ in found].count(POOL) == 4
    for names, group in found:
        if names[-2:] == ("group_norm", "contiguous") or names == POOL:
            assert all(ops[index].outputs[0].stride[1] == 1 for index in group.outputs), names
    assert ("mul", "add", "group_norm", "contiguous") in [names for names, _ in found]


def test_such_a_chain_computes_the_norm():
    ops = laid_out()
    group = next(group for names, group in chains(ops) if names == ("group_norm", "contiguous"))
    lowered = lower(ops, group.members, group.outputs)
    metas = {root: ops[root].outputs[0] for root in lowered.inputs}
    tensors = {root: torch.randn(math.prod(meta.shape), dtype=torch.float64) for root, meta in metas.items()}
    image, weight, bias = (
        tensors[ref.index].as_strided(metas[ref.index].shape, metas[ref.index].stride)
        for ref in (ops[group.members[0]].args[place] for place in (0, 2, 3))
    )
    meta = ops[group.outputs[0]].outputs[0]
    assert image.stride() == meta.stride != torch.empty(image.shape).stride()
    (got,) = evaluate(lowered.program, *tensors.values())
    expected = nn.functional.group_norm(image, 1, weight, bias)
    torch.testing.assert_close(got.as_strided(meta.shape, meta.stride), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler")
def test_apply_keeps_the_pools_with_right_numbers_and_reverts():
    model, inputs = pool_former()
    with torch.no_grad():
        expected = model(**inputs).logits
        fused = fa.apply(
            model, inputs, keep="verified", min_share=0.0, warmup=1, runs=3, compile=False, bandwidth=BANDWIDTH,
            budgets=Budgets(wall_s=0.02),
        )  # fmt: skip
        got = fused(**inputs).logits
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert got.stride() == expected.stride()
    names = {chain.id: chain.ops for chain in fused.report.chains}
    kept = [names[one.chain_id] for one in fused.report.fusions if one.status.value == "kept" and one.chain_id]
    assert kept.count(POOL) == 4
    fused.revert()
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, expected)
