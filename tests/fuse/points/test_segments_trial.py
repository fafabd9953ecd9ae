"""A call on a growing cache is timed launch by launch and in segments, and is served in the faster way."""

from __future__ import annotations

import pytest
import torch

from fusion_advisor.fuse.decide.instruments import Instruments
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.fuse.plan.progress import Progress
from fusion_advisor.fuse.plan.size_ranges import read_shapes
from fusion_advisor.fuse.points.decide import Decided, RangeWork, timed
from fusion_advisor.fuse.points.segments_trial import in_segments
from fusion_advisor.fuse.points.time_limit import TimeLimit
from fusion_advisor.fuse.shapes.pieces import PieceFinder, Served
from fusion_advisor.fuse.shapes.ranged_calls import ranged_calls
from fusion_advisor.fuse.shapes.sized_fusion import Workpiece
from fusion_advisor.records import Bandwidth, ShapePoint
from fusion_advisor.runtime.torch_internals import module_call
from fusion_advisor.timing.host_timer import WallTimer
from fusion_advisor.verify.known.passed_checks import PassedChecks
from fusion_advisor.workload.load import describe_live
from tests.fuse.cuda_graph.fake_graph import FakeRecorder
from tests.fuse.cuda_graph.growing import RANGES
from tests.tiny import cache_in, qwen2

SIZES = {"batch": 2, "cached": 9}


class Planted(WallTimer):
    """A call in segments takes what is planted, any other 1,000 ns."""

    def __init__(self, recorder, segmented_ns):
        self.recorder, self.segmented_ns = recorder, segmented_ns

    def time_ns(self, call):
        before = self.recorder.replayed
        call()
        return self.segmented_ns if self.recorder.replayed > before else 1000


class Work(RangeWork):
    """Work with a recorder that needs no GPU."""

    planted = None

    @property
    def recorder(self):
        return self.planted


@pytest.fixture
def work():
    torch.compiler.reset()
    model, kwargs = qwen2()
    loaded = describe_live(model, (), kwargs)
    call = next(one for one in ranged_calls(loaded, read_shapes(RANGES)) if one.name == "decode")
    with torch.no_grad():
        yield Work(
            loaded=loaded, options=ApplyOptions(shapes=read_shapes(RANGES), compile=False), ranged=call,
            bandwidth=Bandwidth(copy_bytes_per_s=1e10, launch_ns=1000), progress=Progress(), instruments=Instruments(),
            original=module_call.original_call(model), limit=TimeLimit(), passed=PassedChecks(), pads=True,
        )  # fmt: skip


def first_piece(work):
    piece = PieceFinder(work.ranged.ranges, work.capture).next()
    point = Decided(served=Served(sizes=SIZES, module=piece.opened.region.graph), row=ShapePoint(sizes=tuple(SIZES.items())))
    return Workpiece(piece), point


@pytest.mark.parametrize(("segmented_ns", "is_kept"), [(500, True), (2000, False), (None, False)])
def test_segments_stay_where_they_are_faster(work, segmented_ns, is_kept):
    recorder = FakeRecorder()
    work.planted = None if segmented_ns is None else recorder
    work.instruments = Instruments(timer=Planted(recorder, segmented_ns))
    workpiece, point = first_piece(work)
    found = timed(work, workpiece, point.in_segments(is_on=True))  # as it was at the point that it was taken over from
    assert found.served.in_segments is found.row.in_segments is is_kept
    assert found.row.ours.median_ns == (500 if is_kept else 1000) and found.row.eager.median_ns == 1000
    assert (recorder.recorded > 0) is (segmented_ns is not None)


def test_without_a_clock_segments_stay(work):
    work.options = ApplyOptions(shapes=read_shapes(RANGES), compile=False, keep="verified")
    found = timed(work, *first_piece(work))
    assert found.row.in_segments and found.served.in_segments and found.row.ours is None


def test_what_is_timed_gives_the_same_bits_and_leaves_no_recording(work):
    workpiece, point = first_piece(work)
    opened, recorder = workpiece.opened, FakeRecorder()
    args, kwargs = work.ranged.at(SIZES)
    before = [(layer.keys, layer.values) for layer in cache_in(kwargs).layers]

    def run(call):
        for layer, (keys, values) in zip(cache_in(kwargs).layers, before, strict=True):
            layer.keys, layer.values = keys, values
        return call(*args, **kwargs).logits

    expected = run(opened.live.compiled.call)
    with in_segments(
        opened.region.route, opened.live.compiled.call, point.served.module, opened, (args, kwargs), recorder
    ) as way:
        assert all(torch.equal(run(way), expected) for _ in range(4))
        assert recorder.recorded == 3 and recorder.replayed == 3 * 4
    with in_segments(opened.region.route, opened.live.compiled.call, point.served.module, opened, (args, kwargs), None) as way:
        assert way is None
