"""The baselines table, the words "just use torch.compile", warm-up and predictions, in every view."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from fusion_advisor.records import Status
from fusion_advisor.report import baseline_rows, first_screen, quality, shared_rows
from fusion_advisor.report.headline import headline
from fusion_advisor.report.html.page import render_html
from fusion_advisor.report.markdown import render_markdown
from fusion_advisor.report.terminal.result import result_table
from tests.report.fixtures import applied, baselines, beaten, timing
from tests.report.training.test_way_rows import CHECK


def every_view(report):
    stream = io.StringIO()
    Console(file=stream, width=200, color_system=None, highlight=False, markup=False).print(
        result_table(report, Console(width=200))
    )
    views = (stream.getvalue(), render_markdown(report), render_html(report))
    return [" ".join(text.replace("\\_", "_").replace("&#39;", "'").split()) for text in views]


@pytest.mark.parametrize("text", every_view(applied()), ids=("terminal", "markdown", "html"))
def test_every_view_shows_every_way_with_first_call_and_reason(text):
    for words in ("compile default", "compile reduce-overhead", "16.90 ms", "18.42 ms", "19.4 s"):
        assert words in text
    assert "Liger has no kernels for made-up" in text
    assert "1.09× faster than torch.compile reduce-overhead (95% CI 1." in text
    assert "3.8 s from the saved plan to the first fused step" in text
    assert "torch.compile's first call took 18.2 s" in text
    assert "Just use" not in text


def rested(report):
    """The same with each way timed after rests: ours 12, the others from 20 ms on."""
    rows = [
        row if row.step is None else replace(row, step=replace(row.step, rested=timing(after_ns)))
        for row, after_ns in zip(report.baselines, range(20_000_000, 30_000_000, 1_000_000), strict=False)
    ]
    rows = [replace(row, step=replace(row.step, rested=timing(12_000_000))) if row.name == "ours" else row for row in rows]
    before, after = (next(row.step.rested for row in rows if row.name == name) for name in ("eager", "ours"))
    return replace(
        report, baselines=tuple(rows), before=replace(report.before, rested=before), after=replace(report.after, rested=after)
    )


@pytest.mark.parametrize("text", every_view(rested(applied())), ids=("terminal", "markdown", "html"))
def test_every_view_shows_what_a_step_takes_after_a_rest(text):
    assert "After a rest" in text and "20.00 ms" in text and "12.00 ms" in text
    assert "ingle steps at full clock: 1.67× faster than eager (95% CI 1." in text


def test_steps_that_were_not_held_down_have_no_column_for_rests():
    assert all("full clock" not in text and "After a rest" not in text for text in every_view(applied()))
    assert not any(row.name == "Step, after a rest" for row in shared_rows.comparisons(applied()))
    (row,) = (row for row in shared_rows.comparisons(rested(applied())) if row.name == "Step, after a rest")
    assert (row.before, row.after) == ("20.00 ms", "12.00 ms")


@pytest.mark.parametrize("text", every_view(beaten()), ids=("terminal", "markdown", "html"))
def test_the_headline_says_when_torch_compile_is_the_better_choice(text):
    assert "Just use torch.compile (reduce-overhead): 13.00 ms per step (wall time), ours takes 15.52 ms." in text


@pytest.mark.parametrize(
    ("baseline", "compiled_ns", "tone", "sentences"),
    [
        ("eager", 16_900_000, "gain", ("1.19× faster than eager (95% CI 1.",)),
        (
            "compile",
            16_900_000,
            "gain",
            ("1.09× faster than torch.compile (reduce-overhead) (95% CI ", "16.90 ms → 15.52 ms per step"),
        ),
        ("both", 16_900_000, "gain", ("1.19× faster than eager ", ". 1.09× faster than torch.compile (reduce-overhead) ")),
        ("compile", 15_520_000, "warn", ("No measurable difference from torch.compile (reduce-overhead): 1.000×",)),
        ("both", 15_520_000, "warn", ("1.19× faster than eager ", ". No measurable difference from torch.compile ")),
        ("compile", 13_000_000, "warn", ("Just use torch.compile", "1.19× slower than torch.compile (reduce-overhead)")),
    ],
)
def test_the_headline_names_what_it_compares_with(baseline, compiled_ns, tone, sentences):
    report = replace(applied(), baseline=baseline, baselines=baselines(compiled_ns=compiled_ns))
    head = headline(report)
    assert head.tone == tone
    for text in (head.text, *every_view(report)):
        assert all(sentence in text for sentence in sentences), text
        assert ("than eager" in head.text) is (baseline != "compile")


def test_a_headline_without_a_time_of_torch_compile_says_so():
    head = headline(replace(applied(), baseline="compile", baselines=()))
    assert head.text.startswith("1.19× faster than eager ")
    assert head.text.endswith("There is no time of torch.compile to compare with.")


def test_a_mode_within_the_noise_of_ours_is_not_recommended():
    report = applied()
    near = replace(report, baselines=baselines(compiled_ns=15_510_000))
    assert baseline_rows.faster_compile(near) is None
    assert "Just use" not in headline(near).text


def test_torch_compile_is_recommended_too_where_nothing_of_ours_paid():
    report = applied()
    unchanged = replace(report, after=replace(report.before, label=shared_rows.UNCHANGED), baselines=baselines(13_000_000)[:4])
    head = headline(unchanged)
    assert head.text.startswith("Just use torch.compile (reduce-overhead): 13.00 ms per step (wall time). Nothing paid, ")
    assert head.tone == "warn"


def test_what_costs_it_is_named():
    assert baseline_rows.cost_line(applied()) == ""
    line = baseline_rows.cost_line(beaten())
    assert line.startswith(
        "torch.compile reduce-overhead is faster by 2.52 ms: ours spends 1.10 ms more in pointwise and reduction"
    )
    host = replace(beaten(), after=replace(beaten().after, categories=()))
    assert "the difference is the host's" in baseline_rows.cost_line(host)


def test_the_prediction_error_is_the_median_over_kept_rewrites():
    report = applied()
    errors = sorted((abs(1560 - 1480) / 1480, abs(1420 - 1390) / 1390, abs(75 - 60) / 60))
    assert baseline_rows.prediction_error(report) == (pytest.approx(errors[1]), 3)
    assert "by 5.4% (median of 3 kept rewrites)" in baseline_rows.prediction_line(report)
    unforeseen = replace(report, fusions=tuple(replace(fusion, predicted_saving_ns=0) for fusion in report.fusions))
    assert baseline_rows.prediction_error(unforeseen) == (1.0, 3)  # nothing was expected of two that saved something
    none = replace(
        report, rewrites=(), fusions=tuple(replace(fusion, status=Status.WITHIN_NOISE) for fusion in report.fusions[:3])
    )
    assert baseline_rows.prediction_error(none) is None and baseline_rows.prediction_line(none) == ""
    for text in every_view(report):
        assert "−1.56 ms" in text and "−75.0 µs" in text


def test_a_predictions_interval_stands_next_to_it_and_is_counted():
    report = applied()
    kept, older = report.fusions[:2]
    assert baseline_rows.predicted_interval(kept) == "[−1.69, −1.43] ms"
    assert baseline_rows.predicted_interval(older) == ""  # as in a report that was written before there were any
    assert baseline_rows.predicted_interval(replace(kept, predicted_saving_ns=None, chain_after=None)) == ""
    assert baseline_rows.prediction_coverage(report) == (1, 2)  # the folded constants saved less than their interval's lower end
    assert "; 1 of 2 lie within their 90% intervals" in baseline_rows.prediction_line(report)
    without = replace(
        report,
        fusions=tuple(replace(row, predicted_low_ns=None) for row in report.fusions),
        rewrites=tuple(replace(row, predicted_high_ns=None) for row in report.rewrites),
    )
    assert baseline_rows.prediction_coverage(without) is None and "intervals" not in baseline_rows.prediction_line(without)
    for text in every_view(report):
        assert "[−1.69, −1.43] ms" in text and "[−84.0, −66.0] µs" in text
    for text in every_view(without):
        assert "[−1.69, −1.43] ms" not in text


def test_steps_that_varied_are_named_with_what_is_doubtful_about_them():
    report = replace(applied(), baselines=baselines())
    assert quality.unsteady(report) == "" and not any("Uncertain" in row for row in quality.verdict(report)[1])
    assert report.after is not None
    wide, narrow = (timing(15_520_000, spread=spread, method="wall") for spread in (0.21, 0.19))  # to both sides together
    assert quality.unsteady(replace(report, after=replace(report.after, wall=narrow))) == ""
    varied = replace(report, after=replace(report.after, wall=wide))
    sentence = quality.unsteady(varied)
    assert sentence.startswith("Unstable timings, uncertain by more than 10%: ours 15.52 ms [13.89, 17.15] ms. Another run")
    assert sentence in quality.warnings(varied) and sentence in quality.verdict(varied)[1]


def test_a_headline_without_intervals_shows_none():
    report = applied()
    assert report.before.wall is not None and report.after is not None and report.after.wall is not None
    before, after = (
        replace(side, ci_low_ns=side.median_ns, ci_high_ns=side.median_ns) for side in (report.before.wall, report.after.wall)
    )
    plain = replace(report, before=replace(report.before, wall=before), after=replace(report.after, wall=after))
    assert headline(plain).text == "1.19× faster than eager: 18.42 ms → 15.52 ms per step (wall time)."
    assert [way.interval for way in first_screen.ways(plain) if way.name in ("eager", "ours")] == [None, None]
    assert all(way.interval for way in first_screen.ways(report))


def test_without_other_ways_there_is_no_table():
    report = replace(applied(), baselines=tuple(row for row in baselines() if row.name in ("eager", "ours")))
    assert baseline_rows.baseline_rows(report) == ()
    assert "torch.compile was not measured" in headline(report).points
    assert baseline_rows.best_peer(report) is None


def compiled_by(*rows):
    return replace(applied(), baselines=(*(row for row in baselines() if not row.name.startswith("torch.compile")), *rows))


def test_a_compiled_step_that_is_not_eagers_is_said_with_what_is_wrong():
    row = next(row for row in baselines() if row.name == "torch.compile default")
    wrong = replace(row, check=replace(CHECK, reason="its loss is 14.2, eager's 12.2"))
    report = compiled_by(replace(wrong, name="torch.compile slow", step=None, note="no memory"), wrong)
    for one in (report, replace(report, after=replace(report.after, label="unchanged"))):
        (said,) = (point for point in headline(one).points if "torch.compile" in point)
        assert row.step is not None and row.step.wall is not None
        taken = shared_rows.units.duration(row.step.wall.median_ns)
        assert said.startswith(f"torch.compile default takes {taken} and does not count")
        assert said.endswith("for it computes something else: its loss is 14.2, eager's 12.2")
        assert "was not measured" not in render_markdown(one)


def test_a_compiled_step_that_could_not_run_is_said_with_its_reason():
    row = next(row for row in baselines() if row.name == "torch.compile default")
    points = headline(compiled_by(replace(row, step=None, note="it took longer than 300 s"))).points
    assert "torch.compile default could not be measured: it took longer than 300 s" in points


def test_a_row_that_was_not_run_has_dashes_and_its_reason():
    row = next(row for row in baseline_rows.baseline_rows(applied()) if row.name == "Liger")
    assert (row.wall, row.first_call, row.memory) == ("–", "–", "–")
    own = next(row for row in baseline_rows.baseline_rows(applied()) if row.name == "ours")
    assert own.against == "1.000×" and own.wall == shared_rows.units.duration(timing(15_520_000).median_ns)


def test_the_row_of_the_step_names_the_clock_that_was_read() -> None:
    report = applied()
    assert shared_rows.comparisons(report)[0].name == "Step, wall clock"
    assert report.before.wall is not None
    by_cpu = replace(report, before=replace(report.before, wall=replace(report.before.wall, method="cpu_time")))
    assert shared_rows.comparisons(by_cpu)[0].name == "Step, CPU time"
