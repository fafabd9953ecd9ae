"""Which loops one kernel walks, what comes into it, and why others stay as they are."""

from __future__ import annotations

import pytest
import torch

from fusion_advisor.fuse.scans.sites import LeftOp, ScanSite
from fusion_advisor.ir.program import REDUCTIONS
from tests.kernel_cases import recurrences as cases

STEPS = 10


def test_what_prepares_the_steps_comes_in_and_what_is_made_once_does_not():
    function, inputs = cases.CASES["mamba"]
    (site,) = cases.folded(function, inputs).found
    assert isinstance(site, ScanSite)
    names = [str(node.target) for node in site.members]
    assert names.count("aten.exp.default") == 1  # of delta; the decay's own is outside
    assert all(node.meta["val"].numel() <= inputs[0].numel() for node in site.inputs)
    assert site.recurrence.steps == 13 and site.before is None and len(site.outputs) == 2
    assert any(value.op in REDUCTIONS for value in site.recurrence.program.values)


def test_what_others_read_too_is_an_input():
    def run(x, gate):
        decay, state, rows = torch.sigmoid(gate), torch.zeros_like(x[:, 0]), []
        for step in range(x.shape[1]):
            state = decay[:, step] * state + x[:, step]
            rows.append(state * 2)
        return torch.stack(rows, 1), decay

    (site,) = cases.folded(run, (torch.randn(2, STEPS, 3), torch.randn(2, STEPS, 3))).found
    assert [str(node.target) for node in site.inputs if node.op == "call_function"] == ["aten.sigmoid.default"]


def looped(step, *, row=lambda states, now, x: states[-1] * x):
    def run(a, b):
        states, rows = [b[:, 0]], []
        for now in range(a.shape[1]):
            states.append(step(states, now, a[:, now], b[:, now]))
            rows.append(row(states, now, b[:, now]))
        return torch.stack(rows, 1)

    return run


LEFT = {
    "another constant in one step": (
        looped(lambda states, now, a, b: a * states[-1] + b * (3.0 if now == 6 else 2.0)), "step 6"
    ),
    "another op in one step": (
        looped(lambda states, now, a, b: a * states[-1] + (b.sin() if now == 6 else b.cos())), "step 6"
    ),
    "rows that all read one state": (
        looped(lambda states, now, a, b: a * states[-1] + b, row=lambda states, now, x: states[1] * states[-1] * x), "step 0"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_a_loop_whose_steps_differ_stays_as_it_is_and_says_why(name):
    function, words = LEFT[name]
    found = cases.folded(function, (torch.randn(2, STEPS, 3), torch.randn(2, STEPS, 3))).found
    assert found and all(isinstance(one, LeftOp) and words in one.reason for one in found), found


def test_steps_in_another_order_stay_as_they_are():
    def run(a, b):
        state, rows = b[:, 0], []
        for now in (0, 1, 2, 3, 5, 4, 6, 7, 8, 9):
            state = a[:, now] * state + b[:, now]
            rows.append(state * b[:, now])
        return torch.stack(rows, 1)

    (left,) = cases.folded(run, (torch.randn(2, STEPS, 3), torch.randn(2, STEPS, 3))).found
    assert isinstance(left, LeftOp) and "evenly" in left.reason


def test_steps_from_last_to_first_are_walked():
    def run(a, b):
        state, rows = torch.zeros_like(b[:, 0]), []
        for now in reversed(range(a.shape[1])):
            state = a[:, now] * state + b[:, now]
            rows.append(state * b[:, now])
        return torch.stack(rows, 1)

    (site,) = cases.folded(run, (torch.randn(2, STEPS, 3), torch.randn(2, STEPS, 3))).found
    loads = [value for value in site.recurrence.program.values if value.op == "load" and value.strides[0]]
    assert loads and all(value.strides[0] == -3 and value.offset == 27 for value in loads)
