"""``fusion-advisor fleet`` as a user calls it, and its three reports."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser

import pytest

from fusion_advisor import units
from fusion_advisor.cli.app import main
from fusion_advisor.report.fleet.view import hours
from fusion_advisor.report.html.other_pages import render_fleet_html, render_fleet_markdown


@pytest.fixture
def folder(once, tmp_path):
    """A copy of the run, so that no trace is read again."""
    options, _, _ = once
    shutil.copytree(options.output, tmp_path / "fleet")
    return tmp_path / "fleet"


@pytest.mark.slow
def test_the_command_writes_its_reports_and_says_what_comes_next(once, folder, capsys):
    options, report, _ = once
    assert main(["fleet", options.patterns[0], "-o", str(folder), "--top", "30"]) == 0
    printed = capsys.readouterr().out
    assert f"{report.traces} traces of {report.jobs} jobs" in printed and "9 files could not be ranked" in printed
    assert re.search(r"next: fusion-advisor (apply|profile)", printed)
    assert {path.name for path in folder.iterdir()} == {"fleet.html", "fleet.json", "fleet.md", "parts"}
    assert json.loads((folder / "fleet.json").read_text())["schema"] == "fusion-advisor-fleet/1"


def test_json_alone_is_printed(once, folder, capsys):
    options, report, _ = once
    assert main(["fleet", options.patterns[0], "-o", str(folder), "--json", "--color", "never"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["gpu_hours"] == pytest.approx(report.gpu_hours)


def test_weights_scale_the_jobs(once, folder, tmp_path, capsys):
    options, report, _ = once
    rows = "".join(f'"{row.name}",{number + 1}\n' for number, row in enumerate(report.by_job))
    (tmp_path / "jobs.csv").write_text(f"job,gpu_hours\n{rows}")
    assert main(["fleet", options.patterns[0], "-o", str(folder), "--json", "--weights", str(tmp_path / "jobs.csv")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["gpu_hours"] == pytest.approx(sum(range(1, report.jobs + 1)))


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["fleet", "/nowhere/*.json"], 2, "no trace matches"),
        (["fleet", "x", "--address", "auto"], 2, "--engine ray"),
        (["fleet", "/nowhere/*.json", "--weights", "/nowhere/jobs.csv"], 9, "jobs.csv"),
    ],
)
def test_mistakes_are_answered(arguments, code, words, tmp_path, capsys):
    assert main([*arguments, "-o", str(tmp_path / "fleet")]) == code
    assert words in capsys.readouterr().err


def test_a_fleet_of_broken_traces_ends_with_their_count(tmp_path, capsys):
    (tmp_path / "a.json").write_text("{}")
    (tmp_path / "b.json").write_text("")
    assert main(["fleet", f"{tmp_path}/*.json", "-o", str(tmp_path / "fleet"), "--processes", "1"]) == 9
    said = capsys.readouterr()
    assert "2 files could not be ranked" in said.out and "not one of the files" in said.err


def test_every_view_has_the_same_figures(once):
    _, report, _ = once
    page, text = render_fleet_html(report), render_fleet_markdown(report, limit=1_000_000)
    first = report.chains[0]
    for view in (page, text):
        assert first.ops.split(" → ")[0] in view
        assert hours(first.gpu_hours) in view and units.share(first.share) in view
        assert hours(report.gpu_hours) in view
    assert len(render_fleet_markdown(report, limit=3000)) <= 3000


def test_names_of_others_are_text_in_the_page(once):
    _, report, _ = once
    page = render_fleet_html(report)
    assert "<script" not in page and "&lt;script&gt;alert(1)" in page
    tags = []

    class Seen(HTMLParser):
        def handle_starttag(self, tag, attrs):
            tags.append((tag, dict(attrs)))

    Seen().feed(page)
    assert not [attrs for _, attrs in tags if any(name.startswith("on") for name in attrs)]
    assert not [attrs["src"] for _, attrs in tags if "src" in attrs]
    assert not [attrs for _, attrs in tags if "style" in attrs]
