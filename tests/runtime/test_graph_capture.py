"""Recording into a CUDA graph: what a capture that fails leaves behind, and what may not run inside one."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from fusion_advisor.runtime.graph_capture import recording_into

ROOT = Path(__file__).resolve().parents[2]
WITH_TORCHS_OWN = {"fusion_advisor/runtime/graph_capture.py", "fusion_advisor/export/copied/cuda_graphs.py"}
"""The second is copied into packages that are without this project, and puts the stream back itself."""


def test_nothing_else_captures_with_torchs_context_alone():
    places = [path for folder in ("fusion_advisor", "tools") for path in (ROOT / folder).rglob("*.py")]
    assert {
        str(path.relative_to(ROOT)) for path in places if "torch.cuda.graph(" in path.read_text(encoding="utf-8")
    } == WITH_TORCHS_OWN


def synchronising(rows):
    return rows.sum().item()  # not permitted while a stream is captured


@pytest.mark.gpu
def test_a_capture_that_fails_leaves_the_stream_and_the_collector_as_they_were():
    rows, stream = torch.ones(8, device="cuda"), torch.cuda.current_stream()
    with pytest.raises(RuntimeError), recording_into(torch.cuda.CUDAGraph()):
        assert torch.cuda.current_stream() != stream
        synchronising(rows)
    assert torch.cuda.current_stream() == stream
    assert gc.isenabled()
    with torch.cuda.stream(torch.cuda.Stream()) as _:
        own = torch.cuda.current_stream()
        with pytest.raises(RuntimeError), recording_into(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            synchronising(rows)
        assert torch.cuda.current_stream() == own
    torch.cuda.synchronize()
    assert rows.sum().item() == 8


class Ring:
    """A cycle that holds a graph, as a traceback that was kept does."""

    def __init__(self, graph):
        self.graph, self.itself = graph, self


def recorded_graph(rows):
    graph = torch.cuda.CUDAGraph()
    with recording_into(graph):
        rows.mul_(1)
    graph.replay()
    return graph


@pytest.mark.gpu
def test_no_graph_in_a_cycle_is_freed_while_another_is_recorded():
    rows = torch.ones(8, device="cuda")
    before = gc.get_threshold()
    Ring(recorded_graph(rows))
    gc.set_threshold(1, 1, 1)
    try:
        graph = torch.cuda.CUDAGraph()
        with recording_into(graph):  # in torch's global mode
            kept = [[[]] for _ in range(100)]
            rows.mul_(2)
    finally:
        gc.set_threshold(*before)
    graph.replay()
    torch.cuda.synchronize()
    assert len(kept) == 100
    assert rows.tolist() == [2.0] * 8
