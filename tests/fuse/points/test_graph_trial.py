"""A call is timed launch by launch and in CUDA graphs: in one of the whole call, or in segments on a growing cache."""

from __future__ import annotations

import pytest
import torch

from fusion_advisor.fuse.cuda_graph.recording import CudaRecorder
from fusion_advisor.fuse.cuda_graph.replay import Graphs
from fusion_advisor.fuse.decide.instruments import Instruments
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.fuse.plan.progress import Progress
from fusion_advisor.fuse.plan.size_ranges import read_shapes
from fusion_advisor.fuse.points.decide import MOST_FIRST_USE_NS, Decided, RangeWork, timed
from fusion_advisor.fuse.points.graph_trial import in_graphs
from fusion_advisor.fuse.points.time_limit import TimeLimit
from fusion_advisor.fuse.shapes.pieces import PieceFinder, Served
from fusion_advisor.fuse.shapes.ranged_calls import RangedCall, ranged_calls
from fusion_advisor.fuse.shapes.sized_fusion import Workpiece
from fusion_advisor.records import Bandwidth, ShapePoint
from fusion_advisor.runtime.torch_internals import module_call
from fusion_advisor.timing.host_timer import WallTimer
from fusion_advisor.timing.interleaving import CannotRecord
from fusion_advisor.verify.known.passed_checks import PassedChecks
from fusion_advisor.workload.load import describe_live
from tests.fuse.cuda_graph.fake_graph import FakeRecorder
from tests.fuse.cuda_graph.growing import RANGES
from tests.tiny import cache_in, qwen2

SIZES = {"batch": 2, "cached": 9}


class Planted(WallTimer):
    """The original call takes 1,000 ns; launches of the rewritten graph and replays what is planted."""

    def __init__(self, recorder, replayed_ns, launched_ns=1000):
        self.recorder, self.replayed_ns, self.launched_ns = recorder, replayed_ns, launched_ns
        self.route = None

    def time_ns(self, call):
        before, self.route.forward = self.recorder.replayed, None
        call()
        if self.recorder.replayed > before:
            return self.replayed_ns
        return 1000 if self.route.forward is None else self.launched_ns  # our ways put their graph into the route


class Prefill(RangedCall):
    """A call whose results may take no memory of a graph."""

    most_result_bytes = 0


class Work(RangeWork):
    """Work with a recorder that needs no GPU."""

    planted = None

    @property
    def recorder(self):
        return self.planted


def work_on(made, name, shapes=RANGES):
    """Work on one way to call a model."""
    torch.compiler.reset()
    model, args, kwargs = made
    loaded = describe_live(model, args, kwargs)
    asked = read_shapes(shapes)
    call = next(one for one in ranged_calls(loaded, asked) if one.name == name)
    return Work(
        loaded=loaded, options=ApplyOptions(shapes=asked, compile=False), ranged=call,
        bandwidth=Bandwidth(copy_bytes_per_s=1e10, launch_ns=1000), progress=Progress(), instruments=Instruments(),
        original=module_call.original_call(model), limit=TimeLimit(), passed=PassedChecks(), pads=True,
    )  # fmt: skip


@pytest.fixture
def work():
    model, kwargs = qwen2()
    with torch.no_grad():
        yield work_on((model, (), kwargs), "decode")


@pytest.fixture
def encoding():
    with torch.no_grad():
        yield work_on(
            (torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()).eval(), (torch.randn(5, 8),), {}), "", "batch=2..64"
        )


def first_piece(work, sizes=SIZES):
    piece = PieceFinder(work.ranged.ranges, work.capture).next()
    point = Decided(served=Served(sizes=sizes, module=piece.opened.region.graph), row=ShapePoint(sizes=tuple(sizes.items())))
    return Workpiece(piece), point


def plant(work, workpiece, replayed_ns, launched_ns=1000):
    """Plant a recorder and what calls take; returns the recorder."""
    work.planted = recorder = FakeRecorder()
    clock = Planted(recorder, replayed_ns, launched_ns)
    clock.route = workpiece.opened.region.route
    work.instruments = Instruments(timer=clock)
    return recorder


@pytest.mark.parametrize(("replayed_ns", "is_kept"), [(500, True), (2000, False)])
def test_segments_stay_where_they_are_faster(work, replayed_ns, is_kept):
    workpiece, point = first_piece(work)
    recorder = plant(work, workpiece, replayed_ns)
    found = timed(work, workpiece, point.in_segments(is_on=True))  # as it was at the point that it was taken over from
    assert found.served.in_segments is found.row.in_segments is is_kept and not found.row.in_graph
    assert found.row.ours.median_ns == (500 if is_kept else 1000) and found.row.eager.median_ns == 1000
    assert recorder.recorded > 0


def test_without_cuda_graphs_launches_are_timed(work):
    workpiece, point = first_piece(work)
    recorder = plant(work, workpiece, 500)
    work.planted = None
    found = timed(work, workpiece, point)
    assert found.row.ours.median_ns == 1000 and not found.row.in_segments and not found.row.in_graph and recorder.recorded == 0


@pytest.mark.parametrize(
    ("replayed_ns", "launched_ns", "in_graph", "reason"),
    [
        (500, 1200, True, ""),
        (500, 1000, True, ""),
        (1100, 900, False, ""),
        (1500, 2000, True, "the original ops take 1.00 µs, ours 1.50 µs"),
        (500, 1001 + MOST_FIRST_USE_NS, True, "a first use is launched"),
    ],
)
def test_a_call_that_one_graph_serves_is_timed_as_its_replay(encoding, replayed_ns, launched_ns, in_graph, reason):
    workpiece, point = first_piece(encoding, {"batch": 4})
    recorder = plant(encoding, workpiece, replayed_ns, launched_ns)
    found = timed(encoding, workpiece, point)
    assert recorder.recorded == 1
    assert found.row.in_graph is in_graph and not found.row.in_segments and not found.served.in_segments
    assert found.row.ours.median_ns == (replayed_ns if in_graph else launched_ns)
    assert found.row.reason.startswith(reason) and bool(found.row.reason) is bool(reason)


def test_a_call_that_cannot_be_recorded_is_timed_launch_by_launch_with_the_reason(encoding, recwarn):
    workpiece, point = first_piece(encoding, {"batch": 4})
    plant(encoding, workpiece, 500, 900).fails = CannotRecord("the driver says no")
    found = timed(encoding, workpiece, point)
    assert not found.row.in_graph and found.row.ours.median_ns == 900 and not found.row.reason
    ((name, why),) = found.row.dropped
    assert name == "cuda-graph" and why.startswith("the driver says no")


def test_a_graph_that_would_be_too_large_is_said_to_be(encoding):
    encoding.options = ApplyOptions(shapes=read_shapes("batch=2..64"), compile=False, graph_bytes=100)
    workpiece, point = first_piece(encoding, {"batch": 4})
    recorder = plant(encoding, workpiece, 500, 900)
    found = timed(encoding, workpiece, point)
    assert recorder.recorded == 0 and not found.row.in_graph and found.row.ours.median_ns == 900
    assert found.row.dropped == (("cuda-graph", "it would hold 384 B, and all graphs together may hold 100 B"),)


def test_results_that_are_too_large_for_a_graph_are_launched_without_a_word(encoding, recwarn):
    encoding.ranged = Prefill(dims=encoding.ranged.dims, ranges=encoding.ranged.ranges, args=encoding.ranged.args)
    workpiece, point = first_piece(encoding, {"batch": 4})
    recorder = plant(encoding, workpiece, 500, 900)
    found = timed(encoding, workpiece, point)
    assert recorder.recorded == 0 and not found.row.in_graph and found.row.ours.median_ns == 900 and found.row.dropped == ()
    assert not recwarn.list


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
    with in_graphs(opened, point.served.module, work.ranged, (args, kwargs), Graphs(recorder)) as way:
        assert all(torch.equal(run(way), expected) for _ in range(4))
        assert recorder.recorded == 3 and recorder.replayed == 3 * 4
    with in_graphs(opened, point.served.module, work.ranged, (args, kwargs), None) as way:
        assert way is None


def test_a_whole_call_that_is_timed_copies_its_inputs_in_and_its_results_out(encoding):
    workpiece, point = first_piece(encoding, {"batch": 4})
    recorder = FakeRecorder()
    args, kwargs = encoding.ranged.at({"batch": 4})
    expected = workpiece.opened.live.compiled.call(*args, **kwargs)
    with in_graphs(workpiece.opened, point.served.module, encoding.ranged, (args, kwargs), Graphs(recorder)) as way:
        results = [way(*args, **kwargs) for _ in range(4)]
        assert way.is_recorded and recorder.recorded == 1 and recorder.replayed == 3
        (recording,) = way.region.graphs.recordings
        assert len(recording.copies) == 1
    assert all(torch.equal(one, expected) for one in results)
    assert len({one.data_ptr() for one in results}) == 4
    assert not way.is_recorded


@pytest.mark.gpu
def test_a_call_that_waits_for_python_is_timed_as_its_replay_and_its_graph_is_freed():
    layers = [layer for _ in range(24) for layer in (torch.nn.Linear(64, 64), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers).eval().cuda()
    with torch.no_grad():
        work = work_on((model, (torch.randn(5, 64, device="cuda"),), {}), "", "batch=2..64")
        work.planted = recorder = CudaRecorder()
        workpiece, point = first_piece(work, {"batch": 4})
        found = timed(work, workpiece, point)
    assert found.row.in_graph and found.row.ours.ci_high_ns < found.row.eager.ci_low_ns and not found.row.reason
    assert recorder.pool_bytes() == 0
