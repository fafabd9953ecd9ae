"""A run's journal: ids of fusions that belong to one each, and passes that are forgotten because the step runs others."""

from __future__ import annotations

from torch.fx import Graph, GraphModule
from torch.nn import Module

from fusion_advisor.fuse.train.journal import Journal
from tests.tiny import planned, profiled


def test_a_forgotten_pass_gives_its_ids_to_nobody():
    capture, plan, journal = profiled("toy")[1], planned("toy"), Journal()
    graphs = [GraphModule(Module(), Graph()) for _ in range(3)]
    for graph in graphs[:2]:
        journal.begin(graph, "forward", capture, plan)
    first = journal.of(graphs[0])
    journal.forget([graphs[0]])
    journal.forget([])
    assert journal.of(graphs[0]) is None and journal.of(graphs[1]) is not None
    last = journal.begin(graphs[2], "backward", capture, plan)
    ids = [fusion.id for entry in (first, *journal.entries) for fusion in entry.plan.fusions]
    assert plan.fusions and len(set(ids)) == len(ids) == 3 * len(plan.fusions)
    assert last.training_pass == "backward"
