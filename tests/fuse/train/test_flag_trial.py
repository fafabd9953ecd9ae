"""The trial of flags in place of masks: their numbers come first, then their time, and shared heads are judged on top."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from fusion_advisor.capture.graph.retrace import retrace
from fusion_advisor.fuse.train.flag_trial import try_flags
from fusion_advisor.fuse.train.judge.gradients import check_gradients
from fusion_advisor.records import Status
from tests.fuse.train.attending import Attends, rows
from tests.fuse.train.test_trained_graph import OPTIONS
from tests.runtime.torch_internals.dynamo_graphs import dynamo_graph

TIMED = replace(OPTIONS, keep="paying")
FAST, SLOW = [100 + one for one in range(9)], [200 + one for one in range(9)]
KEPT, SLOWER, NOISE, WRONG = Status.KEPT, Status.SLOWER, Status.WITHIN_NOISE, Status.WRONG_NUMBERS


@pytest.fixture(autouse=True)
def _forgotten():
    yield
    torch.compiler.reset()


def tried(options=OPTIONS, model=None, **more):
    torch.manual_seed(0)

    def trial(graph_module):
        return graph_module, try_flags(graph_module, retrace(graph_module), options, **more)

    return dynamo_graph(model or Attends(), rows(), then=trial)[1]


def calls(graph_module):
    nodes = [node for node in graph_module.graph.nodes if node.target is functional.scaled_dot_product_attention]
    return [(node.kwargs.get("attn_mask"), node.kwargs.get("enable_gqa", False), *map(str, node.args[3:])) for node in nodes]


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([SLOW, FAST, FAST], [KEPT, NOISE]),
        ([SLOW, FAST, SLOW], [KEPT, SLOWER]),
        ([[3 * one for one in SLOW], SLOW, FAST], [KEPT, KEPT]),
        ([FAST, SLOW, FAST], [SLOWER]),
        ([FAST, FAST, FAST], [NOISE]),
    ],
    ids=str,
)
def test_each_rewrite_stays_where_both_passes_are_measurably_faster(times, expected):
    before, after = tried(
        TIMED, times=lambda candidates: [[run() or one for one in own] for run, own in zip(candidates, times, strict=True)]
    )
    assert [row.status for row in after.rows] == expected
    assert [row.id for row in after.rows] == ["drop-masks", "group-heads"][: len(expected)]
    assert all(row.sites == 2 and row.step_delta_ns is not None for row in after.rows)
    if expected[0] is not KEPT:
        assert after.module is before and not after.is_changed
    else:
        assert calls(after.module) == 2 * [(None, expected[1] is KEPT, "None", "0.0", "True")]
    assert all(mask is not None for mask, *_ in calls(before))  # dynamo's own graph stays as it is


def test_a_flag_that_changes_the_numbers_is_not_timed():
    def failed(*given):
        return replace(check_gradients(*given), is_passed=False)

    def times(_):
        raise AssertionError("it is timed")

    before, after = tried(TIMED, check=failed, times=times)
    assert [row.status for row in after.rows] == [WRONG] and after.module is before


def test_what_is_compared_is_both_passes_of_a_call_against_float64():
    compared = []

    def check(ours, theirs, wide):
        compared.append((ours, theirs, wide(torch.float64)))
        return check_gradients(ours, theirs, wide)

    _, after = tried(check=check)
    assert len(compared) == 2 and after.is_changed  # two ways of one kind of call
    for ours, theirs, true in compared:
        assert [name for name, _ in ours] == ["result", "query", "key", "value"]
        assert all(tensor.dtype == torch.float64 for _, tensor in true)
        for (_, mine), (_, other), (_, right) in zip(ours, theirs, true, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(mine.double(), right, rtol=1e-4, atol=1e-5)


def test_a_dry_run_and_a_graph_that_cannot_be_traced_change_nothing():
    def trial(graph_module):
        dry = try_flags(graph_module, retrace(graph_module), replace(OPTIONS, dry_run=True))
        return [(one.module is graph_module, one.rows) for one in (dry, try_flags(graph_module, None, OPTIONS))]

    assert dynamo_graph(Attends(), rows(), then=trial)[1] == 2 * [(True, ())]


class Layouts(TorchDispatchMode):
    """Notes the layouts of attention's result and of the gradient that its backward pass is given."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "attention" in str(func) and "backward" in str(func):
            given = dict(zip([one.name for one in func._schema.arguments], args, strict=False))
            self.seen.append((given["out"].stride(), given.get("grad_out", given.get("grad_out_")).stride()))
        return func(*args, **(kwargs or {}))


def test_the_calls_have_the_layouts_of_the_model_and_run_in_no_thread_of_its_steps():
    """Of a GPU torch keeps plans of cuDNN's attention by thread, and finds them without the layout of the result's gradient."""
    seen, threads = [], []

    def times(candidates):
        threads.append((threading.get_ident(), torch.autograd.is_multithreading_enabled()))
        for run in candidates:
            with Layouts() as layouts:
                run()
            seen.extend(layouts.seen)
        return [[300 - 100 * number + one for one in range(9)] for number, _ in enumerate(candidates)]

    torch.manual_seed(0)

    def trial(graph_module):
        return try_flags(graph_module, retrace(graph_module), TIMED, times=times)

    found = dynamo_graph(Attends(), rows(), then=trial)[1]
    assert [row.status for row in found.rows] == [KEPT, KEPT]
    assert all(thread != threading.get_ident() and not is_shared for thread, is_shared in threads)
    # 2 layers in 3 ways
    assert len(seen) == 6 and all(result == of_result for result, of_result in seen)
    assert all(result != torch.empty(2, 4, 24, 8).stride() for result, _ in seen)  # of queries that were turned
