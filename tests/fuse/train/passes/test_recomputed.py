"""What a memory budget has the backward pass compute again: rows by op and module, with their bytes and times."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fusion_advisor as fa
from fusion_advisor.fuse.plan.options import Budgets
from fusion_advisor.fuse.train.passes.recomputed import kept_bytes
from fusion_advisor.report.html.page import render_html
from tests.fuse.train.test_chunked_losses import Backend
from tests.fuse.train.test_memory_budget import BUDGET, Deep
from tests.fuse.train.test_trained_graph import OPTIONS, WIDTH, step
from tests.tiny import BANDWIDTH

ROWS, TALL = 16, 8


@pytest.fixture(autouse=True)
def _forget():
    yield
    torch.compiler.reset()


def graph_of(options, **kind):
    backend = Backend(replace(options, only=("no_kernel", "memory-budget")))
    step(torch.compile(Deep(**kind), backend=backend, dynamic=False), torch.randn(ROWS, TALL, WIDTH))
    return backend.graphs[0]


def test_rows_sum_up_to_what_the_forward_pass_keeps_less():
    graph = graph_of(BUDGET)
    rows = graph.computed_again(lambda _: None)
    before, after = (sum(kept_bytes(passes.graphs).values()) for passes in (graph._plain, graph._base))
    assert before > after > 0 and sum(row.saved_bytes for row in rows) == before - after
    gates = next(row for row in rows if row.module == "blocks.*.gate")
    assert gates.op == "addmm" and gates.saved_bytes == gates.ops * ROWS * TALL * 2 * WIDTH * 4 and gates.again_ns == 0
    assert list(rows) == sorted(rows, key=lambda row: -row.saved_bytes)
    modules = {row.module for row in rows}
    assert "blocks.*" in modules and not any(one.rpartition(".")[2].isdigit() for one in modules), modules


def test_a_tensor_and_its_views_are_kept_once_and_inputs_not_at_all():
    graph = graph_of(BUDGET)
    kept = kept_bytes(graph._plain.graphs)
    names = {node.name for node in graph._plain.graphs["forward"].graph.find_nodes(op="placeholder")}
    assert kept and not names & kept.keys() and not any(name.startswith("view") for name in kept)


def test_without_a_budget_there_are_no_rows():
    assert graph_of(OPTIONS).computed_again(lambda _: None) == ()


def test_a_report_shows_rows_with_the_time_of_the_traced_forward_pass():
    with fa.apply(
        Deep().train(), (torch.randn(ROWS, TALL, WIDTH),), phase="train", memory_budget=0.2, keep="verified", compile=False,
        only=("no_kernel", "memory-budget"), min_share=0.0, bandwidth=BANDWIDTH, warmup=1, runs=3, steps=1,
        budgets=Budgets(wall_s=0.05),
    ) as fused:  # fmt: skip
        rows = fused.report.training.recomputed
    assert rows and all(row.again_ns > 0 for row in rows if row.op in ("addmm", "mm") and row.ops)
    page = render_html(fused.report)
    assert "Computed again in the backward pass" in page and "blocks.*.gate" in page
