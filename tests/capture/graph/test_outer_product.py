"""Products over a dimension of one element: multiplications of the same bits, in the same layout, that chains take in."""

from __future__ import annotations

import pytest
import torch

from fusion_advisor.capture.graph.op_records import describe
from fusion_advisor.capture.graph.outer_product import multiply_outer_products
from fusion_advisor.capture.graph.retrace import trace
from fusion_advisor.capture.graph.tracer import capture_regions
from fusion_advisor.chains.find import find_groups
from fusion_advisor.fuse.plan.plan import judge_with

OUTER = {
    "one batch": (torch.randn(1, 8, 1), torch.randn(1, 1, 6)),
    "a batch that one side repeats": (torch.randn(1, 8, 1).expand(3, -1, 1), torch.randn(3, 1, 6)),
    "a matrix": (torch.randn(8, 1), torch.randn(1, 6)),
    "batches that broadcast": (torch.randn(8, 1), torch.randn(2, 3, 1, 6)),
    "16 bits": (torch.randn(2, 8, 1).bfloat16(), torch.randn(2, 1, 6).bfloat16()),
    "nothing": (torch.randn(2, 0, 1), torch.randn(2, 1, 6)),
    "not finite": (torch.tensor([[float("inf")], [float("nan")], [1e30]]), torch.tensor([[0.0, 1e30, 2.0]])),
}


@pytest.mark.parametrize("name", OUTER)
def test_a_product_over_one_element_is_a_multiplication_of_the_same_bits(name):
    left, right = OUTER[name]
    graph = trace(torch.matmul, (left, right))
    assert multiply_outer_products(graph) == 1
    assert not any("mm" in str(node.target) or "matmul" in str(node.target) for node in graph.graph.nodes)
    result, expected = graph(left, right), left @ right
    assert (result.dtype, result.stride()) == (expected.dtype, expected.stride())
    assert torch.equal(result.nan_to_num(), expected.nan_to_num()) and torch.equal(result.isnan(), expected.isnan())


OTHER = {
    "two elements": (torch.randn(8, 2), torch.randn(2, 6)),
    "a vector": (torch.randn(8, 1), torch.randn(1)),
}


@pytest.mark.parametrize("name", OTHER)
def test_any_other_product_stays(name):
    assert multiply_outer_products(trace(torch.matmul, OTHER[name])) == 0


def test_a_product_of_another_layout_than_the_multiplication_s_stays():
    left, right = torch.randn(1, 8, 3).permute(2, 1, 0), torch.randn(6, 1, 3).permute(2, 1, 0)
    assert (left * right).stride() != (left @ right).stride()
    graph = trace(torch.matmul, (left, right))
    assert multiply_outer_products(graph) == 0
    assert graph(left, right).stride() == (left @ right).stride()


def test_a_product_in_autocast_stays():
    def function(left, right):
        with torch.autocast("cpu", torch.bfloat16):
            return left @ right

    assert multiply_outer_products(trace(function, OUTER["a matrix"])) == 0


class Rotary(torch.nn.Module):
    """As transformers wrote it up to 5.23."""

    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", torch.rand(8))

    def forward(self, x, position_ids):
        expanded = self.inv_freq[None, :, None].float().expand(position_ids.shape[0], -1, 1)
        positions = position_ids[:, None, :].float()
        with torch.autocast(device_type="cpu", enabled=False):
            freqs = (expanded.float() @ positions.float()).transpose(1, 2)
            emb = torch.cat((freqs, freqs), dim=-1)
            cos, sin = emb.cos() * 1.5, emb.sin() * 1.5
        return cos.to(x.dtype), sin.to(x.dtype)


@pytest.mark.parametrize("batch", [1, 3])
def test_the_rotary_table_is_one_chain_with_cos_and_sin(batch):
    model = Rotary()
    live = capture_regions(model, (torch.randn(2).bfloat16(), torch.arange(6).expand(batch, -1)), {})
    ops, _ = describe(live.regions[0])
    groups = [g for g in find_groups(ops, lambda m, o: judge_with(ops, m, o)) if g.verdict.is_fusible]
    assert len(groups) == 1
    assert {"mul", "cat", "cos", "sin"} <= {ops[index].target.split(".")[1] for index in groups[0].members}
    assert len(groups[0].outputs) == 2
