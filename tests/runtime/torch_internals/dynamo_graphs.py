"""Graphs as dynamo hands them to a backend."""

from __future__ import annotations

import torch

from fusion_advisor.runtime.torch_internals import dynamo


def dynamo_graph(function, *inputs, dynamic=False, then=None, **named):
    """Run a function under dynamo; return its graph, and what ``then`` made of it inside the backend."""
    found = []

    def backend(graph, _):
        found.append((graph, then(graph) if then else None))
        return graph.forward

    with torch.no_grad(), dynamo.raise_recompile_limit(64):
        torch.compile(function, backend=backend, dynamic=dynamic)(*inputs, **named)
    return found[0]
