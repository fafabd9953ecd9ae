"""What a fused call costs besides its graphs is timed without them, and leaves the call as it was."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from fusion_advisor.capture.graph.tracer import capture_regions
from fusion_advisor.fuse.after_side import call_overhead, is_held
from fusion_advisor.fuse.decide.session import Bench
from fusion_advisor.fuse.live.fused_model import FusedModel


class Wide(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.randn(1024, 1024) for _ in range(8))

    def forward(self, x):
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return x


def fused_wide():
    model, args = Wide().eval(), (torch.randn(256, 1024),)
    live = capture_regions(model, args, {})
    fused = FusedModel(model, live.regions, Bench(live, on_cuda=False).build((), ()).modules, args, {}, live=live)
    return fused, live, args


def test_the_overhead_is_without_the_graph():
    fused, live, args = fused_wide()
    rewound = []
    timing = call_overhead(lambda: fused.dispatch(*args), live.regions, lambda: rewound.append(1))
    assert timing is not None and len(timing.times_ns) == 50 and len(rewound) == 53
    with torch.no_grad():
        started = time.perf_counter_ns()
        fused.dispatch(*args)
        whole_ns = time.perf_counter_ns() - started
    assert timing.median_ns < whole_ns / 2  # the graph is 4 GFLOP
    x = torch.randn(256, 1024)
    with torch.no_grad():
        torch.testing.assert_close(fused.dispatch(x), fused._original(x))  # the route runs its graph again
    assert fused.fallbacks == {}


def test_a_call_that_dynamo_compiled_elsewhere_is_not_timed():
    fused, live, args = fused_wide()
    original = torch.nn.ReLU()
    assert call_overhead(lambda: original(args[0]), live.regions, lambda: None) is None
    with torch.no_grad():
        torch.testing.assert_close(fused.dispatch(*args), fused._original(*args))


def test_what_a_call_moves_is_put_back_ahead_of_each_and_after_the_last():
    fused, live, args = fused_wide()
    events = []

    def call():
        events.append("call")
        return fused.dispatch(*args)

    call_overhead(call, live.regions, lambda: events.append("rewind"))
    assert events[0] == events[-1] == "rewind"
    assert events[:-1] == ["rewind", "call"] * 52


@pytest.mark.parametrize(
    ("rest", "method", "is_graphed", "exchange", "found"),
    [
        (2.0, "cuda_graph", True, None, True),
        (2.0, "cuda_graph", False, None, None),  # launched by the host, ours may draw less power
        (0.0, "cuda_graph", False, None, False),
        (0.0, "cuda_graph", True, None, False),
        (0.0, "cuda_events", True, None, None),
        (None, "cuda_graph", True, None, None),
        (2.0, "cuda_graph", True, max, None),  # ranks look at no power limit
    ],
)
def test_what_is_known_of_the_power_limit_is_what_replays_showed(rest, method, is_graphed, exchange, found):
    installed = SimpleNamespace(
        job=SimpleNamespace(bench=SimpleNamespace(rest=rest), instruments=SimpleNamespace(exchange=exchange)),
        kept=SimpleNamespace(decision=SimpleNamespace(method=method)), is_graphed=is_graphed,
    )  # fmt: skip
    assert is_held(installed) is found
