"""A recurrence that Python unrolled becomes one op: same numbers, all its launches, and look-alikes stay as they are."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from fusion_advisor.capture.graph.retrace import trace
from fusion_advisor.capture.graph.tracer import capture_regions
from fusion_advisor.capture.loops.one_op import fold_loops
from fusion_advisor.capture.loops.recurrence import find_recurrences
from fusion_advisor.capture.profile import profile_as_it_is
from fusion_advisor.records import Bandwidth, OpClass
from fusion_advisor.records.op_facts import LOOP_PREFIX

STEPS = 12


class Scan(nn.Module):
    """A selective scan by hand: input-dependent decay, one read of the state for each step."""

    def __init__(self, *, returns_state: bool = False, is_bf16: bool = False) -> None:
        super().__init__()
        self.into = nn.Linear(8, 8)
        self.returns_state, self.is_bf16 = returns_state, is_bf16

    def forward(self, x, read):
        decay, added = torch.sigmoid(self.into(x))[..., None] * torch.ones(4), (x * x)[..., None] * read[:, :, None]
        state = torch.zeros(x.shape[0], 8, 4, dtype=x.dtype)
        rows = []
        for step in range(x.shape[1]):
            state = decay[:, step] * state + added[:, step]
            kept = state.to(torch.bfloat16).to(x.dtype) if self.is_bf16 else state
            rows.append(torch.matmul(kept, read[:, step, :, None])[..., 0])
        out = torch.stack(rows, 1)
        return (out, state) if self.returns_state else out


def inputs(steps=STEPS):
    torch.manual_seed(0)
    return torch.randn(2, steps, 8), torch.randn(2, steps, 4)


def folded(model, args, least_steps=8):
    with torch.no_grad():
        live = capture_regions(model, args, {})
    graph = live.regions[0].graph
    before = len(graph.graph.nodes)
    count = fold_loops(live, least_steps)
    return live, count, before


@pytest.mark.parametrize("returns_state", [False, True])
def test_the_loop_is_one_op_with_the_same_numbers(returns_state):
    model, args = Scan(returns_state=returns_state), inputs()
    live, count, before = folded(model, args)
    region = live.regions[0]
    assert count == 1 and len(region.graph.graph.nodes) < before - 5 * STEPS
    got, want = region.graph(*region.example_args), model(*args)
    for one, other in zip(got, want if returns_state else (want,), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("is_bf16", [False, True])
def test_in_float64_the_whole_loop_is(is_bf16):
    model, args = Scan(is_bf16=is_bf16), inputs()
    live, _, _ = folded(model, args)
    region = live.regions[0]
    loop = next(node.target for node in region.graph.graph.nodes if LOOP_PREFIX in node.name)
    wide = [value.meta["val"] for value in loop.graph.nodes if value.op == "placeholder"]
    torch.manual_seed(1)
    given = [torch.randn(value.shape, dtype=torch.float64) for value in wide]
    got = loop(*given)
    narrow = loop(*(one.float() for one in given))
    assert got.dtype == torch.float64
    # With a step rounded to bfloat16 the two would agree to float32's error, or the wide run would carry bfloat16's.
    error = ((narrow.double() - got).norm() / got.norm()).item()
    assert (1e-3 < error < 3e-2) if is_bf16 else error < 1e-6


def test_all_launches_of_the_loop_belong_to_its_op():
    live, _, _ = folded(Scan(), inputs())
    capture = profile_as_it_is(live, Bandwidth(copy_bytes_per_s=10**10, launch_ns=1000), torch.device("cpu"))
    (loop,) = [op for op in capture.ops if op.target.startswith(LOOP_PREFIX)]
    assert loop.op_class is OpClass.OTHER and loop.target.startswith(f"{LOOP_PREFIX}{STEPS}_steps_")
    assert loop.source_text == "state = decay[:, step] * state + added[:, step]"
    mine = [launch for launch in capture.launches if launch.op_index == loop.index]
    assert len(mine) >= 3 * STEPS
    assert all(launch.op_index is not None for launch in capture.launches)


def test_equal_loops_have_equal_names_and_others_do_not():
    def name(steps):
        live, _, _ = folded(Scan(), inputs(steps))
        return next(op.name for op in live.regions[0].graph.graph.nodes if LOOP_PREFIX in op.name)

    assert name(9) == name(9) != name(10)


def looped(step, *, read=lambda state, now: (state * now).sum(-1), returns=lambda states, rows: torch.stack(rows, 1)):
    def run(a, b):
        state, states, rows = a[:, 0], [], []
        for now in range(a.shape[1]):
            state = step(state, a[:, now], b[:, now])
            states.append(state)
            rows.append(read(state, b[:, now]))
        return returns(states, rows)

    return run


LINEAR = looped(lambda state, a, b: a * state + b)
REFUSED = {
    "tanh": looped(lambda state, a, b: a * torch.tanh(state) + b),
    "product of the state with itself": looped(lambda state, a, b: (a * state) * state + b),
    "decay from the state": looped(lambda state, a, b: torch.sigmoid(state) * state + b),
    "addend from the state": looped(lambda state, a, b: a * state + b * state.relu()),
    "states read outside": looped(
        lambda state, a, b: a * state + b, returns=lambda states, rows: (torch.stack(rows, 1), states[3] + 1, states[5] + 1)
    ),
    "rows never gathered": looped(lambda state, a, b: a * state + b, returns=lambda states, rows: states[-1] + rows[-1][:, None]),
    "a write": looped(lambda state, a, b: a * state + b.mul_(2)),
    "random numbers": looped(lambda state, a, b: a * state + b * torch.rand_like(b)),
}


def graph_of(function, steps=STEPS):
    return trace(function, [torch.randn(2, steps, 4), torch.randn(2, steps, 4)]).graph


def test_a_linear_loop_is_found():
    (loop,) = find_recurrences(graph_of(LINEAR), 8)
    assert len(loop.states) == STEPS and len(loop.outputs) == 1
    assert {node.op for node in loop.inputs} <= {"placeholder", "call_function"}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_such_loop_is_left_as_it_is(name):
    assert find_recurrences(graph_of(REFUSED[name]), 8) == []


def test_a_short_loop_is_left_as_it_is():
    assert find_recurrences(graph_of(LINEAR, 7), 8) == []
    assert find_recurrences(graph_of(LINEAR, STEPS)) == []


def calls_to_find(steps):
    graph = graph_of(LINEAR, steps)
    count = 0

    def count_call(_frame, event, _arg):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(count_call)
    try:
        assert find_recurrences(graph, 8)
    finally:
        sys.setprofile(None)
    return count


def test_the_search_is_linear_in_the_ops():
    assert calls_to_find(80) < 5 * calls_to_find(20)
