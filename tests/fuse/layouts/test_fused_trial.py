"""A layout that loses without kernels is timed with the kernels of both, where its convolutions save enough and it may win."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch

from fusion_advisor.capture.graph.channels_last import ID, lay_channels_last
from fusion_advisor.capture.graph.layout_copies import kinds_of
from fusion_advisor.capture.graph.tracer import capture_regions
from fusion_advisor.capture.layout_trial import settle_layouts, without
from fusion_advisor.capture.profile import profile_as_it_is
from fusion_advisor.fuse.decide.choose import _not_kept, _of_layout
from fusion_advisor.fuse.decide.session import Bench
from fusion_advisor.fuse.layouts.fused_trial import Expected, FusedTrial, expected_of, second_look, settled, why_not
from fusion_advisor.fuse.plan.options import ApplyOptions, ProfileOptions
from fusion_advisor.fuse.plan.plan import make_plan
from fusion_advisor.records import Status
from fusion_advisor.timing.host_timer import step_timer
from fusion_advisor.timing.interleaving import Difference
from tests.capture.graph.test_channels_last import IMAGES, Net, NormedBlock, as_on_cuda
from tests.tiny import BANDWIDTH

CPU = torch.device("cpu")
TIMER = step_timer(on_cuda=False)
MS = 1_000_000


def planted(ns):
    return Difference(median_ns=ns, low_ns=ns - 1, high_ns=ns + 1)


def live():
    """A net in channels last whose norms return contiguous images."""
    with torch.no_grad():
        found = capture_regions(Net(block=NormedBlock).eval(), (IMAGES,), {})
    assert lay_channels_last(found.regions[0].graph, lambda _: True, as_on_cuda) == 7
    return found


class Traces:
    """Profiles steps, and says that each convolution takes so long and everything else 1 ms."""

    def __init__(self, convolution_ns):
        self.convolution_ns = convolution_ns
        self.is_laid_out = []

    def __call__(self, captured, bandwidth, device, *, traced_steps):
        is_laid_out = bool(kinds_of(captured.regions[0].graph.graph))
        self.is_laid_out.append(is_laid_out)
        capture = profile_as_it_is(captured, bandwidth, device, traced_steps=traced_steps)
        own = self.convolution_ns[is_laid_out]
        launches = [
            replace(one, duration_ns=own if ".conv" in capture.ops[one.op_index].target else MS)
            for one in capture.launches
            if one.op_index is not None
        ]
        return replace(capture, launches=tuple(launches))


class Clock:
    """Runs both steps and answers what it was given, call by call."""

    def __init__(self, *ns):
        self.ns = ns
        self.calls = 0

    def __call__(self, before, after, **_):
        before(), after()
        self.calls += 1
        return planted(self.ns[self.calls - 1])


def trial(traces, clock, notes):
    options = ApplyOptions(min_share=0.0, skip=("split-biases",))
    return FusedTrial(
        options=options, bandwidth=BANDWIDTH, device=CPU, timer=TIMER, note=notes.append, difference=clock, profile=traces
    )  # fmt: skip


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ((100, 50, 80), (140, 30, 60), ""),
        ((100, 50, 80), (140, 49, 60), "too little"),
        ((100, 50, 80), (140, 55, 60), "too little"),
        ((100, 50, 80), (140, 30, 80), "the rest loses more"),
    ],
)
def test_a_trial_takes_convolutions_that_save_and_a_step_that_may_win(before, after, reason):
    expected = [
        Expected(device_ns=one[0] * MS, convolutions_ns=one[1] * MS, fused_ns=one[2] * MS, most_saved_ns=0)
        for one in (before, after)
    ]
    assert (reason in why_not(*expected, 0.02)) if reason else why_not(*expected, 0.02) == ""


@pytest.mark.parametrize(
    ("found_ns", "is_recordable", "words"),
    [
        (2, True, "without any"),
        (2, False, "without any"),
        (-20 * MS, True, ""),
        (-22 * MS, True, "kernels save less than 21.00 ms"),
        (-22 * MS, False, ""),
    ],
)
def test_what_kernels_can_save_at_most_may_settle_it(found_ns, is_recordable, words):
    before = Expected(device_ns=100 * MS, convolutions_ns=50 * MS, fused_ns=80 * MS, most_saved_ns=21 * MS)
    reason = settled(planted(found_ns), before, is_recordable=is_recordable)
    assert (words in reason) if words else reason == ""


def test_what_is_expected_counts_chains_as_what_memory_needs():
    capture = Traces([2 * MS, 2 * MS])(live(), BANDWIDTH, CPU, traced_steps=1)
    plan = make_plan(capture, {}, min_share=0.0)
    found = expected_of(capture, plan)
    convolutions = sum("conv2d" in capture.ops[launch.op_index].target for launch in capture.launches)
    assert convolutions == 7 and found.convolutions_ns == 14 * MS
    assert found.device_ns == (14 + len(capture.launches) - 7) * MS
    assert found.fused_ns == found.device_ns - sum(one.chain.device_ns - one.chain.floor_ns for one in plan.fusions)
    assert found.convolutions_ns < found.fused_ns < found.device_ns
    in_cache = sum(one.chain.floor_ns // 2 for one in plan.fusions)
    launched = BANDWIDTH.launch_ns * sum(one.chain.launches for one in plan.fusions)
    assert found.most_saved_ns == pytest.approx(found.device_ns - found.fused_ns + in_cache + launched, abs=len(plan.fusions))


def test_the_other_step_has_no_copies_and_the_first_keeps_its_own():
    changed = live()
    unchanged = without(changed, ID)
    assert kinds_of(changed.regions[0].graph.graph) == (ID,) and not kinds_of(unchanged.regions[0].graph.graph)
    with torch.no_grad():
        (plain,) = capture_regions(Net(block=NormedBlock).eval(), (IMAGES,), {}).regions
    assert [str(node.target) for node in unchanged.regions[0].graph.graph.nodes] == [
        str(n.target) for n in plain.graph.graph.nodes
    ]
    Bench(unchanged, on_cuda=False)  # describes every op


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("fused_ns", "is_kept", "words"),
    [
        ((-MS, -5 * MS), True, "with the kernels of both layouts"),
        ((-MS, 5 * MS), False, "with the kernels of both layouts"),
        ((5 * MS,), False, "with its kernels against the step without any: the step became slower"),
        ((-500 * MS,), True, "with its kernels against the step without any, where kernels save less than"),
    ],
)
def test_kernels_of_both_layouts_decide_or_of_one_where_that_is_enough(fused_ns, is_kept, words):
    captured, notes, traces, clock = live(), [], Traces([5 * MS, MS]), Clock(*fused_ns)
    found = settle_layouts(
        captured, None, on_cuda=False, timer=TIMER, difference=Clock(7 * MS), second_look=trial(traces, clock, notes)
    )  # fmt: skip
    assert traces.is_laid_out == [False, True] and clock.calls == len(fused_ns)
    assert found[ID].is_kept is is_kept and found[ID].change.median_ns == 7 * MS
    assert found[ID].fused.change.median_ns == fused_ns[-1]
    assert kinds_of(captured.regions[0].graph.graph) == ((ID,) if is_kept else ())
    captured.layouts = found
    bench = Bench(captured, on_cuda=False)
    row = _of_layout(ID, bench) if is_kept else next(_not_kept(bench))
    assert row.status is (Status.KEPT if is_kept else Status.SLOWER)
    assert "+7.00 ms" in row.reason and "with it alone" in row.reason and words in row.reason
    assert notes == [f"layout: {found[ID].fused.reason}"] and ("expected" in notes[0]) == (len(fused_ns) == 2)
    with torch.no_grad():
        torch.testing.assert_close(
            captured.regions[0].graph(*captured.regions[0].example_args)[0],
            Net(block=NormedBlock).eval()(IMAGES),
            rtol=1e-4,
            atol=1e-5,
        )


def test_no_kernel_is_built_where_convolutions_save_nothing():
    notes, clock = [], Clock(-5)
    captured = live()
    captured.layouts = settle_layouts(
        captured, None, on_cuda=False, timer=TIMER, difference=Clock(7 * MS), second_look=trial(Traces([MS, MS]), clock, notes)
    )  # fmt: skip
    assert clock.calls == 0 and "too little" in notes[0] and not captured.layouts[ID].is_kept
    (row,) = _not_kept(Bench(captured, on_cuda=False))
    assert row.status is Status.SLOWER and "convolutions save 0 µs, too little: the step became slower" in row.reason


def test_layouts_that_win_without_kernels_get_no_second_look():
    def never(*_):
        raise AssertionError

    (found,) = settle_layouts(live(), None, on_cuda=False, timer=TIMER, difference=Clock(-1), second_look=never).values()
    assert found.is_kept and found.fused is None


def test_a_run_that_times_nothing_compares_nothing():
    def look(options, *, is_timed=True):
        return second_look(options, BANDWIDTH, CPU, None, print, None, is_timed=is_timed)

    assert look(ApplyOptions()) is not None
    assert look(ProfileOptions()) is None and look(ApplyOptions(dry_run=True)) is None
    assert look(ApplyOptions(), is_timed=False) is None
