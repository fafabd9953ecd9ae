"""Whether a step's graphs stay: by its numbers first, then by its wall time."""

from __future__ import annotations

import pytest
import torch

from fusion_advisor.fuse.step_graph.trial import try_step_graph
from fusion_advisor.records import Status
from fusion_advisor.timing.paired import compare_rounds


class Graphs:
    """Graphs of a step that are replayed unless ``refused`` says why not."""

    def __init__(self, refused=""):
        self.is_on = self.is_forgotten = False
        self.replays, self.refusals = [0, 0], {refused: 1} if refused else {}
        self.pool_bytes, self.is_refused = 3 << 20, bool(refused)
        self.ran = []

    def forget(self):
        self.is_forgotten = True

    def step(self):
        self.ran.append("graphs" if self.is_on else "launches")
        if self.is_on and not self.refusals:
            self.replays = [count + 1 for count in self.replays]


def tried(graphs, *, before_ns=100, after_ns=80, numbers="", is_timed=True):
    def compare(before, after):
        before(), after()
        return compare_rounds([before_ns, before_ns + 1] * 8, [after_ns, after_ns + 1] * 8)

    return try_step_graph(
        graphs, graphs.step, lambda: graphs.ran.append("without"), numbers=lambda: numbers, compare=compare if is_timed else None
    )


def test_what_is_faster_stays_and_is_recorded_anew_for_the_model_itself():
    graphs = Graphs()
    row = tried(graphs)
    assert (row.id, row.status, row.sites, row.held_bytes) == ("cuda-graph", Status.KEPT, 2, 3 << 20)
    assert row.step_delta_ns == -20 and row.step_delta_ci_ns is not None and "by the wall clock" in row.reason
    assert graphs.is_on and graphs.is_forgotten and graphs.ran == ["graphs"] * 4 + ["without", "graphs"]


@pytest.mark.parametrize(("after_ns", "status"), [(120, Status.SLOWER), (100, Status.WITHIN_NOISE)])
def test_what_is_not_faster_is_switched_off_and_freed(after_ns, status):
    graphs = Graphs()
    row = tried(graphs, after_ns=after_ns)
    assert row.status is status and not graphs.is_on and graphs.is_forgotten


def test_wrong_numbers_are_never_timed():
    graphs = Graphs()
    row = tried(graphs, numbers="a gradient is too far")
    assert (row.status, row.reason, row.step_delta_ns) == (Status.WRONG_NUMBERS, "a gradient is too far", None)
    assert not graphs.is_on and "without" not in graphs.ran


def test_what_cannot_be_recorded_says_why():
    graphs = Graphs(refused="the driver says no")
    row = tried(graphs)
    assert (row.status, row.reason, row.held_bytes) == (Status.NOT_REPLACED, "the driver says no", 0) and not graphs.is_on


def test_a_step_that_is_launched_in_the_end_while_it_is_timed_is_not_replaced():
    graphs = Graphs()

    def compare(before, after):
        graphs.is_refused, graphs.refusals = True, {"its weights moved": 1}
        return compare_rounds([100] * 8, [50] * 8)

    row = try_step_graph(graphs, graphs.step, graphs.step, numbers=lambda: "", compare=compare)
    assert (row.status, row.reason) == (Status.NOT_REPLACED, "its weights moved") and not graphs.is_on


def test_where_no_time_is_judged_numbers_decide():
    graphs = Graphs()
    assert tried(graphs, is_timed=False).status is Status.KEPT and graphs.is_on


def test_where_memory_runs_out_the_step_is_launched():
    graphs = Graphs()

    def step():
        raise torch.cuda.OutOfMemoryError

    row = try_step_graph(graphs, step, step, numbers=lambda: "", compare=None)
    assert row.status is Status.NOT_REPLACED and "no memory" in row.reason and not graphs.is_on and graphs.is_forgotten
