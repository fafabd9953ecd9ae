"""Attention that takes no plan for each new shape: put in where it passes and is no slower, and on a growing cache untimed."""

from __future__ import annotations

import functools
import time
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

import fusion_advisor as fa
from fusion_advisor.capture.sizes.one_size import at_one_size
from fusion_advisor.codegen.cpp.backend import find_compiler
from fusion_advisor.fuse.passes.flash_attention import FLASH, use_flash
from fusion_advisor.fuse.points.carry import carried, with_more_passes
from fusion_advisor.fuse.points.first_use import settled
from fusion_advisor.fuse.points.in_full import decided
from fusion_advisor.fuse.points.near_point import finished
from fusion_advisor.fuse.shapes.sized_fusion import Workpiece, build
from fusion_advisor.runtime.torch_internals import aten_ops
from fusion_advisor.timing.wall_timer import as_timing
from tests.fuse.passes.test_flash_attention import ATTENTION, HALF, ON_CPU, cudnn
from tests.fuse.points.test_choose_layouts import work_on
from tests.tiny import qwen2

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="kernels of a CPU need a C++ compiler: apt-get install g++")

ON_ANY = functools.partial(use_flash, kernel_of=cudnn, flash=ON_CPU)
"""As where torch would choose cuDNN; what it computes is computed by the CPU's kernel."""


class Causal(torch.nn.Module):
    """A gate, which one kernel computes, and then causal attention. Its mask follows from the length."""

    def forward(self, hidden_states):
        x = functional.silu(hidden_states) * 1.5
        batch, tokens, _ = x.shape
        q = x.view(batch, tokens, 2, 16).transpose(1, 2)
        mask = torch.arange(tokens)[None, :] <= torch.arange(tokens)[:, None]
        return functional.scaled_dot_product_attention(q, q, q, attn_mask=mask).transpose(1, 2).reshape(x.shape)


@pytest.fixture
def point():
    """The work on a piece, the piece, a point of it that was decided, what its graph is called with, and what that writes."""
    work = work_on(maker=Causal, row_ns=0, op_ns=1000, x=torch.randn(5, 7, 32).to(HALF), keep="verified")
    with torch.no_grad():
        piece = work.ranged.finder(work.capture).next()
        workpiece, sizes = Workpiece(piece), {"batch": 8, "seq": 64}
        one = decided(work, workpiece, sizes, (), {})
        assert one.fusions and not one.row.reason and "drop-masks" in one.row.passes and FLASH.id not in one.row.passes
        work.options = replace(work.options, keep="paying")
        given, written = work.graph_call(workpiece.opened, sizes)
        yield work, workpiece, one, given, written


def taking(before_ns, after_ns):
    def timing(work, opened, ways, given, written, *, budget_s):
        return [as_timing(range(ns - 10, ns + 11), "wall") for ns in (before_ns, after_ns)]

    return timing


def targets(served):
    return [node.target for node in served.module.graph.nodes]


@pytest.mark.parametrize(("after_ns", "stays"), [(900, True), (1005, True), (1100, False)])
def test_it_stays_where_a_call_is_no_slower(point, after_ns, stays):
    work, *_ = point
    found = settled(*point, time=taking(1000, after_ns), flash=ON_ANY)
    assert (FLASH.id in found.row.passes) == (FLASH.id in found.row.rewrites) == (ON_CPU in targets(found.served)) == stays
    assert found.row.reason == "" and found.row.eager is not None and found.row.rel_l2 is not None
    assert any(note.startswith("flash-attention at batch=8") for note in work.progress.notes) == stays
    if stays:  # shapes at which a mask says more than a flag keep it
        assert ATTENTION in [node.target for node in found.served.plain.graph.nodes]


def test_it_is_what_a_loaded_plan_puts_in(point):
    _, workpiece, _, given, _ = point
    found = settled(*point, time=taking(1000, 900), flash=ON_ANY)

    again = finished(
        workpiece, build(workpiece, found.fusions, found.row.passes), found.served.sizes, found.row.passes, flash=ON_ANY
    )
    assert targets(again) == targets(found.served)
    (result,), (expected,) = again.module.forward(*given), found.served.module.forward(*given)
    assert torch.equal(result, expected)


def test_nothing_is_timed_where_it_changes_no_call_or_is_not_wanted(point):
    def never(*_, **__):
        raise AssertionError("timed")

    work, *_ = point
    assert FLASH.id not in settled(*point, time=never).row.passes  # cuDNN serves nothing on a CPU
    for options in (replace(work.options, skip=("flash-*",)), replace(work.options, exact=True)):
        work.options = options
        assert FLASH.id not in settled(*point, time=never, flash=ON_ANY).row.passes


def test_wrong_attention_is_taken_out_again(point):
    def wrong(query, key, value, dropout_p, is_causal, **options):
        return ON_CPU(query, key, value * 1.5, dropout_p, is_causal, **options)

    bad = functools.partial(use_flash, kernel_of=cudnn, flash=wrong)
    found = settled(*point, time=taking(1000, 900), flash=bad)
    assert FLASH.id not in found.row.passes and found.row.reason == "" and ATTENTION in targets(found.served)


def test_another_point_takes_it_over(point):
    work, workpiece, *_ = point
    work.options = replace(work.options, keep="verified")
    with_it = settled(*point, flash=ON_ANY)
    found = carried(work, workpiece, with_it, {"batch": 3, "seq": 17})
    assert FLASH.id in found.row.passes and found.row.reason == "" and ON_CPU in targets(found.served)


def test_a_pass_that_pays_is_added_to_it(point):
    work, workpiece, one, given, written = point
    with_mask = finished(workpiece, build(workpiece, one.fusions, ()), one.served.sizes, ())
    one = replace(one, served=with_mask, row=replace(one.row, passes=(FLASH.id,), rewrites=(FLASH.id,)))
    live = at_one_size(workpiece.opened, given, written)
    found = with_more_passes(work, workpiece, one, live, given)
    assert found.row.passes == ("drop-masks", FLASH.id) and found.row.rewrites.count(FLASH.id) == 1


@pytest.mark.gpu
def test_tokens_on_a_growing_cache_take_no_plan_each():
    torch.compiler.reset()
    model, kwargs = qwen2()
    model, ids = model.to("cuda", HALF), kwargs["input_ids"].cuda()
    query, keys = (torch.empty(3, 4, tokens, 16, device="cuda", dtype=HALF) for tokens in (1, 9))
    takes_plans = "cudnn" in aten_ops.attention_kernel(query, keys, keys)
    shapes = "batch=2..4,seq=2..16,cached=1..60"
    fused = fa.apply(model, {"input_ids": ids, "use_cache": False}, shapes=shapes, effort="quick", compile=False)
    served = [
        point for piece in fused.report.shapes.pieces if piece.call == "decode" for point in piece.points if not point.reason
    ]
    assert served and all((FLASH.id in point.passes) == takes_plans for point in served)
    known, prompt, seconds, made = *(torch.randint(1, 200, (3, tokens), device="cuda") for tokens in (3, 5)), [], []

    def generated(ids, tokens):
        usual = {"do_sample": False, "pad_token_id": 0, "disable_compile": True}
        return model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, **usual)

    for is_ours in (True, False):  # a plan of ours would serve the original ops too
        fused.apply() if is_ours else fused.revert()
        generated(known, 3)  # modules of kernels, and the graphs of the segments, are there once and for all lengths
        torch.cuda.synchronize()
        started = time.perf_counter()
        made.append(generated(prompt, 40))
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    assert made[0].shape == made[1].shape == (3, 45)
    assert not takes_plans or seconds[0] < seconds[1] / 2, seconds
