"""Linears on few rows: what is taken in with them, what is not, and that a call written there computes the same."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from fusion_advisor.capture.graph.op_records import describe
from fusion_advisor.fuse.passes.linear_sites import MOST_ROWS, find_gemv_sites
from fusion_advisor.fuse.passes.merge_gemms import merge_linears
from fusion_advisor.fuse.rewrite.graph_rewriter import SiteRewrite, rewrite_region
from fusion_advisor.workload.weight_packing import lay_out_siblings
from tests.tiny import profile_live, qwen2, region_of

X, W, NORM, BIAS, R = torch.randn(1, 4, 16), torch.randn(24, 16), torch.randn(16), torch.randn(24), torch.randn(1, 4, 24)


def rmsnorm(x, weight, eps=1e-6):
    wide = x.to(torch.float32)
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def sites_of(function, *inputs):
    region, _, _ = region_of(function, *inputs)
    return region, find_gemv_sites(region.graph.graph)


def reference(site):
    """What a kernel has to compute, in plain ops."""

    def call(*operands):
        rest = list(operands)
        x = rest.pop(0)
        if site.norm is not None:
            x = rmsnorm(x, rest.pop(0), site.norm.eps)
        weight = rest.pop(0)
        bias = rest.pop(0) if len(site.linear.args) > 2 else None
        out = F.linear(x, weight, bias)
        if site.is_gated:
            gate, up = out.chunk(2, -1)
            out = F.silu(gate) * up
        return out + rest.pop(0) if site.residual is not None else out

    call.__name__ = "reference"
    return call


def rewritten(region):
    """The region with every site computed by one call, and the calls."""
    _, index_of = describe(region)
    sites = [
        SiteRewrite(
            fusion_id="G1",
            members=tuple(index_of[node] for node in site.members),
            inputs=tuple(index_of[node] for node in site.operands),
            outputs=(index_of[site.result],),
            call=reference(site),
        )
        for site in find_gemv_sites(region.graph.graph)
    ]
    module, _ = rewrite_region(region, index_of, sites, ())
    return module, [node for node in module.graph.nodes if node.name.startswith("reference")]


def gated(x, w):
    out = F.linear(x, w)
    return F.silu(torch.ops.aten.slice(out, -1, 0, 12)) * torch.ops.aten.slice(out, -1, 12, 24)


def gated_pieces(x, w, count):
    gate, up, *_ = F.linear(x, w).chunk(count, -1)
    return up * F.silu(gate)


CASES = {
    "linear": (F.linear, (X, W), (False, False, False)),
    "bias": (F.linear, (X, W, BIAS), (False, False, False)),
    "norm": (lambda x, n, w: F.linear(rmsnorm(x, n), w), (X, NORM, W), (True, False, False)),
    "torch's norm": (lambda x, n, w: F.linear(F.rms_norm(x, (16,), n, 1e-6), w), (X, NORM, W), (True, False, False)),
    "residual": (lambda x, w, r: r + F.linear(x, w), (X, W, R), (False, False, True)),
    "gate": (gated, (X, W), (False, True, False)),
    "gate of a chunk": (lambda x, w: gated_pieces(x, w, 2), (X, W), (False, True, False)),
    "three pieces": (lambda x, w: gated_pieces(x, w, 3), (X, W), (False, False, False)),
    "residual after a dropout": (lambda x, w, r: r + F.dropout(F.linear(x, w), 0.5, False), (X, W, R), (False, False, True)),
    "residual after a live dropout": (lambda x, w, r: r + F.dropout(F.linear(x, w), 0.0, True), (X, W, R), (False, False, False)),
    "a norm whose rows are all kept": (lambda x, n, w: F.linear(rmsnorm(x, n)[:, 0:], w), (X, NORM, W), (True, False, False)),
    "a norm of more rows": (
        lambda x, n, w: F.linear(rmsnorm(x, n)[:, -4:], w),
        (torch.randn(1, 6, 16), NORM, W),
        (False, False, False),
    ),
    "all": (
        lambda x, n, w, b, r: F.linear(rmsnorm(x, n), w, b) + r,
        (X, NORM, W, BIAS, R),
        (True, False, True),
    ),
    "a norm that others read": (lambda x, n, w: (F.linear(y := rmsnorm(x, n), w), y * 2), (X, NORM, W), (False, False, False)),
    "a sum with alpha": (lambda x, w, r: torch.add(F.linear(x, w), r, alpha=2), (X, W, R), (False, False, False)),
    "a row that is added": (lambda x, w, r: F.linear(x, w) + r[:, :1], (X, W, R), (False, False, False)),
    "a result that others read": (lambda x, w, r: ((y := F.linear(x, w)) + r, y * 2), (X, W, R), (False, False, False)),
    "not a norm: mean of cubes": (
        lambda x, n, w: F.linear(n * (x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True).abs() + 1e-6)), w),
        (X, NORM, W),
        (False, False, False),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_site_takes_in_what_one_kernel_can(name):
    function, inputs, expected = CASES[name]
    region, (site,) = sites_of(function, *inputs)
    assert (site.norm is not None, site.is_gated, site.residual is not None) == expected
    assert (site.rows, site.inner, site.columns) == (4, 16, 12 if site.is_gated else 24)
    module, calls = rewritten(region)
    module.graph.lint()
    torch.testing.assert_close(module(*inputs), region.graph(*inputs))
    assert len(calls) == 1
    assert not any(node.target is torch.ops.aten.linear.default for node in module.graph.nodes)


def test_the_sum_of_two_linears_is_computed_by_one():
    region, sites = sites_of(lambda x, w, v: F.linear(x, w) + F.linear(x, v), X, W, W.flip(0).contiguous())
    assert [site.residual is not None for site in sites] == [True, False]
    module, calls = rewritten(region)
    assert len(calls) == 2
    torch.testing.assert_close(module(*region.example_args), region.graph(*region.example_args))


def test_on_many_rows_a_linear_and_its_gate_are_a_site_and_nothing_else():
    x, n, r = torch.randn(1, MOST_ROWS + 1, 16), NORM, torch.randn(1, MOST_ROWS + 1, 12)
    region, (site,) = sites_of(lambda x, n, w, r: gated(rmsnorm(x, n), w) + r, x, n, W, r)
    assert (site.is_gated, site.norm, site.residual, site.rows, site.columns) == (True, None, None, MOST_ROWS + 1, 12)
    module, calls = rewritten(region)
    assert len(calls) == 1 and torch.ops.aten.rsqrt.default in {node.target for node in module.graph.nodes}
    torch.testing.assert_close(module(x, n, W, r), region.graph(x, n, W, r))
    assert sites_of(lambda x, w: gated_pieces(x, w, 3), x, W)[1] == []


def test_many_rows_are_left_to_cublas():
    assert sites_of(F.linear, torch.randn(MOST_ROWS + 1, 16), W)[1] == []
    assert len(sites_of(F.linear, torch.randn(MOST_ROWS, 16), W)[1]) == 1


def test_a_residual_that_is_written_to_in_between_stays_outside():
    def function(x, w, r):
        y = F.linear(x, w)
        r.mul_(2)
        return y + r

    _, (site,) = sites_of(function, X, W, R.clone())
    assert site.residual is None


def test_a_norm_whose_input_is_written_to_stays_outside():
    def function(x, n, w):
        y = rmsnorm(x, n)
        x.mul_(2)
        return F.linear(y, w)

    _, (site,) = sites_of(function, X.clone(), NORM, W)
    assert site.norm is None


def test_what_is_written_before_the_result_is_read_keeps_the_linear():
    """The call would stand where its result is first read, and read what the linear did not."""

    def function(x, w):
        y = F.linear(x, w)
        x.mul_(2)
        return y + 1

    def other(x, w, r):
        y = F.linear(x, w)
        r.mul_(2)
        return y + 1

    assert sites_of(function, X.clone(), W)[1] == []
    assert len(sites_of(other, X, W, R.clone())[1]) == 1


def test_a_merged_decoder_is_gemvs_with_norms_gates_and_residuals():
    model, inputs = qwen2()
    lay_out_siblings(model)
    inputs["input_ids"] = inputs["input_ids"][:, :1]
    _, live = profile_live(model, (), inputs)
    merged = merge_linears(live.regions[0])
    sites = find_gemv_sites(merged.region.graph.graph)
    # per layer: qkv (norm), o (residual), gate and up (norm, gate), down (residual); then the head
    kinds = [(site.norm is not None, site.is_gated, site.residual is not None) for site in sites]
    layer = [(True, False, False), (False, False, True), (True, True, False), (False, False, True)]
    assert kinds == [*layer * 2, (True, False, False)]
    module, calls = rewritten(merged.region)
    assert len(calls) == 9
    torch.testing.assert_close(module(*merged.region.example_args), merged.region.graph(*merged.region.example_args))
    left = {str(node.target) for node in module.graph.nodes if node.op == "call_function"}
    assert not left & {"aten.linear.default", "aten.rsqrt.default", "aten.silu.default"}


def test_members_are_all_that_only_the_result_needs():
    model, kwargs = qwen2()
    lay_out_siblings(model)
    _, live = profile_live(model, kwargs=kwargs)
    graph = merge_linears(live.regions[0]).region.graph.graph
    sites = find_gemv_sites(graph)
    assert {len(site.members) for site in sites} >= {2, 8, 12}
    for site in sites:
        expected = {site.result}
        for node in reversed(graph.nodes):
            is_inside = node.op == "call_function" and node not in site.operands and node.users
            if is_inside and expected.issuperset(node.users):
                expected.add(node)
        assert list(site.members) == [node for node in graph.nodes if node in expected]
