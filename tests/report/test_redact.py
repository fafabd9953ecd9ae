from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fusion_advisor.records import GraphBreak, Report
from fusion_advisor.records.serialize import dump_report, load_report
from fusion_advisor.report.html.notebook import for_notebook
from fusion_advisor.report.html.page import render_html
from fusion_advisor.report.markdown import render_markdown
from fusion_advisor.report.redact import PARTS, has_source, redact
from fusion_advisor.report.tables import csv_text, tables
from tests.report.fixtures import applied, hostile, real, with_a_copy

SECRET = "/home/ada/secret project/model.py"  # a space: only a known path can be found whole
PLACES = ("/srv/ada/run.py", "~/ada/x", "C:\\ada\\m.py", "./ada/model.py:make", "ada_model.py", "../ada/lib.so", "/ada")


def with_paths() -> Report:
    """A report that names files wherever a text may."""
    report = applied()
    sites = tuple(replace(site, source_file=SECRET) for site in report.chains[0].sites)
    said = " and ".join(PLACES)
    fusion = report.fusions[1]
    return replace(
        report,
        command=f"fusion-advisor apply {SECRET}:make --kernels {PLACES[0]}",
        folder="ada-runs/secret project",
        workload=replace(report.workload, model_id=f"{PLACES[3]}"),
        chains=(replace(report.chains[0], sites=sites), *report.chains[1:]),
        quality=replace(report.quality, warnings=(said,), graph_breaks=(GraphBreak(reason=said, source=f"{SECRET}:7"),)),
        fusions=(report.fusions[0], replace(fusion, reason=f"see {SECRET}, ({PLACES[1]})"), *report.fusions[2:]),
        warnings=(said,),
        notes=(f"log at {PLACES[5]}.",),
    )


def every_view(report: Report) -> str:
    parts = [dump_report(report), render_html(report), render_markdown(report), for_notebook(report)._repr_html_()]
    return "\n".join([*parts, *map(csv_text, tables(report).values())])


def test_no_view_names_a_file() -> None:
    before, after = every_view(with_paths()), every_view(redact(with_paths(), ("paths",)))
    for secret in ("ada", "secret project"):
        assert secret in before and secret not in after
    assert "&lt;file 1&gt;" in after
    assert "Left out of this copy: names of files and folders." in after


def test_one_file_keeps_one_label_and_others_are_told_apart() -> None:
    shown = redact(with_paths(), ("paths",))
    label = shown.chains[0].sites[0].source_file
    assert {site.source_file for site in shown.chains[0].sites} == {label}
    assert shown.quality.graph_breaks[0].source == f"{label}:7"
    assert shown.fusions[1].reason.startswith(f"see {label}, (<file ")
    assert shown.chains[1].sites[0].source_file != label


def test_names_that_are_no_paths_stay() -> None:
    report = real()
    shown = redact(report, ("paths",))
    assert shown.workload.model_id == "Qwen/Qwen2.5-7B"
    assert shown.before.kernels == report.before.kernels
    assert [site.module_path for chain in shown.chains for site in chain.sites] == [
        site.module_path for chain in report.chains for site in chain.sites
    ]
    assert "modeling_qwen2" not in dump_report(redact(report, ("paths", "source")))


def test_source_is_gone_from_every_view_and_the_page_says_so() -> None:
    report, line = applied(), "variance = hidden_states"
    assert any(line in text for fusion in real().fusions for _, text in fusion.original_source)
    shown = redact(real(), ("source",))
    assert not has_source(shown) and has_source(real()) and has_source(report)
    copies = replace(with_a_copy(applied()), fusions=(), chains=())
    assert has_source(copies) and not has_source(redact(copies, ("source",)))
    text = every_view(shown)
    assert line not in text and "tl.load" not in text and "import triton" not in text
    assert "This file contains no source code" in text
    assert "This file contains source code of the model" in render_html(report)


def test_the_machine_is_gone_and_the_device_stays() -> None:
    shown = redact(real(), ("env",)).environment
    assert (shown.device_name, shown.torch, shown.cuda) == (
        real().environment.device_name,
        real().environment.torch,
        real().environment.cuda,
    )
    assert not any((shown.os, shown.compiler, shown.driver, shown.python, shown.cores))


@pytest.mark.parametrize("report", [real(), with_paths(), hostile()], ids=["real", "paths", "hostile"])
def test_no_figure_changes_and_the_copy_reads_back(report: Report) -> None:
    def figures(value: object) -> object:
        if isinstance(value, dict):
            return {key: figures(item) for key, item in value.items() if key not in ("environment", "notes", "original_source")}
        return [figures(item) for item in value] if isinstance(value, list) else None if isinstance(value, str) else value

    shown = redact(report, PARTS)
    assert figures(json.loads(dump_report(shown))) == figures(json.loads(dump_report(report)))
    assert load_report(dump_report(shown)) == shown
    assert [fusion.status for fusion in shown.fusions] == [fusion.status for fusion in report.fusions]
    assert redact(report, ()) is report
