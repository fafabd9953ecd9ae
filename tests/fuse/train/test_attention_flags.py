"""Training without masks that say no more than a flag: both passes lose them, and gradients stay eager's."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fusion_advisor.fuse.train.attention_flags import takes_shared_heads
from fusion_advisor.records import Status
from tests.fuse.train.attending import BATCH, HEADS, KV_HEADS, LENGTH, WIDTH, Attends, rows
from tests.fuse.train.kept_graphs import KeptGraphs
from tests.fuse.train.test_trained_graph import OPTIONS, compare, gradients, step

BOTH = ("drop-masks", "group-heads")


class Backend(KeptGraphs):
    @property
    def kept(self):
        return tuple(row.id for row in self.rows if row.status is Status.KEPT)


@pytest.fixture(autouse=True)
def _no_warning():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="fusion-advisor runs the original ops")
        yield
    torch.compiler.reset()


def made(options=OPTIONS, **kind):
    torch.manual_seed(0)
    model, backend = Attends(**kind), Backend(options)
    return model, copy.deepcopy(model), torch.compile(model, backend=backend, dynamic=False), backend


def attention(backend):
    """(pass, whether it is causal, shape of its keys, whether it has a mask) of each op of attention in both passes."""
    found = []
    (graph,) = backend.graphs
    for half in graph.halves:
        for node in half.graph.graph.nodes:
            if node.op != "call_function" or "flash_attention_for_cpu" not in str(node.target):
                continue
            is_backward = "backward" in str(node.target)
            at = 2 if is_backward else 1
            given = dict(enumerate(node.args))
            causal = given.get(7 if is_backward else 4, False)
            found.append((is_backward, causal, tuple(given[at].meta["val"].shape), node.kwargs.get("attn_mask") is not None))
    return found


def shape(heads):
    return BATCH, heads, LENGTH, WIDTH


def test_both_passes_have_the_flag_and_the_shared_heads_and_gradients_are_eagers():
    model, plain, compiled, backend = made()
    for seed in (1, 2):
        torch.testing.assert_close(step(compiled, rows(seed)), step(plain, rows(seed)))
    compare(gradients(model), gradients(plain))
    assert backend.kept == BOTH
    assert attention(backend) == [(is_backward, True, shape(KV_HEADS), False) for is_backward in (False, False, True, True)]


@pytest.mark.parametrize(
    ("skipped", "expected"), [(("drop-masks",), (False, HEADS, True)), (("group-heads",), (True, HEADS, False))], ids=str
)
def test_what_is_skipped_is_left(skipped, expected):
    model, plain, compiled, backend = made(replace(OPTIONS, skip=skipped))
    torch.testing.assert_close(step(compiled, rows()), step(plain, rows()))
    compare(gradients(model), gradients(plain))
    causal, heads, has_mask = expected
    assert {one[1:] for one in attention(backend)} == {(causal, shape(heads), has_mask)}


@pytest.mark.parametrize("mask", ["windowed", "of_input", "written"])
def test_a_mask_that_says_more_than_a_flag_stays(mask):
    model, plain, compiled, backend = made(mask=mask)
    torch.testing.assert_close(step(compiled, rows()), step(plain, rows()))
    compare(gradients(model), gradients(plain))
    assert set(BOTH).isdisjoint(backend.kept)
    assert {one[1:] for one in attention(backend)} == {(False, shape(HEADS), True)}


def test_where_layers_alternate_between_two_masks_each_keeps_its_own():
    model, plain, compiled, backend = made(mask="alternating", layers=4)
    torch.testing.assert_close(step(compiled, rows()), step(plain, rows()))
    compare(gradients(model), gradients(plain))
    assert [one[1:] for one in attention(backend)[:4]] == 2 * [(False, shape(HEADS), True), (True, shape(KV_HEADS), False)]


@pytest.mark.parametrize(("mask", "causal"), [("additive", True), ("open_to_all", False)])
def test_additive_masks_and_masks_that_hide_nothing_are_dropped_too(mask, causal):
    model, plain, compiled, backend = made(mask=mask, kv_heads=HEADS)
    torch.testing.assert_close(step(compiled, rows()), step(plain, rows()))
    compare(gradients(model), gradients(plain))
    assert backend.kept == BOTH[:1]
    assert {one[1:] for one in attention(backend)} == {(causal, shape(HEADS), False)}


def test_dropout_draws_anew_and_what_follows_a_capture_draws_the_same():
    model, _, compiled, backend = made(dropout=0.5)
    found = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        model.zero_grad()
        found.append((step(compiled, rows()), torch.rand(2)))
    assert "drop-masks" in backend.kept
    assert torch.equal(found[0][0], found[1][0]) and not torch.allclose(found[0][0], found[2][0])
    assert torch.equal(found[0][1], found[1][1])


def test_attention_inside_a_checkpoint_keeps_its_mask():
    torch.manual_seed(0)
    model, backend = Attends(), Backend()
    plain = copy.deepcopy(model)
    compiled = torch.compile(lambda x: checkpoint(model, x, use_reentrant=False), backend=backend, dynamic=False)
    torch.testing.assert_close(step(compiled, rows()), step(plain, rows()))
    compare(gradients(model), gradients(plain))
    assert set(BOTH).isdisjoint(backend.kept)


@pytest.mark.parametrize(
    ("device", "dtype", "expected"), [("meta", "bfloat16", True), ("meta", "float32", False), ("cpu", "float32", True)]
)
def test_shared_heads_are_for_kernels_that_read_them(device, dtype, expected):
    assert takes_shared_heads(torch.empty(1, dtype=getattr(torch, dtype), device=device)) is expected
