"""Values in a permuted layout whose rows are read again and again become contiguous once; anything else stays."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fusion_advisor.capture.graph.layout_copies import LAID_OUT
from fusion_advisor.capture.graph.tracer import capture_regions
from fusion_advisor.fuse.passes.in_trace import CONTIGUOUS_ROWS
from fusion_advisor.fuse.pipeline import apply_workload
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.fuse.rewrite.graph_rewriter import rewrite_region
from fusion_advisor.records import Status
from fusion_advisor.workload.load import describe_live

WIDTH, LENGTH = 32, 96


class Speech(nn.Module):
    """A convolution, its result as rows, and a residual stream that begins with them."""

    def __init__(self, change=lambda rows: rows, end=lambda rows: rows.contiguous()):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv1d(4, WIDTH, 3, padding=1)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.change, self.end = change, end

    def forward(self, sound):
        rows = self.change(torch.nn.functional.gelu(self.conv(sound)).permute(0, 2, 1) + self.positions)
        for norm, linear in zip(self.norms, self.linears, strict=False):
            rows = rows + linear(norm(rows))
        return self.end(self.norms[2](rows))


SOUND = torch.randn(2, 4, LENGTH)


def captured(model):
    with torch.no_grad():
        (region,) = capture_regions(model.eval(), (SOUND,), {}).regions
    return region


def marks(region):
    return [node for node in region.graph.graph.nodes if LAID_OUT in node.meta]


def test_the_permuted_value_that_a_residual_stream_begins_with_is_copied_once():
    model = Speech()
    region = captured(model)
    (copy,) = marks(region)
    assert copy.all_input_nodes[0].target is torch.ops.aten.permute.default
    (total,) = copy.users
    sums = [node for node in region.graph.graph.nodes if node.target is torch.ops.aten.add.Tensor and node.meta["val"].dim() == 3]
    assert total in sums and all(node.meta["val"].is_contiguous() for node in sums if node.meta["val"].shape[-1] == WIDTH)
    with torch.no_grad():
        torch.testing.assert_close(region.graph(*region.example_args)[0], model(SOUND))


@pytest.mark.parametrize("is_kept", [True, False])
def test_without_the_pass_the_copy_goes_again(is_kept):
    model = Speech()
    region = captured(model)
    indices = {node: number for number, node in enumerate(region.graph.graph.nodes)}
    module, changed = rewrite_region(region, indices, [], [CONTIGUOUS_ROWS.apply] if is_kept else [])
    assert changed == ([1] if is_kept else [])
    copies = [node for node in module.graph.nodes if node.name == marks(region)[0].name]
    assert len(copies) == is_kept
    with torch.no_grad():
        torch.testing.assert_close(module(*region.example_args)[0], model(SOUND))


def write_to(rows):
    rows[:, 0] = 0.0
    return rows


@pytest.mark.parametrize(
    "model",
    [
        Speech(end=lambda rows: rows, change=lambda rows: rows.contiguous()),  # one op reads what is permuted
        Speech(change=write_to),
    ],
    ids=["read once", "written to"],
)
def test_what_is_read_once_or_written_to_stays(model):
    assert not marks(captured(model))


class Returned(Speech):
    def forward(self, sound):
        rows = self.conv(sound).permute(0, 2, 1) + self.positions
        return self.norms[0](rows) + self.norms[1](rows), rows


def test_what_the_model_returns_keeps_its_strides():
    model = Returned()
    region = captured(model)
    assert not marks(region)
    with torch.no_grad():
        got, expected = region.graph(*region.example_args), model(SOUND)
    assert [one.stride() for one in got] == [one.stride() for one in expected]


def test_it_is_timed_first_and_what_follows_is_made_for_its_layout():
    model = Speech().eval()
    with torch.no_grad():
        expected = model(SOUND)
        run = apply_workload(describe_live(model, (SOUND,)), ApplyOptions(keep="verified", min_share=0.0))
        try:
            rows = {row.id: row for row in run.report.rewrites}
            row = rows["contiguous-rows"]
            # Which one it is follows from the machine's load; test_layout_trial.py gives it times of its own.
            assert row.sites == 1
            assert row.status is Status.KEPT or (row.status is Status.SLOWER and row.step_delta_ns > 0)
            assert run.report.model_check.is_passed
            torch.testing.assert_close(model(SOUND), expected)
            assert not run.fused.fallbacks
        finally:
            run.revert()
