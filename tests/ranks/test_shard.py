"""A model's own plan: which linears are split, into which parts, and which models are refused untouched."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fusion_advisor.errors import UnsupportedPlan
from fusion_advisor.ranks.shard import GatheredLinear, RowSplitLinear, plan_of, shard
from tests.tiny import llama, qwen2


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


@pytest.mark.parametrize("make", [llama, qwen2])
def test_the_parts_of_all_ranks_are_the_whole_model(make):
    model, _ = make()
    parts = [copy.deepcopy(model) for _ in range(2)]
    counts = [shard(part, plan_of(part, "m", 2), rank, 2, "0", model_id="m") for rank, part in enumerate(parts)]
    assert counts == [15, 15]  # seven linears in each of two layers, and the head
    one, other = (part.model.layers[1] for part in parts)
    whole = model.model.layers[1]
    assert torch.equal(torch.cat([one.self_attn.k_proj.weight, other.self_attn.k_proj.weight]), whole.self_attn.k_proj.weight)
    assert torch.equal(torch.cat([one.mlp.down_proj.weight, other.mlp.down_proj.weight], 1), whole.mlp.down_proj.weight)
    assert isinstance(one.mlp.down_proj, RowSplitLinear) and isinstance(parts[0].lm_head, GatheredLinear)
    assert list(parts[0].state_dict()) == list(model.state_dict())
    if whole.self_attn.q_proj.bias is not None:
        assert torch.equal(torch.cat([one.self_attn.q_proj.bias, other.self_attn.q_proj.bias]), whole.self_attn.q_proj.bias)


def test_one_rank_of_one_computes_the_whole(group):
    model, kwargs = qwen2()
    part = copy.deepcopy(model)
    assert shard(part, plan_of(part, "m", 1), 0, 1, group, model_id="m") == 15
    with torch.no_grad():
        assert torch.equal(part(**kwargs).logits, model(**kwargs).logits)


def test_a_bias_is_added_once(group):
    linear = nn.Sequential(nn.Linear(8, 4))
    expected = copy.deepcopy(linear)
    shard(linear, {"*": "rowwise"}, 0, 1, group, model_id="m")
    x = torch.randn(3, 8)
    assert torch.allclose(linear(x), expected(x), atol=1e-6) and type(linear[0]) is RowSplitLinear


def test_a_tied_head_stays_whole():
    model, _ = llama()
    model.lm_head.weight = model.model.embed_tokens.weight
    shard(model, plan_of(model, "m", 2), 1, 2, "0", model_id="m")
    assert type(model.lm_head) is nn.Linear and model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("plan", "ranks", "reason"),
    [
        ({"model.layers.*.mlp.up_proj": "grouped_gemm"}, 2, "has the style `grouped_gemm`"),
        ({"model.layers.*.mlp.up_proj": "colwise"}, 3, "`model.layers.0.mlp.up_proj` has 128 features to split"),
        ({"model.layers.*.mlp.up_proj": "colwise"}, 4, "num_key_value_heads is 2"),
    ],
)
def test_what_cannot_be_split_is_refused_and_left_alone(plan, ranks, reason):
    model, _ = llama()
    before = {name: id(module) for name, module in model.named_modules()}
    with pytest.raises(UnsupportedPlan, match=reason):
        shard(model, plan, 0, ranks, "0", model_id="m")
    assert {name: id(module) for name, module in model.named_modules()} == before


def test_a_model_without_a_plan_is_refused():
    with pytest.raises(UnsupportedPlan, match="Linear has no plan"):
        plan_of(nn.Linear(2, 2), "m", 2)
