"""What is said of fusions once they are installed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.fx import Graph, GraphModule

from fusion_advisor.capture.trace.attribute import Step
from fusion_advisor.fuse.after_side import without_doubles
from fusion_advisor.fuse.decide import step_profile
from fusion_advisor.fuse.decide.session import Variant, replaced_sites
from fusion_advisor.fuse.receipts import UNREAD, with_receipt
from fusion_advisor.fuse.rewrite.graph_rewriter import fused_call
from fusion_advisor.records import COMPILED, EAGER, OURS, OURS_COMPILED, Baseline, Fusion, Launch, Receipt, Status

SITES = (("F1", "fa_wide"), ("F1", "fa_wide"), ("F1", "fa_one_row"), ("F4", "fa_one_row"))
"""A fusion of which one site has another layout and so another kernel, which serves another fusion too."""


def a_variant():
    graph = Graph()
    value = graph.placeholder("x")
    for fusion_id, name in SITES:
        value = graph.call_function(fused_call(name, lambda *_: None, [], []), (value,))
        value.meta["fusion_id"] = fusion_id
    graph.output(value)
    return Variant(modules=[GraphModule(torch.nn.Module(), graph)])


def a_fusion(fusion_id, sites):
    receipt = Receipt(sites_found=sites, sites_matched=sites, sites_replaced=0, launches_before=2 * sites, launches_after=0)
    return Fusion(id=fusion_id, chain_id=f"C{sites}", kernel="add_layernorm", status=Status.KEPT, reason="", receipt=receipt)


def a_step(*names):
    return Step(launches=tuple(Launch(kernel_name=name, op_index=None, duration_ns=1) for name in names), calls=len(names))


@pytest.mark.parametrize("often", [1, 3])
def test_a_fusions_launches_are_those_of_all_its_kernels(often):
    variant, step = a_variant(), a_step(*[f"{name}(float*)" for _, name in SITES] * often)
    first, other = (with_receipt(a_fusion(*which), variant, step, [often]).receipt for which in (("F1", 3), ("F4", 1)))
    assert (first.sites_replaced, first.launches_after, first.refusals) == (3, 3 * often, ())
    assert (other.sites_replaced, other.launches_after, other.refusals) == (1, often, ())
    assert replaced_sites(variant) == {"F1": 3, "F4": 1}


def test_a_kernel_that_was_launched_less_often_than_it_is_called_is_named():
    receipt = with_receipt(a_fusion("F1", 3), a_variant(), a_step("fa_wide", "fa_one_row", "fa_one_row"), [1]).receipt
    assert receipt.launches_after == 2
    assert receipt.refusals == ("fa_wide was launched 1 times where its sites call it 2 times",)


def test_a_kept_fusion_without_a_site_in_the_step_is_no_kept_one():
    fusion = a_fusion("F2", 1)
    left = with_receipt(fusion, a_variant(), a_step(), [1])
    assert (left.status, left.reason, left.receipt) == (Status.NOT_REPLACED, UNREAD, fusion.receipt)
    absorbed = replace(fusion, status=Status.ABSORBED)
    assert with_receipt(absorbed, a_variant(), a_step(), [1]) is absorbed


def test_only_timelines_that_a_view_draws_are_kept():
    names = (EAGER, f"{COMPILED}default", OURS, OURS_COMPILED, "Liger")
    step = step_profile.step_profile("a step", a_step("first", "second").launches)
    rows = [Baseline(name=name, step=step) for name in names]
    slim = {row.name: row.step for row in without_doubles([*rows, Baseline(name="failed", note="out of memory")])}
    assert slim[f"{COMPILED}default"] == step and slim["failed"] is None
    assert [slim[name].timeline for name in names if name != f"{COMPILED}default"] == [None] * 4
    assert slim[EAGER].kernels == slim[OURS].kernels == () and slim["Liger"].kernels == step.kernels
