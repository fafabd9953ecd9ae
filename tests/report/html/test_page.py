from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
from collections.abc import Callable
from dataclasses import astuple, replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from fusion_advisor import units
from fusion_advisor.content import content_dir
from fusion_advisor.records import Report, Timeline
from fusion_advisor.records.serialize import load_report
from fusion_advisor.report import kernel_rows, shared_rows
from fusion_advisor.report.escape import visible
from fusion_advisor.report.headline import headline
from fusion_advisor.report.html.highlight import panel
from fusion_advisor.report.html.page import MAX_KERNELS, SECTIONS, coded, render_html
from fusion_advisor.report.redact import redact
from tests.report.fixtures import ALL, HOSTILE, LONG, applied, empty, failed_numbers, hostile, on_cpu, profiled, real, with_a_copy

VOID = {"meta", "link", "br", "wbr", "input", "img", "hr"}


class Page(HTMLParser):
    """A strict reader: every element closes, and what a browser would do is collected."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.raw: dict[str, list[str]] = {"script": [], "style": []}
        self.data: dict[str, str] = {}
        self.text: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        tag, attrs = self.seen[-1] if self.seen else ("", {})
        if self.open and self.open[-1] == tag == "script" and attrs.get("type") == "application/json":
            self.data[str(attrs["id"])] = data
        elif self.open and self.open[-1] in self.raw:
            self.raw[self.open[-1]].append(data)
        else:
            self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


@pytest.fixture(scope="module", params=[*ALL, "real"])
def page(request: pytest.FixtureRequest) -> Page:
    return Page(render_html(real() if request.param == "real" else ALL[request.param]()))


def test_an_excerpt_that_begins_in_a_docstring_is_code_afterwards() -> None:
    inside = panel('    says what it does.\n    """\n    return 0.5 * x', "python")
    assert 'class="k">return' in inside.lines[2][1]
    assert len(inside.lines) == 3
    before = panel('def f(x):\n    """Says', "python")
    assert 'class="k">def' in before.lines[0][1]


def test_nothing_is_fetched_and_nothing_runs_but_our_own(page: Page) -> None:
    assert {tag for tag, _ in page.seen}.isdisjoint(
        {"img", "iframe", "object", "embed", "base", "form", "video", "audio", "image", "use"}
    )
    for tag, attrs in page.seen:
        assert not any(name.startswith("on") or name == "style" for name in attrs), (tag, attrs)
        for name in ("src", "href", "xlink:href", "action", "srcset", "poster"):
            assert attrs.get(name) is None or str(attrs[name]).startswith(("#", "data:,")), (tag, attrs)
    assert "@import" not in "".join(page.raw["style"])
    assert "url(" not in "".join(page.raw["style"])


def test_policy_comes_first_and_names_what_is_there(page: Page) -> None:
    metas = [attrs for tag, attrs in page.seen if tag == "meta"]
    assert metas[1]["http-equiv"] == "Content-Security-Policy"
    policy = str(metas[1]["content"])
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    for kind in ("style", "script"):
        hashes = set(re.findall(r"'sha256-([^']+)'", policy.partition(f"{kind}-src ")[2].partition(";")[0]))
        assert {base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in page.raw[kind]} == hashes


def test_the_page_has_its_landmarks(page: Page) -> None:
    tags = [tag for tag, _ in page.seen]
    assert tags.count("h1") == 1
    assert tags.count("main") == tags.count("header") == tags.count("footer") == 1
    assert dict(page.seen)["html"]["lang"] == "en"
    ids = [attrs["id"] for _, attrs in page.seen if "id" in attrs]
    assert len(ids) == len(set(ids))
    levels = [int(tag[1]) for tag in tags if re.fullmatch(r"h[1-6]", tag)]
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    for tag, attrs in page.seen:
        if tag == "a":
            assert str(attrs["href"])[1:] in ids
        if tag == "svg" and attrs.get("role") == "img":
            assert all(name in ids for name in str(attrs["aria-labelledby"]).split())


@pytest.mark.parametrize("name", ALL)
def test_the_embedded_json_is_the_report(name: str) -> None:
    page = Page(render_html(ALL[name]()))
    data = page.data["report-json"]
    assert json.dumps(json.loads(data)) == json.dumps(json.loads(load_and_dump(data)))


def load_and_dump(data: str) -> str:
    from fusion_advisor.records.serialize import dump_report

    return dump_report(load_report(data))


def test_hostile_text_stays_text() -> None:
    html = render_html(hostile())
    assert "<img" not in html
    assert "</script><" not in html
    assert "{{7*7}}" in html
    for char in ("\x1b", "\u202e", "\u2028", "\x07", "\x00"):
        assert char not in html
    page = Page(html)
    assert "\\u202egnp.exe\\x1b[31mred" in page.words
    assert LONG not in page.words
    assert len(html) < 2_000_000


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("gradient of `a.b`, 2 of `c`", "gradient of <code>a.b</code>, 2 of <code>c</code>"),
        ("`<b>` & <i>", "<code>&lt;b&gt;</code> &amp; &lt;i&gt;"), ("an odd ` <b>", "an odd ` &lt;b&gt;"), ("none", "none"),
    ],
    ids=["names", "hostile", "odd", "none"],
)  # fmt: skip
def test_names_in_sentences_are_code_and_all_else_stays_text(text: str, shown: str) -> None:
    assert coded(text) == shown


def test_lone_surrogates_do_not_break_writing() -> None:
    base = profiled()
    html = render_html(replace(base, workload=replace(base.workload, model_id="a\ud800b"), notes=("\udcff",)))
    html.encode("utf-8")
    assert "\\ud800" in html


@pytest.mark.parametrize("make", [applied, real])
def test_figures_are_the_reports_own(make: Callable[[], Report]) -> None:
    report = make()
    words = Page(render_html(report)).words
    for chain in report.chains:
        assert units.duration(chain.device_ns) in words
        assert units.share(chain.share) in words
        assert units.size(chain.moved_bytes) in words
    for fusion in report.fusions:
        if fusion.step_delta_ns is not None and fusion.step_delta_ci_ns:
            assert units.delta(fusion.step_delta_ns) in words
            assert units.delta_interval(*fusion.step_delta_ci_ns) in words
        assert fusion.reason in words
        assert f"{fusion.receipt.sites_replaced} of {fusion.receipt.sites_found}" in words
    assert headline(report).text in words
    for row in shared_rows.comparisons(report):
        assert row.before in words
        assert row.after in words
    for name, _, before_count, before_ns, after_count, after_ns in map(astuple, kernel_rows.kernel_rows(report, MAX_KERNELS)[0]):
        assert visible(name, 160) in words
        for count, ns in ((before_count, before_ns), (after_count, after_ns)):
            assert not count or f"{units.number(count)} {units.duration(ns)}" in words
    assert report.step_before is not None
    assert report.step_after is not None
    assert report.after is not None and report.before.wall is not None and report.after.wall is not None
    fall = words[words.rindex("Saved by each rewrite") :]
    assert units.duration(report.before.wall.median_ns) in fall
    assert units.duration(report.after.wall.median_ns) in fall
    for refusal in (text for fusion in report.fusions for text in fusion.receipt.refusals):
        assert refusal in words


def test_sizes_of_real_and_of_huge_runs() -> None:
    assert len(render_html(real())) < 2_000_000
    base = applied()
    assert base.before.timeline is not None
    count = 1_000_000
    rng = np.random.default_rng(0)
    length = rng.integers(900, 90_000, count)
    start = np.concatenate(([0], np.cumsum(length + rng.integers(200, 9_000, count))[:-1]))
    huge = Timeline(
        kernel=tuple((np.arange(count) % len(base.before.kernels)).tolist()),
        start_ns=tuple(start.tolist()),
        duration_ns=tuple(length.tolist()),
    )
    html = render_html(replace(base, before=replace(base.before, timeline=huge)))
    assert len(html) < 8_000_000
    words = Page(html).words
    assert "eager: more than 200,000 kernels" in words
    assert "the copy in this page leaves the longest timelines out" in words


def test_a_kernel_of_two_categories_keeps_both_rows() -> None:
    base = applied()
    twins = (("elementwise", "pointwise", 3, 5_000), ("elementwise", "memory", 2, 4_000))
    report = replace(base, before=replace(base.before, kernels=twins))
    rows, left, _ = kernel_rows.kernel_rows(report, MAX_KERNELS)
    assert left == 0
    assert sum(row.before_ns for row in rows) == 9_000


def test_nothing_is_missing_without_a_sentence() -> None:
    words = Page(render_html(profiled())).words
    assert "Nothing was applied in this run, so nothing was saved yet." in words
    assert "No fusion was timed in this run, so there is no point to draw." in words
    old = Page(render_html(real())).words
    assert "This run kept no timeline: its report was written before timelines were part of it." in old
    assert "This run kept no timeline, so gaps cannot be counted." in old
    assert "On a CPU an op runs inside the call that launches it" in Page(render_html(on_cpu())).words
    anchors = {str(attrs["id"]) for _, attrs in Page(render_html(empty())).seen if "id" in attrs}
    assert {anchor for anchor, _ in SECTIONS} <= anchors


def test_random_weights_and_cut_layers_are_said() -> None:
    words = Page(render_html(on_cpu())).words
    assert "Random weights" in words
    assert "Only 2 of 24 layers were run" in words
    assert "Measured on a CPU" in words
    assert "CPU time" in words
    assert "GPU time" not in words
    assert "1,204 launches but 1,201 kernels" in words
    assert "cannot trace (modeling_synthetic.py:77)" in words
    assert "The step with all rewrites: no measurable difference from eager" in words


def test_empty_parts_are_sentences() -> None:
    words = Page(render_html(empty())).words
    for sentence in (
        "No chain was found",
        "Nothing was applied in this run",
        "None were tried in this run.",
        "The trace holds no kernel.",
        "This run recorded no notes on its method.",
        "No command was recorded",
        "No step recorded any kernel time",
    ):
        assert sentence in words


def test_bad_news_comes_first() -> None:
    report = failed_numbers()
    assert headline(report).text.startswith("The numbers changed.")
    words = Page(render_html(report)).words
    assert "✗ Failed" in words
    assert "nan" in words


def test_a_kernel_that_failed_its_numbers_shows_no_time() -> None:
    words = Page(render_html(applied())).words
    card = words[words.index("F4 · ") :]
    assert "a time is taken only where the numbers passed" in card
    assert "inf" in card


def test_code_is_highlighted_and_capped() -> None:
    base = applied()
    kernel = replace(base.fusions[0].rendered[0], source="\n".join(f"x = {i}" for i in range(500)))
    report = replace(base, fusions=(replace(base.fusions[0], rendered=(kernel,)),))
    html = render_html(report)
    assert "300 more lines are not shown here" in Page(html).words
    assert '<span class="k' in html


def test_a_kernel_that_a_rewrite_put_in_is_shown() -> None:
    assert "fa_permuted_copy" not in render_html(applied())
    html = render_html(with_a_copy(applied()))
    words = Page(html).words
    card = words[words.index("fold-constants · folded constants: its kernel") :]
    assert "fa_permuted_copy_0a1b2c , cuda, generated for what a GEMM over patches reads and gives" in card
    assert "kernels/fold-constants_permuted_copy_0a1b2c.cu · block 4 x 32 (default)" in card
    assert "__global__" in card
    assert "__global__ void fa_permuted" not in render_html(redact(with_a_copy(applied()), ("source",)))


def test_only_our_own_text_is_marked_safe() -> None:
    for path in content_dir("reports").rglob("*.jinja"):
        text = path.read_text(encoding="utf-8")
        assert "|safe" not in text.replace(" ", ""), path
        assert "autoescape" not in text, path
        assert " style=" not in text, path
    package = Path(shared_rows.__file__).parent
    marked = [path.name for path in package.rglob("*.py") if "Markup(" in path.read_text(encoding="utf-8")]
    assert sorted(marked) == ["highlight.py", "page.py"]


def test_hostile_is_in_the_fixture() -> None:
    assert HOSTILE in hostile().workload.model_id


def test_distances_in_units_are_shown_for_both_sides() -> None:
    report = applied()
    words = Page(render_html(report)).words
    checked = report.fusions[0].numerics
    assert checked is not None
    total = sum(checked.fused_ulps)
    names = ("0", "1", "2", "3 to 4", "5 to 16", "17 to 256", "over 256")
    assert [name for name, _, _ in kernel_rows.ulp_rows(report.fusions[0])] == list(names)
    for count in checked.fused_ulps:
        assert f"{units.share(count / total)} {units.number(count)}" in words
    assert "the same five 99.8%" in words
    assert kernel_rows.ulp_rows(real().fusions[0]) == ()  # counted since
