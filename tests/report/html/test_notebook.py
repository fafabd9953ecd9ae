from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace

import pandas
import pytest

from fusion_advisor.errors import UsageError
from fusion_advisor.records import Report, Status
from fusion_advisor.report import shared_rows, tables
from fusion_advisor.report.headline import headline
from fusion_advisor.report.html.notebook import for_notebook
from tests.report.fixtures import ALL, applied, failed_numbers, hostile, profiled, real
from tests.report.html.test_page import Page


@pytest.mark.parametrize("make", [*ALL.values(), real])
def test_a_prompt_shows_what_the_terminal_shows(make: Callable[[], Report]) -> None:
    shown = str(for_notebook(make()))
    assert headline(make()).text.split(":")[0].split()[0] in shown
    assert "RenderedKernel" not in shown and "\x1b" not in shown
    assert max(map(len, shown.splitlines())) <= 120 and len(shown.splitlines()) < 120


def test_a_step_that_was_reverted_is_not_said_to_be_the_models() -> None:
    rows = tuple(replace(row, status=Status.NOT_REPLACED) for row in applied().fusions)
    report = replace(applied(), fusions=rows, rewrites=())
    assert headline(report).tone == "warn" and headline(report).text.startswith("The model was left as it was. The step with ")
    assert not headline(applied()).text.startswith("The model was left")


@pytest.mark.parametrize("make", [*ALL.values(), real])
def test_the_view_is_whole_html_that_runs_and_fetches_nothing(make: Callable[[], Report]) -> None:
    html = for_notebook(make())._repr_html_()
    page = Page(html)
    tags = {tag for tag, _ in page.seen}
    assert tags - {"style"} <= {
        "div",
        "p",
        "table",
        "caption",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "details",
        "summary",
        "b",
        "code",
    }
    assert {name for _, attrs in page.seen for name in attrs} <= {"class", "scope"}
    assert not re.search(r"url\(|@import|https?://", " ".join(page.raw["style"]))
    assert all(char not in html for char in ("\x1b", "\u202e"))
    assert len(html) < 60_000


def test_it_says_what_the_other_views_say() -> None:
    report = real()
    words = Page(for_notebook(report)._repr_html_()).words
    assert headline(report).text in words
    for row in shared_rows.comparisons(report):
        assert f"{row.before} {row.after} {row.change} {row.speedup}" in re.sub(r"\s+", " ", words)
    for fusion in report.fusions:
        assert fusion.kernel in words and fusion.reason in words
    assert shared_rows.VERDICTS[report.fusions[0].status].words in words


def test_a_profile_shows_its_chains_and_a_failure_comes_first() -> None:
    words = Page(for_notebook(profiled())._repr_html_()).words
    assert "Chains" in words and profiled().chains[0].ops[0] in words
    assert "The numbers changed" in Page(for_notebook(failed_numbers())._repr_html_()).words
    assert "<img" not in for_notebook(hostile())._repr_html_()


def test_the_colours_of_its_bars_can_be_told_from_white_and_black() -> None:
    style = " ".join(Page(for_notebook(applied())._repr_html_()).raw["style"])
    assert "background" not in style  # text keeps the page's own two colours
    colours = set(re.findall(r"border(?:-left)?(?:-color)?: (?:\dpx solid )?(#[0-9a-f]{6})", style))
    assert len(colours) == 4
    for colour in colours:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        light = sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
        assert 1.05 / (light + 0.05) >= 3 and (light + 0.05) / (0.0056 + 0.05) >= 3, colour  # white; Jupyter's #111111


@pytest.mark.parametrize("name", tables.NAMES)
def test_a_frame_holds_the_table_exactly(name: str) -> None:
    report = applied()
    table, frame = tables.table(report, name), for_notebook(report).to_frame(name)
    assert tuple(frame.columns) == table.columns
    assert len(frame) == len(table.rows)
    for at, row in enumerate(table.rows):
        for column, cell in zip(table.columns, row, strict=True):
            got = frame[column].iloc[at]
            assert pandas.isna(got) if cell is None else got == cell, (column, got, cell)


def test_whole_numbers_stay_whole_where_some_are_missing() -> None:
    frame = for_notebook(applied()).to_frame()
    assert str(frame["step_delta_ns"].dtype) == "Int64" and frame["step_delta_ns"].isna().any()
    assert str(frame["is_passed"].dtype) == "boolean"
    assert frame["fused_rel_l2"].isin([math.inf]).sum() == 1


def test_the_default_is_the_table_that_the_terminal_prints() -> None:
    assert list(for_notebook(applied()).to_frame()["id"]) == ["fold-constants", "drop-masks", "F1", "F2", "F3", "F4"]
    assert list(for_notebook(profiled()).to_frame()["id"]) == [chain.id for chain in profiled().chains]
    with pytest.raises(UsageError, match="no table `fusions`"):
        for_notebook(applied()).to_frame("fusions")


def test_a_report_at_a_prompt_is_one_line() -> None:
    assert repr(real()) == "<Report 20261121-095950-612776: 'Qwen/Qwen2.5-7B', applied, 7 chains>"
