"""A plan of ranges runs growing decode steps in segments with its kernels in them, after it was made and after it was loaded."""

from __future__ import annotations

import warnings

import pytest
import torch

import fusion_advisor as fa
from fusion_advisor.fuse.cuda_graph.replay import Graphs
from fusion_advisor.fuse.cuda_graph.segmented_region import SegmentedRecording
from fusion_advisor.fuse.live.restore_plan import apply_plan
from fusion_advisor.fuse.live.saved_plan import load_plan
from fusion_advisor.fuse.restore_shapes import restore_shapes
from fusion_advisor.workload.load import describe_live
from tests.fuse import test_pipeline
from tests.fuse.cuda_graph.fake_graph import FakeRecorder
from tests.tiny import qwen2

pytestmark = test_pipeline.pytestmark


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    folder = tmp_path_factory.mktemp("segments") / "run"
    model, kwargs = qwen2()
    shapes = "batch=2..4,seq=2..16,cached=2..40"
    fa.apply(model, kwargs, shapes=shapes, keep="verified", compile=False, run_dir=folder).revert()
    return load_plan(folder)


def generated(model, batch, seed):
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model.generate(
            torch.randint(1, 200, (batch, 5)), max_new_tokens=21, min_new_tokens=21, do_sample=False, pad_token_id=0,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip


def test_the_report_says_where_steps_run_in_segments(plan):
    by_call = {}
    for piece in plan.report.shapes.pieces:
        by_call.setdefault(piece.call, set()).update(point.in_segments for point in piece.points if not point.reason)
    assert by_call["decode"] == {True} and by_call["prefill"] == by_call["static decode"] == {False}


def test_a_loaded_plan_replays_segments_and_gives_the_same_bits(plan):
    model, kwargs = qwen2()
    loaded, recorder = describe_live(model, (), kwargs), FakeRecorder()
    fused = apply_plan(loaded, plan)
    fused.graphs = Graphs(recorder)
    restore_shapes(fused, loaded, plan)
    with torch.no_grad(), fused:
        fused.graphs.is_on = False
        expected = {batch: generated(model, batch, batch) for batch in (2, 3)}
        launches = fused.launches
        assert launches > 0 and recorder.recorded == 0
        fused.graphs.is_on = True
        for batch in (2, 3, 2):
            found = generated(model, batch, batch)
            assert torch.equal(found.sequences, expected[batch].sequences)
            assert all(torch.equal(left, right) for left, right in zip(found.logits, expected[batch].logits, strict=True))
        assert all(recording.launches > 4 for recording in fused.graphs.recordings)  # kernels of ours that a step replays
        assert sum(recording.replays for recording in fused.graphs.recordings) > 40
        cut = sum(isinstance(recording, SegmentedRecording) for recording in fused.graphs.recordings)
        assert cut and len(fused.graphs.recordings) == cut + 1  # the first prompt came twice: its prefill is a graph too
        assert recorder.recorded == 3 * cut + 1 and fused.graphs.refusals == {}
        assert fused.fallbacks == {}
