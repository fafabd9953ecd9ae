"""Copies that give values another layout stay where the step is no slower with them, and go for good where it is."""

from __future__ import annotations

import pytest
import torch

from fusion_advisor.capture.graph.layout_copies import kinds_of
from fusion_advisor.capture.graph.tracer import capture_regions
from fusion_advisor.capture.layout_trial import drop_layouts, settle_layouts
from fusion_advisor.timing.host_timer import step_timer
from fusion_advisor.timing.interleaving import Difference
from tests.capture.graph.test_contiguous_rows import SOUND, Speech

KIND = "contiguous-rows"


def live():
    with torch.no_grad():
        return capture_regions(Speech().eval(), (SOUND,), {})


def kinds(capture):
    return kinds_of(capture.regions[0].graph.graph)


def found(capture, change_ns, wanted=None):
    ran = []

    def planted(before, after, **_):
        ran.extend((before, after))
        before(), after()
        return Difference(median_ns=change_ns, low_ns=change_ns, high_ns=change_ns)

    return settle_layouts(capture, wanted, on_cuda=False, timer=step_timer(on_cuda=False), difference=planted), ran


@pytest.mark.parametrize(("change_ns", "is_kept"), [(-5, True), (0, True), (5, False)])
def test_what_makes_the_step_slower_goes(change_ns, is_kept):
    capture = live()
    (trial,) = found(capture, change_ns)[0].values()
    assert (trial.sites, trial.is_kept, trial.change.median_ns) == (1, is_kept, change_ns)
    assert kinds(capture) == ((KIND,) if is_kept else ())
    with torch.no_grad():
        region = capture.regions[0]
        torch.testing.assert_close(region.graph(*region.example_args)[0], Speech().eval()(SOUND))


def test_what_is_not_wanted_goes_untimed():
    capture = live()
    assert found(capture, -5, wanted=()) == ({}, [])
    assert kinds(capture) == ()


def test_rules_that_a_plan_kept_stay():
    capture = live()
    drop_layouts(capture, but=(KIND,))
    assert kinds(capture) == (KIND,)
    drop_layouts(capture)
    assert kinds(capture) == ()


def test_the_clock_answers_too():
    capture = live()
    (trial,) = settle_layouts(capture, None, on_cuda=False, timer=step_timer(on_cuda=False)).values()
    assert trial.change.low_ns <= trial.change.median_ns <= trial.change.high_ns
    assert trial.is_kept == bool(kinds(capture))
