"""What the report says of the device's clocks, and that it always says something."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from fusion_advisor.records import EAGER, OURS, Baseline, Clocks, ClockSample
from fusion_advisor.records.serialize import dump_report, load_report
from fusion_advisor.report import background_rows, clocks, quality
from fusion_advisor.report.baseline_rows import prediction_line
from fusion_advisor.report.compare.comparison import compare
from fusion_advisor.report.html.page import render_html
from fusion_advisor.report.markdown import render_markdown
from fusion_advisor.report.terminal.result import details
from tests.report.fixtures import applied, on_cpu, profiled


def sample(mhz=1980, *reasons, **more):
    known = {"memory_mhz": 3201, "temperature_c": 45, "power_mw": 512_400, "power_limit_mw": 700_000}
    return ClockSample(sm_mhz=mhz, reasons=reasons, **{**known, **more})


def with_clocks(report, eager, ours=None, /, **peers):
    def timed(step, seen):
        return None if step is None else replace(step, wall=replace(step.wall, clocks=seen))

    rows = tuple(Baseline(name=name, step=timed(report.before, seen)) for name, seen in peers.items())
    return replace(report, before=timed(report.before, eager), after=timed(report.after, ours), baselines=rows)


def sentences(report, *, bad):
    return [text for is_bad, text in clocks.rows(report) if is_bad is bad]


def test_steady_clocks_are_told_and_warn_of_nothing():
    report = with_clocks(applied(), Clocks(samples=(sample(), sample(1965, temperature_c=47))), Clocks(samples=(sample(),)))
    (told,) = sentences(report, bad=False)
    assert "eager SM 1,965 to 1,980 MHz, memory 3,201 MHz, 45 to 47 °C, 512 W, power limit 700 W (2 readings)" in told
    assert "ours SM 1,980 MHz" in told
    assert sentences(report, bad=True) == []
    assert told in quality.verdict(report)[1]


def test_a_reason_that_holds_the_clock_down_is_a_warning_with_its_counts():
    hot = Clocks(samples=(sample(1980, "gpu_idle"), sample(1900, "sw_power_cap"), sample(1900, "sw_power_cap")))
    cool = Clocks(samples=(sample(1980, "gpu_idle", "applications_clocks_setting"),))
    report = with_clocks(applied(), hot, cool, other=Clocks(samples=(sample(1975, "hw_thermal_slowdown"),)))
    power, heat = sentences(report, bad=True)[:2]
    assert power.endswith("by its power limit: eager in 2 of 3 readings.")
    assert heat.endswith("by its temperature (hardware): other in 1 of 1 reading.")
    assert quality.verdict(report)[0] == "warn"


@pytest.mark.parametrize(("mhz", "is_said"), [(1980, False), (1921, False), (1920, True), (2060, True)])
def test_sides_whose_clocks_differ_are_told(mhz, is_said):
    report = with_clocks(applied(), Clocks(samples=(sample(mhz),)), Clocks(samples=(sample(1980),)))
    found = [text for text in sentences(report, bad=True) if "differed" in text]
    assert bool(found) is is_said
    if found:
        assert f"between ours (1,980 MHz) and eager ({mhz:,} MHz)" in found[0]


def test_a_baseline_is_compared_with_ours():
    seen = {"torch.compile default": Clocks(samples=(sample(1700),)), OURS: Clocks(samples=(sample(100),))}
    report = with_clocks(applied(), Clocks(samples=(sample(),)), Clocks(samples=(sample(),)), **seen)
    (found,) = sentences(report, bad=True)  # the rows of eager and ours are the report's own sides
    assert "between ours (1,980 MHz) and torch.compile default (1,700 MHz)" in found
    assert EAGER not in found


def test_several_that_differ_and_all_that_are_held_down_are_one_sentence_each():
    slow = Clocks(samples=(sample(1700, "sw_power_cap"),))
    others = {"Liger": slow, "torch.compile default": Clocks(samples=(sample(1800, "sw_power_cap"),))}
    report = with_clocks(applied(), slow, Clocks(samples=(sample(1980, "sw_power_cap"),)), **others)
    power, clock = sentences(report, bad=True)
    assert power.endswith("by its power limit: every way to run the step, in 1 of 1 reading.")
    assert "from ours (1,980 MHz), which explains part of the times: eager −14.1%, Liger −14.1%, torch.compile default" in clock


def test_one_step_slower_than_the_rest_does_not_move_the_median():
    assert Clocks(samples=tuple(sample(mhz) for mhz in (1980, 300, 1980))).sm_mhz == 1980
    assert Clocks(samples=(ClockSample(),)).sm_mhz is None


def test_silence_is_a_sentence():
    assert clocks.rows(on_cpu()) == [(False, "Clocks: none are read on a CPU.")]
    assert "holds none" in clocks.rows(profiled())[0][1]
    missing = with_clocks(profiled(), Clocks(missing="libnvidia-ml.so.1 cannot be loaded here"))
    assert "not read (libnvidia-ml.so.1 cannot be loaded here)" in clocks.rows(missing)[0][1]
    assert dict(background_rows.environment_rows(missing))["Clocks while timed"].startswith("not read (libnvidia-ml.so.1")
    mute = with_clocks(profiled(), Clocks(samples=(ClockSample(),)))
    assert "NVML returned nothing (1 reading)" in clocks.rows(mute)[0][1]


def test_every_view_shows_them():
    report = with_clocks(applied(), Clocks(samples=(sample(1700, "sw_power_cap"),)), Clocks(samples=(sample(),)))
    for text in (render_html(report), render_markdown(report)):
        assert "SM 1,700 MHz" in text and "throttled" in text and "Clocks while eager was timed" in text
    console = Console(file=io.StringIO(), width=200, color_system=None)
    with console.capture() as printed:
        console.print(details(report, console))
    assert "throttled" in printed.get() and "SM 1,700 MHz" in printed.get()


def test_two_runs_at_different_clocks_carry_a_caveat():
    fast, slow = (with_clocks(profiled(), Clocks(samples=(sample(mhz),))) for mhz in (1980, 1400))
    assert "The SM clock differed by 29.3% between A (1,980 MHz) and B (1,400 MHz)" in " ".join(
        compare(fast, slow, "eager", "eager").caveats
    )
    assert not [text for text in compare(fast, fast, "eager", "eager").caveats if "SM clock" in text]


def test_reports_written_before_clocks_still_load():
    report = with_clocks(applied(), Clocks(samples=(sample(1900, "sw_power_cap"),)), Clocks(missing="no driver"))
    assert load_report(dump_report(report)) == report

    def without(node):
        if isinstance(node, dict):
            return {name: without(value) for name, value in node.items() if name != "clocks"}
        return [without(item) for item in node] if isinstance(node, list) else node

    old = load_report(json.dumps(without(json.loads(dump_report(report)))))
    assert old.before.wall is not None and old.before.wall.clocks is None


def test_predictions_say_what_the_power_limit_leaves_of_savings():
    said = "the step feels 61.5% of a copy's time and 20.0% of a short launch's"
    assert said in prediction_line(replace(applied(), copy_cost_share=0.615, short_launch_cost_share=0.2))
    assert "power limit" in prediction_line(replace(applied(), short_launch_cost_share=0.2))
    assert "power limit" not in prediction_line(applied())
