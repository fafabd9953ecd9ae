"""``--quick`` on a simulated machine: own times choose, and the step says whether all of it together pays."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from fusion_advisor.fuse.decide.choose import _tell
from fusion_advisor.fuse.decide.instruments import MEASURED, Instruments
from fusion_advisor.fuse.decide.keep_rule import decide
from fusion_advisor.fuse.decide.quick import UNPROVEN, decide_quickly, on_top_quickly
from fusion_advisor.fuse.decide.step_runner import StepRunner
from fusion_advisor.fuse.plan.options import ApplyOptions
from fusion_advisor.records import Status
from fusion_advisor.timing.interleaving import Difference
from tests.fuse.decide.test_keep_rule import STEP_NS, Machine, candidates


def own(ns):
    return Difference(median_ns=ns, low_ns=ns - 100, high_ns=ns + 100)


def quickly(clock, effects, alone, **options):
    machine = Machine(clock, effects, noise=0.001)
    found = decide_quickly(
        machine, candidates(effects), min_gain=0.005, confidence=0.95, budget_s=9.0,
        alone={name: own(ns) for name, ns in alone.items()}, **options,
    )  # fmt: skip
    return found, machine


def test_what_saves_by_its_own_times_stays_and_the_step_is_timed_twice(clock):
    effects = {"fast": -60_000, "slow": 30_000, "unknown": -5_000}
    found, machine = quickly(clock, effects, {"fast": -55_000, "slow": 20_000})
    assert {name: one.status for name, one in found.verdicts.items()} == {
        "fast": Status.KEPT, "slow": Status.WITHIN_NOISE, "unknown": Status.KEPT,
    }  # fmt: skip
    assert found.before.median_ns - found.after.median_ns == pytest.approx(65_000, rel=0.3)
    assert found.untouched_ns == pytest.approx(STEP_NS, rel=0.2)
    assert machine.runs <= 2 * (1 + 2 * 20)
    for verdict in found.verdicts.values():
        assert UNPROVEN in verdict.reason and verdict.step_delta_ns is None
    assert found.verdicts["fast"].reason.startswith("by its own times −55.0 µs per step; with all others")
    assert found.verdicts["unknown"].reason.startswith("not timed by itself")


@pytest.mark.parametrize(("effect", "status"), [(60_000, Status.SLOWER), (0, Status.WITHIN_NOISE)])
def test_nothing_stays_where_the_step_is_no_faster_with_all_of_it(clock, effect, status):
    found, _ = quickly(clock, {"a": effect, "b": 0}, {"a": -50_000 if effect else -2_000, "b": -1_000})
    assert {one.status for one in found.verdicts.values()} <= {status, Status.TOO_LITTLE}
    assert found.after == found.before


def test_a_gain_that_nobody_timed_by_itself_is_shown_without_a_figure(clock):
    found, _ = quickly(clock, {"a": -60_000, "b": -50_000}, {"a": -60_000, "b": -50_000})
    told = []
    _tell(candidates({"a": 0, "b": 0}), found, [], SimpleNamespace(found=told.append))
    assert told == ["a", "b"]
    timed = replace(found.verdicts["a"], delta_ns=-60_000, interval_ns=(-61_000, -59_000), is_timed=True)
    _tell(candidates({"a": 0}), replace(found, verdicts={"a": timed}), [], SimpleNamespace(found=told.append))
    assert told[2] == "a: −60.0 µs [−61.0, −59.0] µs per step"


def test_own_times_decide_where_the_step_cannot_tell(clock):
    found, _ = quickly(clock, {"a": 0}, {"a": -50_000})
    assert found.verdicts["a"].status is Status.KEPT


@pytest.mark.parametrize(("effect", "status"), [(-60_000, Status.KEPT), (60_000, Status.SLOWER)])
def test_one_more_rewrite_is_timed_for_a_moment(clock, effect, status):
    machine = Machine(clock, {"more": effect}, noise=0.001)
    runner = StepRunner(machine)
    before, after = runner.plain(()), runner.plain(candidates({"more": 0}))
    found = on_top_quickly(runner, before, after, name="more", min_gain=0.005, confidence=0.95, budget_s=9.0)
    assert (found.id, found.status) == ("more", status) and UNPROVEN in found.reason
    untimed = on_top_quickly(runner, before, after, name="x", min_gain=0.005, confidence=0.95, budget_s=9.0, is_timed=False)
    assert untimed.status is Status.KEPT and not untimed.is_timed


def test_an_effort_changes_our_own_rule_and_no_planted_one():
    assert MEASURED.with_effort("usual") is MEASURED.with_effort("thorough") is MEASURED
    assert MEASURED.decide is decide and MEASURED.with_effort("quick").decide is decide_quickly
    planted = Instruments(decide=test_an_effort_changes_our_own_rule_and_no_planted_one)
    assert planted.with_effort("quick").decide is planted.decide
    assert planted.with_effort("quick").on_top is on_top_quickly


def test_efforts_differ_in_time_and_peers():
    assert ApplyOptions(effort="thorough").decide_s("cuda") == 3 * ApplyOptions().decide_s("cuda")
    assert ApplyOptions(effort="quick").measures_compile is False
    assert ApplyOptions().measures_compile is None
    assert ApplyOptions(effort="quick", compile=True).measures_compile is True
