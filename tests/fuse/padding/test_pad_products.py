"""Padded products: rows that begin at 16 bytes, results of the same size, strides and numbers, and what is left alone."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from fusion_advisor.capture.graph.tracer import Region
from fusion_advisor.fuse.dynamo_backend import optimise
from fusion_advisor.fuse.padding.pad_products import pad_products
from fusion_advisor.fuse.padding.pad_trial import PAD_PRODUCTS, try_padded_products
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.fuse.train.journal import Journal
from fusion_advisor.fuse.train.passes.both_passes import BothPasses
from fusion_advisor.records import Status
from fusion_advisor.timing.interleaving import Difference
from tests.tiny import BANDWIDTH

aten = torch.ops.aten
SIZES = (16, 13)
"""Even and odd."""
PRODUCTS = (aten.mm.default, aten.addmm.default)


def traced(function, *args):
    return make_fx(function, tracing_mode="fake")(*args)


def matrix(rows, columns, *, is_turned, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed + rows * 100 + columns)
    shape = (columns, rows) if is_turned else (rows, columns)
    found = torch.randn(shape, generator=generator).to(dtype)
    return found.t() if is_turned else found


def is_aligned(value):
    """Whether all rows of a matrix begin at a multiple of 16 bytes, along whichever dim they lie."""
    return value.stride(0 if value.stride(1) == 1 else 1) % 8 == 0


def assert_as_near(ours, theirs, truth):
    scale = truth.norm()
    limit = max(1.5 * float((theirs.double() - truth).norm() / scale), torch.finfo(theirs.dtype).eps)
    assert float((ours.double() - truth).norm() / scale) <= limit


@pytest.mark.parametrize("turned", list(itertools.product((False, True), repeat=2)), ids=str)
@pytest.mark.parametrize("sizes", list(itertools.product(SIZES, repeat=3)), ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_every_odd_size_is_padded_and_cut(sizes, turned, has_bias):
    rows, inner, columns = sizes
    left, right = matrix(rows, inner, is_turned=turned[0]), matrix(inner, columns, is_turned=turned[1])
    bias = matrix(1, columns, is_turned=False)[0]

    def product(left, right, bias):
        return torch.addmm(bias, left, right) if has_bias else torch.mm(left, right)

    module = traced(product, left, right, bias)
    needs = not (is_aligned(left) and is_aligned(right)) or columns % 8 != 0
    padding = pad_products(module, least_products=0)
    assert padding.products == needs
    ours, theirs = module(left, right, bias), product(left, right, bias)
    assert ours.shape == theirs.shape and ours.stride() == theirs.stride()
    assert_as_near(ours, theirs, product(left.double(), right.double(), bias.double()))
    for node in module.graph.nodes:
        if node.target in PRODUCTS:
            operands = [one.meta["val"] for one in node.all_input_nodes if one.meta["val"].dim() == 2]
            assert all(map(is_aligned, (*operands, node.meta["val"])))


def test_what_is_not_finite_stays_in_its_row():
    left, right = matrix(16, 13, is_turned=False), matrix(13, 16, is_turned=False)
    left[3, 4], right[5, 6] = torch.inf, torch.nan
    module = traced(torch.mm, left, right)
    assert pad_products(module, least_products=0).products == 1
    assert torch.equal(module(left, right).isfinite(), torch.mm(left, right).isfinite())


def test_a_scaled_bias_keeps_its_factors():
    left, right, bias = matrix(16, 16, is_turned=False), matrix(16, 13, is_turned=False), matrix(1, 13, is_turned=False)[0]
    module = traced(lambda left, right, bias: torch.addmm(bias, left, right, beta=0.5, alpha=2), left, right, bias)
    assert pad_products(module, least_products=0).products == 1
    torch.testing.assert_close(module(left, right, bias), torch.addmm(bias, left, right, beta=0.5, alpha=2))


@pytest.mark.parametrize(
    ("left", "right", "least"),
    [
        ((16, 16), (16, 24), 0),
        ((16, 16), (16, 13), 16 * 16 * 13 + 1),
        ((4, 16), (16, 13), 0),
    ],
    ids=["even", "small", "a few rows"],
)
def test_others_are_left_alone(left, right, least):
    operands = [matrix(*left, is_turned=False), matrix(*right, is_turned=False)]
    assert pad_products(traced(torch.mm, *operands), least_products=least).products == 0


def test_fp32_and_a_bias_of_every_row_are_left_alone():
    wide = [matrix(16, 13, is_turned=False, dtype=torch.float32), matrix(13, 16, is_turned=False, dtype=torch.float32)]
    assert pad_products(traced(torch.mm, *wide), least_products=0).products == 0
    narrow = [matrix(16, 16, is_turned=False), matrix(16, 16, is_turned=False), matrix(16, 13, is_turned=False)]
    assert pad_products(traced(torch.addmm, narrow[2][:, :1] + narrow[0], *narrow[:2]), least_products=0).products == 0


def test_what_two_products_read_is_padded_once_where_it_is_made():
    """As the gradient of logits is: one product reads it, the other its transpose, both of a view of rows."""

    def backward(gradient, weight, hidden):
        rows = gradient.to(torch.bfloat16).view(16, 13)
        return rows @ weight, rows.t() @ hidden

    args = torch.randn(2, 8, 13), matrix(13, 16, is_turned=False), matrix(16, 16, is_turned=False)
    module = traced(backward, *args)
    padding = pad_products(module, least_products=0)
    pads = [node for node in module.graph.nodes if node.target is aten.constant_pad_nd.default]
    assert padding.products == 2 and [tuple(node.meta["val"].shape) for node in pads] == [(16, 16), (2, 8, 16)]
    assert pads[1].args[0].target is aten._to_copy.default  # ahead of the view
    assert padding.copied_bytes == 2 * 16 * 16 * 2  # the weight's gradient is cut without a copy
    for ours, theirs in zip(module(*args), backward(*args), strict=True):
        assert ours.stride() == theirs.stride()
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=1e-3)


class Head(nn.Module):
    """A layer and a head of 13 words."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(16, 16), nn.Linear(16, 13, bias=False)

    def forward(self, x):
        return self.head(torch.tanh(self.layer(x))).float().log_softmax(-1)


@pytest.fixture
def passes():
    """Both passes of a head under autocast, with the tensors of a step."""
    torch.manual_seed(0)
    model, regions = Head(), []

    class Noting:
        instead = None
        is_changed = False

        def __init__(self, graph, name):
            self.graph = graph
            self.name = name

        def __call__(self, *args):
            roles = ("input",) * len(args)
            names = tuple(str(node.target) for node in self.graph.graph.find_nodes(op="placeholder"))
            regions.append(Region(index=0, graph=self.graph, original=self.graph, names=names, roles=roles, example_args=args,
                                  training_pass=self.name))  # fmt: skip
            return self.graph(*args)

        def take(self, args):
            return self(*args)

    compiled = torch.compile(model, backend=lambda gm, inputs: BothPasses(gm, inputs, Noting).call, dynamic=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        compiled(torch.randn(2, 8, 16)).square().mean().backward()
    yield regions
    torch.compiler.reset()


def verdict(region, *change, **options):
    chosen = ApplyOptions(**{"keep": "paying" if change else "verified"} | options)
    times = dict(zip(("median_ns", "low_ns", "high_ns"), change, strict=False))
    return try_padded_products(
        region, chosen, on_cuda=False, difference=lambda *_, **__: Difference(**times), least_products=0
    )  # fmt: skip


def test_both_passes_of_a_step_are_padded_and_give_eagers_gradients(passes):
    for region, products in zip(passes, (1, 2), strict=True):
        found = verdict(region)
        assert found.is_kept and found.row.id == PAD_PRODUCTS.id and found.row.sites == products
        assert "copies that no chain takes in write" in found.row.reason
        with torch.no_grad():
            for ours, theirs in zip(found.region.graph(*region.example_args), region.graph(*region.example_args), strict=True):
                if isinstance(ours, torch.Tensor):
                    assert ours.stride() == theirs.stride()
                    torch.testing.assert_close(ours, theirs, rtol=0.02, atol=1e-4)
        assert not any(node.target is aten.constant_pad_nd.default for node in region.graph.graph.nodes)


@pytest.mark.parametrize(
    ("change", "status"),
    [((-90, -100, -80), Status.KEPT), ((0, -10, 10), Status.WITHIN_NOISE), ((90, 80, 100), Status.SLOWER)],
    ids=str,
)
def test_it_stays_where_the_pass_is_measurably_faster(passes, change, status):
    found = verdict(passes[1], *change)
    assert found.row.status is status and found.row.step_delta_ns == change[0]
    assert found.is_kept == (status is Status.KEPT) and (found.region is passes[1]) != found.is_kept


def test_with_exact_or_without_a_site_nothing_is_tried(passes):
    assert verdict(passes[1], exact=True).row is None
    assert verdict(passes[1], skip=("pad-products",)).row is None
    assert try_padded_products(passes[1], ApplyOptions(), on_cuda=False).row is None  # too small to pay


def test_the_chains_that_make_and_read_operands_take_the_copies_in(passes):
    left, casts = {}, {}
    for region in passes:
        journal = Journal()
        options = ApplyOptions(keep="verified", compile=False, min_share=0.0, bandwidth=BANDWIDTH)
        with torch.no_grad():
            call = optimise(region, options, check=None, journal=journal)
        (entry,) = journal.entries
        assert entry.rewrites[0].id == PAD_PRODUCTS.id and call != region.original.forward
        left[region.training_pass] = [
            str(node.args[0]) for node in entry.variant.modules[0].graph.nodes if node.target is aten.constant_pad_nd.default
        ]
        casts[region.training_pass] = sum(node.target is aten._to_copy.default for node in entry.variant.modules[0].graph.nodes)
        for ours, theirs in zip(call(*region.example_args), region.graph(*region.example_args), strict=True):
            if isinstance(ours, torch.Tensor):
                torch.testing.assert_close(ours, theirs, rtol=0.02, atol=1e-4)
    assert casts == {"forward": 0, "backward": 0}
    # What a chain makes has its zeros, but for the result of a row reduction. The backward pass is given its weight as it is.
    assert left["forward"] == [] and len(left["backward"]) == 2
    assert {"log_softmax_backward" in name for name in left["backward"]} == {True, False}


def test_a_weight_is_written_once_for_the_padded_product_and_for_the_backward_pass(passes):
    module = verdict(passes[0]).region.graph
    pads = [node for node in module.graph.nodes if node.target is aten.constant_pad_nd.default]
    (cast,) = (node.args[0] for node in pads)
    assert list(cast.users) == pads
    (output,) = module.graph.find_nodes(op="output")
    kept = [node.meta["val"] for node in output.args[0] if node.meta["val"].shape == (13, 16)]
    assert [one.stride() for one in kept] == [(16, 1)]


def test_a_weight_that_two_products_read_is_padded_once():
    def tied(weight, one, other):
        narrow = weight.to(torch.bfloat16)
        return one @ narrow.t(), other @ narrow.t(), narrow

    args = torch.randn(13, 16), matrix(16, 16, is_turned=False), matrix(24, 16, is_turned=False)
    module = traced(tied, *args)
    assert pad_products(module, least_products=0).products == 2
    assert sum(node.target is aten.constant_pad_nd.default for node in module.graph.nodes) == 1
    for ours, theirs in zip(module(*args), tied(*args), strict=True):
        assert ours.stride() == theirs.stride()
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=1e-3)
