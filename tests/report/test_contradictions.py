"""Every committed report in every view: the headline, the waterfall's ends and the tables name the same figures."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html import unescape

import pytest
from rich.console import Console

from fusion_advisor import units
from fusion_advisor.fuse.passes.registry import REWRITES
from fusion_advisor.records import Report, Status
from fusion_advisor.records.serialize import dump_report, read_report
from fusion_advisor.report import baseline_rows, first_screen, shared_rows
from fusion_advisor.report.headline import headline, kept_count
from fusion_advisor.report.html.page import render_html
from fusion_advisor.report.html.waterfall import waterfall
from fusion_advisor.report.markdown import render_markdown
from fusion_advisor.report.terminal.result import result_table
from tests.report.fixtures import ALL, EXAMPLES, applied, on_cpu

NAMES = [path.parent.name for path in EXAMPLES]


def views(report: Report) -> dict[str, str]:
    """Return the words of every view, without markup and with single spaces."""
    stream = io.StringIO()
    Console(file=stream, width=160, color_system=None, highlight=False, markup=False).print(
        result_table(report, Console(width=160))
    )
    page = re.sub(r"<(script|style)\b.*?</\1>", " ", render_html(report), flags=re.DOTALL)
    texts = {
        "terminal": stream.getvalue(),
        "markdown": render_markdown(report).replace("\\", "").replace("\u200b", "").replace("**", ""),
        "html": unescape(re.sub(r"<[^>]*>", " ", page)),
    }
    return {name: " ".join(text.split()) for name, text in texts.items()}


@pytest.fixture(scope="module", params=NAMES)
def shown(request: pytest.FixtureRequest) -> Iterator[tuple[Report, dict[str, str]]]:
    report = read_report(EXAMPLES[NAMES.index(request.param)])
    yield report, views(report)


def test_the_headline_is_the_waterfalls_ends_and_the_tables_rows(shown: tuple[Report, dict[str, str]]) -> None:
    report, texts = shown
    fall, pair = waterfall(report), shared_rows.step_pair(report)
    assert fall is not None and pair is not None
    before, after = (units.duration(timing.median_ns) for timing in pair[1:])
    assert (fall.rows[0].figure, fall.rows[-1].figure) == (before, after)
    assert f"{before} → {after} per step" in headline(report).text
    first = shared_rows.comparisons(report)[0]
    assert (first.before, first.after) == (before, after)
    ratio = units.speedup(shared_rows.speedup_bounds(*pair[1:])[0])
    assert headline(report).text.startswith(f"{ratio} faster than eager") and first.speedup.startswith(ratio)
    bars = {way.name: way.figure for way in first_screen.ways(report)}
    table = {row.name: row.wall for row in baseline_rows.baseline_rows(report)}
    assert (bars["eager"], bars["ours"]) == (table["eager"], table["ours"]) == (before, after)
    for text in texts.values():
        assert headline(report).text in text
        assert f"eager ({pair[0]}) {before}" in text and f"ours ({pair[0]}) {after}" in text
        assert all(point[1:] in text for point in headline(report).points)
    stored = json.loads(dump_report(report))
    assert (stored["before"]["wall"]["median_ns"], stored["after"]["wall"]["median_ns"]) == (
        pair[1].median_ns, pair[2].median_ns,
    )  # fmt: skip


def test_one_eager_time_a_section(shown: tuple[Report, dict[str, str]]) -> None:
    report, texts = shown
    assert report.before.wall is not None and report.launch_verdict is not None
    eager = units.duration(report.before.wall.median_ns)
    assert f"of its {eager}" in shared_rows.launch_line(report)
    other = units.duration(report.launch_verdict.wall_ns)
    for text in texts.values():
        assert f"its {eager} (idle" in text
        assert other == eager or f"its {other}" not in text


def test_no_view_calls_fusion_useless_where_something_was_kept(shown: tuple[Report, dict[str, str]]) -> None:
    report, texts = shown
    assert kept_count(report) > 0
    for text in texts.values():
        for denied in ("will not help", "Nothing was kept", "Nothing paid", "No rewrite was", "Nothing was applied"):
            assert denied not in text
    bound = report.launch_verdict
    assert bound is not None and report.after is not None and report.after.wall is not None
    line = shared_rows.launch_line(report)
    assert ("is below because" in line) is (report.after.wall.median_ns < bound.both_floor_ns)


def nothing_kept() -> Report:
    """A run whose rewrites were all removed: the model was left as it was."""
    report = applied()
    fusions = tuple(replace(row, status=Status.WITHIN_NOISE) if row.status is Status.KEPT else row for row in report.fusions)
    rewrites = tuple(replace(row, status=Status.WITHIN_NOISE) if row.status is Status.KEPT else row for row in report.rewrites)
    return replace(report, after=replace(report.before, label=shared_rows.UNCHANGED), fusions=fusions, rewrites=rewrites)


@pytest.mark.parametrize("report", [nothing_kept(), on_cpu()], ids=["unchanged", "on a CPU"])
def test_nothing_kept_never_stands_with_a_speedup(report: Report) -> None:
    assert kept_count(report) == 0
    for name, text in views(report).items():
        assert " faster than eager" not in text, name
        assert "fa.load_plan" not in text and "fusion-advisor export" not in text, name
    if shared_rows.is_unchanged(report):
        assert waterfall(report) is None
        assert [way.name for way in first_screen.ways(report)].count("ours") == 0
        assert shared_rows.comparisons(report) == ()


def test_kernels_that_can_be_installed_can_be_shipped_too() -> None:
    report = applied()
    install, ship = first_screen.next_steps(report)
    assert "fa.load_plan" in install.code and ship.code == f"fusion-advisor export fusion-runs/{report.run_id} --to fused_kernels"
    for name, text in views(report).items():
        assert name == "terminal" or ship.code in text, name
    rewrites_alone = replace(report, fusions=tuple(replace(row, chain_id="") for row in report.fusions))
    assert first_screen.next_steps(rewrites_alone) == (install,)  # a package holds kernels of chains
    assert first_screen.next_steps(replace(report, run_id=""))[1:] == ()


def test_commands_name_the_folder_that_holds_the_run() -> None:
    install, ship = first_screen.next_steps(replace(applied(), folder='my runs/"a"'))
    assert 'fa.load_plan("my runs/\\"a\\"")' in install.code
    assert ship.code == "fusion-advisor export 'my runs/\"a\"' --to fused_kernels"
    profiled = replace(applied(), status="profiled", folder="my runs/a")
    assert first_screen.next_steps(profiled)[0].code == "fusion-advisor apply 'my runs/a'"
    usual = replace(profiled, folder=f"fusion-runs/{profiled.run_id}")
    assert first_screen.next_steps(usual)[0].code == f"fusion-advisor apply {profiled.run_id}"
    kept_nowhere = first_screen.next_steps(replace(applied(), command=""))
    assert len(kept_nowhere) == 1 and "fa.load_plan(run_dir)" in kept_nowhere[0].code


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ("", ""), (" --drop-logits", ", drop_logits=True"), (" --memory-budget 0.8", ", memory_budget=0.8"),
        (" --memory-budget 0.8 --drop-logits --quick", ", memory_budget=0.8, drop_logits=True"),
        (" --memory-budget 0.8;import", ""), (" --memory-budget 1.0", ""),
    ],
    ids=["none", "no logits", "a budget", "both", "an edited file", "no budget"],
)  # fmt: skip
def test_what_a_training_run_kept_in_memory_is_in_the_call_that_is_copied(options, arguments):
    report = replace(ALL["trained"](), command=f"fusion-advisor apply gpt2 --phase train{options}")
    code = first_screen.next_steps(report)[0].code
    assert code.splitlines()[-1] == f'fused = fa.apply(model, inputs, phase="train"{arguments})'


@pytest.mark.parametrize("name", sorted(first_screen.NEED_LAYOUT))
def test_a_model_of_ones_own_is_laid_out_ahead_of_a_plan_that_needs_it(name: str) -> None:
    assert name in {rewrite.id for rewrite in REWRITES}
    report = applied()
    row = replace(report.rewrites[0], id=name, status=Status.KEPT, held_bytes=0)
    plain = replace(report, rewrites=tuple(one for one in report.rewrites if one.id not in first_screen.NEED_LAYOUT))
    for rewrites, is_needed in (
        ((row,), True),
        ((replace(row, held_bytes=8),), False),
        ((replace(row, status=Status.SLOWER),), False),
    ):
        step = first_screen.next_step(replace(plain, rewrites=(*plain.rewrites, *rewrites)))
        assert step is not None and ("fa.lay_out_weights(model)  #" in step.code) is is_needed
        assert step.code.index("import") < step.code.index("fa.apply(model")
