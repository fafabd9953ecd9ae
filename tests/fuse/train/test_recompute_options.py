"""Recompute options without a memory budget: bytes, a verdict on their time, and the gradients of the step without them."""

from __future__ import annotations

import copy
import functools
import math
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from fusion_advisor.fuse.dynamo_backend import fuse_graph
from fusion_advisor.fuse.loss.recompute_options import ATTN_DROPOUT_CHECKPOINT, GELU_CHECKPOINT
from fusion_advisor.fuse.plan.options import Budgets
from fusion_advisor.fuse.train.judge.gradients import TrainingStep
from fusion_advisor.fuse.train.judge.recompute_choice import copied_out_bytes
from fusion_advisor.fuse.train.passes.recomputed import kept_bytes
from fusion_advisor.fuse.train.trained_graph import OTHER_STAYS, TrainedGraph
from fusion_advisor.records import Status
from fusion_advisor.timing.paired import compare_rounds
from tests.fuse.train.test_trained_graph import OPTIONS, compare, gradients

ROWS, WIDTH, HEADS = 64, 32, 2
TIMED = replace(OPTIONS, keep="paying")


class Layer(nn.Module):
    """Attention by its formula with a dropout, then a layer of GELU."""

    def __init__(self, *, dropout=0.0, activation=functional.gelu):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout, self.activation = nn.Dropout(dropout), activation

    def forward(self, x):
        batch, length, _ = x.shape
        query, key, value = (
            one.view(batch, length, HEADS, -1).transpose(1, 2) for one in self.qkv(x).split(WIDTH, dim=-1)
        )  # fmt: skip
        shares = self.dropout(torch.softmax(query @ key.transpose(-1, -2) / math.sqrt(WIDTH // HEADS), -1))
        x = x + self.out((shares @ value).transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(self.activation(self.up(x)))


class Model(nn.Module):
    """Two layers at least, so that the peak lies behind the first."""

    def __init__(self, *, layers=2, **kind):
        super().__init__()
        self.layers = nn.Sequential(*(Layer(**kind) for _ in range(layers)))

    def forward(self, x):
        return self.layers(x).square().mean()


def measured(sizes, call):
    call()
    return next(sizes)


def judged(times=None, options=TIMED, optimiser=None, peaks=(), eager_bytes=None, seconds=None, **kind):
    """The graph of a step after its first call; ``times`` are those of the steps without and with an option, in turn.

    ``peaks`` are eager's and that of the step without an option, ``seconds`` a clock's for trials.
    """
    graphs, turns = [], iter([(1000, 500), *(times or [])])

    def clock(*_):
        taken = next(turns)
        if taken is None:
            raise torch.cuda.OutOfMemoryError("planted")
        return compare_rounds(*([one] * 20 for one in taken))

    class Timed(TrainedGraph):
        def __init__(self, graph_module, inputs, **more):
            planted = {} if times is None else {"compare": clock}
            if eager_bytes is not None:
                planted["eager_bytes"] = eager_bytes
            if peaks:
                planted["peak"] = functools.partial(measured, iter(peaks))
            if seconds:
                planted["seconds"] = iter(seconds).__next__
            super().__init__(graph_module, inputs, **more | planted)
            self.tried = [one for (one,) in self._again]
            assert not any("passes" in vars(one) for one in self.tried)  # nothing is traced yet

        def __call__(self, *args):
            self.given = args
            return super().__call__(*args)

    def backend(graph_module, inputs):
        more = {} if optimiser is None else {"optimiser": optimiser}
        graphs.append(fuse_graph(graph_module, inputs, options, trained=Timed, **more))
        return graphs[-1]

    torch.manual_seed(0)
    model = Model(**kind)
    plain, x = copy.deepcopy(model), torch.randn(4, ROWS, WIDTH)
    compiled = torch.compile(model, backend=backend, dynamic=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="fusion-advisor runs the original ops: the step")
        compiled(x).backward()
    plain(x).backward()
    torch.compiler.reset()
    if not kind.get("dropout"):
        compare(gradients(model), gradients(plain))
    return graphs[0]


def rows(graph):
    return {row.id: row for row in graph.outcome.step_rows}


def kept(graph):
    return sum(kept_bytes({name: half.graph for name, half in graph._passes.by_name.items()}).values())


@pytest.mark.parametrize("activation", [functional.gelu, functional.silu, lambda x: functional.silu(x) * x], ids=range(3))
def test_an_option_that_costs_nothing_stays_and_gradients_are_eagers(activation):
    graph = judged([(1000, 1000)], activation=activation)
    row = rows(graph)[GELU_CHECKPOINT.id]
    assert row.status is Status.KEPT and row.sites == 2 and row.saved_bytes > 0 and row.step_delta_ns == 0
    assert graph.outcome.check.is_passed and len(graph.left_out) == 2
    assert kept(graph) == sum(kept_bytes(graph._base.graphs).values()) - 2 * 4 * ROWS * 4 * WIDTH * 4  # of both layers


def test_one_that_costs_time_is_a_row_and_no_more():
    graph = judged([(1000, 1010)])
    row = rows(graph)[GELU_CHECKPOINT.id]
    assert row.status is Status.SLOWER and row.saved_bytes > 0 and row.step_delta_ns == 10
    assert "keeps" in row.reason and "--memory-budget" in row.reason
    assert graph.is_rewritten and kept(graph) == sum(kept_bytes(graph._base.graphs).values())


def test_where_memory_ends_on_the_way_the_step_without_it_goes_on():
    graph = judged([None])
    row = rows(graph)[GELU_CHECKPOINT.id]
    assert row.status is Status.NOT_REPLACED and "no memory is left" in row.reason and graph.is_rewritten
    assert kept(graph) == sum(kept_bytes(graph._base.graphs).values())


def test_each_option_is_tried_by_itself():
    found = rows(judged([(1000, 1010), (1000, 1000)], dropout=0.1))
    assert [found[one.id].status for one in (GELU_CHECKPOINT, ATTN_DROPOUT_CHECKPOINT)] == [Status.SLOWER, Status.KEPT]
    assert found[ATTN_DROPOUT_CHECKPOINT.id].sites == 2


ABOVE, BELOW = (1000, 2000), (2000, 1000)
QUICK = replace(TIMED, effort="quick")


PEAKS = "; without it the step's peak is 2.00 kB, eager's 1.00 kB, weights and inputs aside"


@pytest.mark.parametrize(
    ("options", "after_ns", "status", "words"),
    [
        (QUICK, 990, Status.KEPT, f"is not measurably slower{PEAKS}"),
        (TIMED, 1019, Status.KEPT, f"is not measurably slower by more than 2%{PEAKS}"),
        (QUICK, 1030, Status.SLOWER, "is slower by more than 2%; a --memory-budget"),
    ],
    ids=["quick, free", "2 %", "quick, 3 %"],
)
def test_above_eagers_peak_an_option_may_cost_a_little_time(options, after_ns, status, words):
    graph = judged([(1000, after_ns)], options, peaks=ABOVE)
    row = rows(graph)[GELU_CHECKPOINT.id]
    assert row.status is status and words in row.reason and row.step_delta_ns == after_ns - 1000
    assert graph.outcome.check.is_passed and graph.is_rewritten
    assert (kept(graph) < sum(kept_bytes(graph._base.graphs).values())) == (status is Status.KEPT)


@pytest.mark.parametrize(
    ("peaks", "after_ns", "status"),
    [
        (BELOW, 1010, Status.KEPT), (BELOW, 1030, Status.SLOWER), ((20_000_000, 10_000_000), 1010, Status.SLOWER),
        ((20_000_000, 10_000_000), 1000, Status.KEPT),
    ],
    ids=["much of the peak for 1 %", "much of the peak for 3 %", "little of the peak for 1 %", "little of the peak for nothing"],
)  # fmt: skip
def test_below_eagers_peak_an_option_may_cost_two_percent_where_it_spares_much_of_the_peak(peaks, after_ns, status):
    assert rows(judged([(1000, after_ns)], peaks=peaks))[GELU_CHECKPOINT.id].status is status


@pytest.mark.parametrize(
    ("peaks", "words"), [(BELOW, "the step's peak is 1.00 kB, eager's 2.00 kB"), ((), "eager's peak was not measured")], ids=str
)
def test_quick_traces_none_where_the_peak_is_not_above_eagers(peaks, words):
    graph = judged([], QUICK, peaks=peaks)
    row = rows(graph)[GELU_CHECKPOINT.id]
    assert (
        row.status is Status.NOT_REPLACED
        and row.step_delta_ns is None
        and f"with --quick it is not tried here: {words}" in row.reason
    )
    assert "passes" not in vars(graph.tried[0]) and graph.is_rewritten


def test_the_models_own_peak_decides_where_it_is_known():
    """The graph's own ops hold more than the model does: masks that were traced, say."""
    row = rows(judged([(1000, 1000)], QUICK, peaks=(2000,), eager_bytes=1000))[GELU_CHECKPOINT.id]
    assert row.status is Status.KEPT and PEAKS in row.reason
    row = rows(judged([], QUICK, peaks=(1000,), eager_bytes=2000))[GELU_CHECKPOINT.id]
    assert row.status is Status.NOT_REPLACED and "eager's 2.00 kB" in row.reason


def test_quick_begins_no_trial_that_would_not_end_in_its_time():
    """The step without it took 10 s: with 10 s for trials there is time for one, a second later there is none."""
    options = replace(QUICK, budgets=Budgets(recompute_s=10))
    assert rows(judged([(1000, 1000)], options, peaks=ABOVE, seconds=(0, 10, 10)))[GELU_CHECKPOINT.id].status is Status.KEPT
    row = rows(judged([], options, peaks=ABOVE, seconds=(0, 10, 11)))[GELU_CHECKPOINT.id]
    assert row.status is Status.NOT_REPLACED and "9 s are left to try it, and the step without it took 10 s" in row.reason
    usual = replace(options, effort="usual")
    assert rows(judged([(1000, 1000)], usual, peaks=ABOVE, seconds=(0, 10, 11)))[GELU_CHECKPOINT.id].status is Status.KEPT


def test_where_one_stays_the_next_says_so():
    row = rows(judged([(1000, 1000)], dropout=0.1))[ATTN_DROPOUT_CHECKPOINT.id]
    assert row.status is Status.NOT_REPLACED and OTHER_STAYS in row.reason


def test_bytes_that_are_copied_out_are_counted():
    graph = judged([(1000, 1010)])
    weights = sum(one.numel() * 4 for one in Model().parameters())
    assert copied_out_bytes(graph._base.graphs) == weights + 4  # and the loss


@pytest.mark.parametrize("dropout", [0.3, 1.0])
def test_a_dropout_that_is_computed_again_drops_the_same(dropout):
    """Both ways op by op, from one seed: the loss and all gradients have the same bits."""
    graph = judged([(1000, 1010), (1000, 1010)], dropout=dropout)
    assert [one.option.rewrite for one in graph.tried] == [GELU_CHECKPOINT, ATTN_DROPOUT_CHECKPOINT]
    for whole, passes in ((one.whole, one.passes) for one in graph.tried):
        step, found = TrainingStep.of(whole.call, [str(n) for n in range(len(graph.given))], graph.given), []
        for one in (whole, passes):
            with one.instead(lambda half: half.forward):
                found.append(step.run(one.call, seed=5, backward_passes=2))
        assert len(found[0]) > 10 and all(torch.equal(mine, own) for (_, mine), (_, own) in zip(*found, strict=True))
        assert not torch.equal(found[0][0][1], step.run(whole.call, seed=6)[0][1]) or dropout == 1


@pytest.mark.parametrize("more", [{"effort": "quick"}, {"keep": "verified"}], ids=str)
def test_where_steps_are_not_timed_the_row_says_so(more):
    row = rows(judged(options=replace(TIMED, only=("no_kernel", GELU_CHECKPOINT.id), **more)))[GELU_CHECKPOINT.id]
    assert row.status is Status.NOT_REPLACED and row.step_delta_ns is None
    assert row.reason in ("no time decides what stays", "the step runs its own ops"), row


@pytest.mark.parametrize(
    ("more", "activation"),
    [({"memory_budget": 0.5}, functional.gelu), ({"skip": (GELU_CHECKPOINT.id,)}, functional.gelu), ({}, torch.neg)],
    ids=["a budget", "skipped", "no activation"],
)
def test_no_row_under_a_budget_where_it_is_skipped_or_without_an_activation(more, activation):
    graph = judged(options=replace(OPTIONS, **more), activation=activation)
    assert not rows(graph).keys() & {GELU_CHECKPOINT.id, ATTN_DROPOUT_CHECKPOINT.id}
