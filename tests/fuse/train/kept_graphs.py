"""The backend of ``torch.compile``, with the graphs that train at hand."""

from __future__ import annotations

from fusion_advisor.fuse.dynamo_backend import fuse_graph
from fusion_advisor.fuse.train.trained_graph import TrainedGraph
from tests.fuse.train.test_trained_graph import OPTIONS


class KeptGraphs:
    """The backend; keeps the graphs that train."""

    def __init__(self, options=OPTIONS):
        self.graphs, self.options = [], options

    def __call__(self, graph_module, inputs):
        call = fuse_graph(graph_module, inputs, self.options)
        if isinstance(call, TrainedGraph):
            self.graphs.append(call)
        return call

    @property
    def rows(self):
        return [row for graph in self.graphs for row in graph.outcome.step_rows]
