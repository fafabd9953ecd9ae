"""Points that take over another's rewrites are checked at their own sizes; an answer comes when the time is over."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fusion_advisor.capture.graph.tracer import capture_regions
from fusion_advisor.capture.sizes.one_size import at_one_size
from fusion_advisor.codegen.cpp.backend import find_compiler
from fusion_advisor.fuse.apply_shapes import check_ranges, serve_shapes
from fusion_advisor.fuse.decide.instruments import MEASURED
from fusion_advisor.fuse.decide.session import Bench
from fusion_advisor.fuse.live.fused_model import FusedModel
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.fuse.plan.progress import Progress
from fusion_advisor.fuse.plan.size_ranges import read_shapes
from fusion_advisor.fuse.points.carry import carried, wrong_kernel
from fusion_advisor.fuse.points.decide import RangeWork
from fusion_advisor.fuse.points.in_full import decided
from fusion_advisor.fuse.points.piece_points import PiecePoints
from fusion_advisor.fuse.points.time_limit import TimeLimit
from fusion_advisor.fuse.shapes.sized_fusion import Workpiece
from fusion_advisor.ir.sized_program import NoOneProgram
from fusion_advisor.records import Bandwidth
from fusion_advisor.runtime.torch_internals import module_call
from fusion_advisor.verify.known.passed_checks import PassedChecks
from fusion_advisor.workload.load import describe_live
from tests.fuse.points.test_time_limit import Clock
from tests.fuse.shapes.test_graphs_of_ranges import Mlp

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="kernels of a CPU need a C++ compiler: apt-get install g++")

BANDWIDTH = Bandwidth(copy_bytes_per_s=1e10, launch_ns=1000)


class Noting(Progress):
    def __init__(self, clock=None, seconds=0.0):
        self.notes, self.clock, self.seconds = [], clock, seconds

    def note(self, text):
        self.notes.append(text)
        if self.clock is not None:
            self.clock.now_s += self.seconds

    def count(self, start):
        return sum(note.startswith(start) for note in self.notes)


def options_for(shapes="batch=2..64", **given):
    return ApplyOptions(shapes=read_shapes(shapes), compile=False, **{"keep": "verified", "effort": "quick", **given})


def ranged(maker=Mlp, progress=None, limit=None, args=None, **given):
    """A model that serves a range of its batch, with its record and the lines of progress."""
    torch.compiler.reset()
    torch.manual_seed(1)
    model, progress, args = maker().eval(), progress or Noting(), args or (torch.randn(5, 32),)
    live = capture_regions(model, args, {})
    fused = FusedModel(model, live.regions, Bench(live, on_cuda=False).build((), ()).modules, args, {})
    loaded, options = describe_live(model, args, {}), options_for(**given)
    calls = check_ranges(loaded, options)
    found, _ = serve_shapes(fused, loaded, options, calls, BANDWIDTH, progress, limit=limit)
    return fused.apply(), found, progress


def is_right(fused, rows):
    x = torch.randn(rows, 32)
    found, expected = fused(x), fused._original(x)
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_with_quick_one_point_is_decided_and_the_others_take_its_rewrites_over():
    with torch.no_grad():
        fused, found, progress = ranged()
        (piece,) = found.pieces
        small, large = piece.points
        assert large.carried_from == () and small.carried_from == large.sizes
        assert small.rewrites == large.rewrites and small.fusions == large.fusions and small.rel_l2 is not None
        assert progress.count("at batch=2, with what stays at batch=64") == 1 and progress.count("at batch=64") == 1
        assert all(is_right(fused, rows) for rows in (2, 3, 17, 64))
        assert fused.fallbacks == {}


def test_without_quick_each_point_is_decided():
    with torch.no_grad():
        _, found, progress = ranged(effort="usual")
    assert [point.carried_from for point in found.pieces[0].points] == [(), ()]
    assert progress.count("at batch") == 2 and not any("with what stays" in note for note in progress.notes)


def test_points_that_were_asked_for_are_decided():
    with torch.no_grad():
        _, found, _ = ranged(shape_points=((3,), (20,)))
    assert [(dict(point.sizes)["batch"], point.carried_from) for point in found.pieces[0].points] == [(3, ()), (20, ())]


@pytest.fixture
def point():
    """The work on a piece, the piece, and its largest point with rewrites."""
    torch.compiler.reset()
    torch.manual_seed(1)
    model, args = Mlp().eval(), (torch.randn(5, 32),)
    loaded, options = describe_live(model, args, {}), options_for()
    (call,) = check_ranges(loaded, options)
    work = RangeWork(
        loaded=loaded, options=options, ranged=call, bandwidth=BANDWIDTH, progress=Noting(), instruments=MEASURED,
        original=module_call.original_call(model), limit=TimeLimit(), passed=PassedChecks(),
    )  # fmt: skip
    with torch.no_grad():
        piece = call.finder(work.capture).next()
        workpiece = Workpiece(piece)
        one = decided(work, workpiece, {"batch": 64}, (), {})
        assert one.fusions and not one.row.reason
        yield work, workpiece, one


class WrongAt:
    """A kernel that leaves the last element out at one number of rows: its masked edge is wrong there."""

    def __init__(self, built, dims):
        self.built, self.dims, self.tuning = built, dims, built.tuning

    def bind(self, program):
        launch = self.built.bind(program)

        def without_its_end(*tensors):
            before = tensors[-1].view(-1)[-1].clone()
            launch(*tensors)
            tensors[-1].view(-1)[-1] = before

        return without_its_end if program.dims == self.dims else launch


def test_a_kernel_that_is_wrong_at_the_sizes_of_a_further_point_alone_does_not_stay_there(point):
    work, workpiece, one = point
    fusion = one.fusions[0]
    other = workpiece.program(
        fusion.planned.chain.sites[0].op_indices, fusion.planned.sites[0], model=fusion.planned.program
    ).at(workpiece.leaves((7,)))  # fmt: skip
    wrong = replace(fusion, built=WrongAt(fusion.built, other.dims))
    broken = replace(one, fusions=(wrong, *one.fusions[1:]))
    assert carried(work, workpiece, broken, {"batch": 9}).row.reason == ""
    refused = carried(work, workpiece, broken, {"batch": 7})
    assert fusion.planned.match.kernel in refused.row.reason and refused.served.module is None
    assert carried(work, workpiece, one, {"batch": 7}).row.reason == ""


def test_a_kernel_that_reads_other_tensors_than_the_graph_of_open_sizes_is_refused(point):
    """In a Mamba 2 with chunks a reshape copies where sizes are open, and shows the tensor before it at each of them."""
    _, workpiece, one = point
    planned = one.fusions[0].planned
    site = planned.sites[0]
    elsewhere = replace(site, inputs=(site.inputs[0] + 1, *site.inputs[1:]))
    members = planned.chain.sites[0].op_indices
    assert workpiece.program(members, site, model=planned.program)
    with pytest.raises(NoOneProgram, match="with open sizes it reads other tensors"):
        workpiece.program(members, elsewhere, model=planned.program)


def test_special_numbers_are_not_tried_again_at_a_further_point(point):
    work, workpiece, one = point
    passed = PassedChecks()
    given, written = work.graph_call(workpiece.opened, {"batch": 32})
    live = at_one_size(workpiece.opened, given, written)

    def calls_at(fusions):
        counts = []
        for fusion in fusions:
            built = Counting(fusion.built)
            counted = replace(fusion, built=built)
            assert wrong_kernel(workpiece, live, (counted,), (32,), work.options, passed, on_cuda=False) == ""
            counts.append(built.calls)
        return counts

    first, again = calls_at(one.fusions), calls_at(one.fusions)
    assert len(passed.keys) == len(one.fusions) and all(later < earlier for earlier, later in zip(first, again, strict=True))


class Counting:
    def __init__(self, built):
        self.built, self.tuning, self.calls = built, built.tuning, 0

    def bind(self, program):
        launch = self.built.bind(program)

        def counted(*tensors):
            self.calls += 1
            launch(*tensors)

        return counted


def test_a_point_at_which_they_do_not_pay_is_decided_in_full_while_there_is_time(point):
    work, workpiece, _ = point
    points = PiecePoints(work, workpiece.piece)
    points.decide()
    assert not points.may_decide_again
    points._found[0] = points._found[0].refused("the original ops take less")
    assert points.may_decide_again
    work.limit.limit_s = 0.0
    points.decide_again()
    assert points.in_order[0].row.reason == "the original ops take less"
    work.limit.limit_s = 1e9
    points.decide_again()
    assert points.in_order[0].row.reason == "" and points.in_order[0].row.carried_from == ()


def test_when_no_time_is_left_nothing_is_captured_and_the_answer_says_so():
    clock = Clock()
    limit = TimeLimit(10.0, clock)
    clock.now_s += 10.0
    with torch.no_grad():
        fused, found, progress = ranged(limit=limit)
        (piece,) = found.pieces
        assert piece.refusal == "not captured: the 10 s for all ranges were over" and progress.count("captured") == 0
        assert is_right(fused, 17)


def test_points_that_the_time_does_not_reach_run_the_original_ops():
    """A capture, a point in full and one that takes its rewrites over say one line each, and take three seconds here."""
    clock = Clock()
    with torch.no_grad():
        fused, found, _ = ranged(progress=Noting(clock, 3.0), limit=TimeLimit(10.0, clock), shapes="batch=2..512")
        small, middle, large = found.pieces[0].points
        assert large.reason == middle.reason == "" and middle.carried_from == large.sizes
        assert small.reason == "not decided: the 10 s for all ranges were over"
        assert all(is_right(fused, rows) for rows in (2, 17, 500))
    assert clock.now_s <= 5.0 + 10.0 + 3.0  # the last line tells how many points there are


def test_a_point_whose_time_ends_is_left_in_the_middle_of_its_trials():
    clock = Clock()
    with torch.no_grad():
        fused, found, _ = ranged(progress=Noting(clock, 6.0), limit=TimeLimit(10.0, clock))
        assert is_right(fused, 17)
    assert [point.reason.partition(":")[0] for point in found.pieces[0].points] == ["not decided", "not decided"]
    assert found.pieces[0].kernels == ()


def test_the_time_of_all_pieces_is_one():
    class Branches(Mlp):
        def forward(self, x):
            return super().forward(x) if x.shape[0] > 8 else super().forward(x) * 2.0

    clock = Clock()
    with torch.no_grad():
        fused, found, _ = ranged(Branches, Noting(clock, 3.0), TimeLimit(10.0, clock))
        assert all(is_right(fused, rows) for rows in (2, 8, 9, 64))
    assert len(found.pieces) == 2 and clock.now_s <= 5.0 + 10.0 + 3.0
    assert any("were over" in piece.refusal or any("were over" in one.reason for one in piece.points) for piece in found.pieces)
