from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from fusion_advisor import units
from fusion_advisor.records import Report, Status
from fusion_advisor.report import shared_rows
from fusion_advisor.report.markdown import LIMIT, MAX_ROWS, code_span, escape, fenced, render_markdown, sticky_key
from tests.report.fixtures import ALL, HOSTILE, applied, chain, hostile, padded_shapes, profiled, real, shapes, sized, with_a_copy

MARKDOWN = MarkdownIt("commonmark", {"html": True}).enable("table").enable("strikethrough")


def is_balanced(text: str) -> bool:
    outside = re.sub(r"(?ms)^(`{3,})\w*\n.*?^\1$", "", text)
    outside = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", outside)
    return outside.count("<details>") == outside.count("</details>") and "```" not in outside


@pytest.mark.parametrize("name", ALL)
def test_it_fits_and_closes(name: str) -> None:
    text = render_markdown(ALL[name]())
    assert len(text) <= LIMIT
    assert is_balanced(text)
    assert not re.search(r"\n{4,}", text)
    assert text.startswith("<!-- fusion-advisor key=")
    assert "style=" not in re.sub(r"`[^`]*`", "", text)


def test_headline_and_table_agree() -> None:
    report = applied()
    text = render_markdown(report)
    before, after = shared_rows.comparisons(report)[0].before, shared_rows.comparisons(report)[0].after
    assert f"{before} → {after} per step" in text.splitlines()[1]
    assert f"| Step, wall clock | {before} | {after} |" in text
    for fusion in report.fusions:
        assert f"| {fusion.id} `{fusion.kernel}` |" in text
        if fusion.step_delta_ns is not None:
            assert units.delta(fusion.step_delta_ns) in text


def test_hostile_text_renders_as_text() -> None:
    html = MARKDOWN.render(render_markdown(hostile()))
    tags = set(re.findall(r"<(/?\w+)", html))
    assert {"img", "script", "/script"}.isdisjoint(tags)
    assert "@octocat" not in re.sub(r"<code[^>]*>.*?</code>", "", html, flags=re.DOTALL)
    assert html.count("<details>") == html.count("</details>")
    for row in re.findall(r"<tr>(.*?)</tr>", html, flags=re.DOTALL):
        assert len(re.findall(r"<t[dh]", row)) in (2, 3, 4, 5, 6, 7)


@pytest.mark.parametrize("make", [applied, profiled, hostile, real])
def test_github_renders_it_with_its_tables_whole(make: Callable[[], Report]) -> None:
    cmarkgfm = pytest.importorskip("cmarkgfm", reason="GitHub's own renderer is not installed: pip install cmarkgfm")
    options = cmarkgfm.Options.CMARK_OPT_UNSAFE
    html = cmarkgfm.github_flavored_markdown_to_html(render_markdown(make()), options)
    for table in re.findall(r"<table>(.*?)</table>", html, flags=re.DOTALL):
        widths = {len(re.findall(r"<t[dh][ >]", row)) for row in re.findall(r"<tr>(.*?)</tr>", table, flags=re.DOTALL)}
        assert len(widths) == 1, table
    assert html.count("<table>") >= (3 if make is not profiled else 1)
    outside = re.sub(r"<(code|pre)[^>]*>.*?</\1>", "", html, flags=re.DOTALL)
    assert outside.count("<details>") == outside.count("</details>") == html.count("<summary>")
    assert set(re.findall(r"<(/?[a-z]\w*)", html)).isdisjoint({"img", "script", "/script", "a", "style"})
    assert "@octocat" not in outside
    assert not re.search(r"(?<![\w&])#\d", outside)


def test_the_key_is_of_what_was_run_and_not_of_when() -> None:
    report = applied()
    again = replace(report, run_id="20310203-040506-7f3a9c")
    other = replace(report, environment=replace(report.environment, device_name="Another Accelerator"))
    key = re.compile(r"<!-- fusion-advisor key=(\S+) ")
    found = [key.match(render_markdown(one)) for one in (report, again, other)]
    assert all(found)
    first, second, third = (match.group(1) for match in found if match)
    assert first == second != third
    assert "--" not in sticky_key(hostile())


def test_five_thousand_chains_still_fit() -> None:
    base = profiled()
    many = tuple(chain(at, (f"op{at}", HOSTILE, "mul"), 3, 10_000, 0.0001) for at in range(1, 5001))
    text = render_markdown(replace(base, chains=many))
    assert len(text) <= LIMIT
    assert is_balanced(text)


def test_a_kernel_that_a_rewrite_put_in_is_shown() -> None:
    text = render_markdown(with_a_copy(applied()), 10**6)
    assert text.count("<details><summary>Source: fold-constants, cuda</summary>") == 1 and "fa_permuted_copy_0a1b2c(" in text
    assert "Source: fold-constants" not in render_markdown(applied(), 10**6)
    assert is_balanced(text)


def test_a_rewrite_that_was_not_tried_says_why() -> None:
    row = replace(applied().rewrites[0], status=Status.NOT_REPLACED, reason="its weights lie | apart", step_delta_ns=None)
    text = render_markdown(replace(applied(), rewrites=(replace(row, step_delta_ci_ns=None),)))
    assert f"- {row.id} " in text and "its weights lie \\| apart" in text
    timed = replace(row, status=Status.SLOWER, step_delta_ns=5, step_delta_ci_ns=(4, 6))
    assert f"- {row.id} " not in render_markdown(replace(applied(), rewrites=(timed,)))


def test_ranges_of_sizes_have_a_table_a_matrix_and_reasons() -> None:
    text = render_markdown(sized())
    assert is_balanced(text)
    html = MARKDOWN.render(text)
    assert "<td" in html and "serves batch 1..16, seq 1..4096" in text.lower()
    assert "| 3 | batch 16, seq 1024 | 21.40 ms | 22.90 ms | 0.934× [0.927×, 0.941×] | – original ops |" in text
    assert "| `merge-gemms` | not kept | ✗ dropped (reason a) | not kept | ✗ dropped (reason a) | not kept | not kept |" in text
    assert "- Reason a: it decides by one size" in text
    assert "A call outside these ranges" in text and "Other sizes" not in render_markdown(applied())
    many = replace(shapes().pieces[0], points=shapes().pieces[0].points * 5)
    assert "5 more points in the full report" in render_markdown(replace(sized(), shapes=replace(shapes(), pieces=(many,))))


def test_padded_sizes_stand_in_the_markdown() -> None:
    text = render_markdown(replace(sized(), shapes=padded_shapes()))
    assert is_balanced(text)
    assert "- batch 2..16, seq 1: padded to the next batch (2, 3, 4, 5, 6, 8, 16)." in text
    assert "seq is not padded: what the padding holds changes results at batch=2, seq=9." in text
    assert "Running padded calls against their own took 7.8 s of 1 min 37 s." in text
    assert "share CUDA graphs" not in render_markdown(sized())
    made = padded_shapes()
    first = made.pieces[0]
    reasons = tuple((f"d{number}", f"reason {number}") for number in range(20))
    many = replace(made, pieces=(replace(first, padded=(), not_padded=reasons),))
    assert "- 10 more lines in the full report." in render_markdown(replace(sized(), shapes=many))


def test_parts_are_given_up_in_order() -> None:
    base = applied()
    kernel = replace(base.fusions[0].rendered[0], source="x = 1  # " + "long " * 30 + "\n")
    kernel = replace(kernel, source=kernel.source * 110)
    report = replace(base, fusions=tuple(replace(fusion, rendered=(kernel,) * 2) for fusion in base.fusions))
    text = render_markdown(report)
    assert "Fused source" not in text
    assert "<summary>Kernels</summary>" in text
    assert text.rstrip().endswith("_cut; the full report is in `report.html`_")
    small = render_markdown(report, 2_500)
    assert len(small) <= 2_500
    assert "Environment" not in small
    assert is_balanced(small)
    assert len(render_markdown(report, 1_000)) <= 1_000


@settings(max_examples=12, deadline=None)
@given(st.integers(1_000, 20_000), st.sampled_from([applied, hostile, real]))
def test_any_limit_closes_what_it_opened(limit: int, make: Callable[[], Report]) -> None:
    text = render_markdown(make(), limit)
    assert len(text) <= limit
    assert is_balanced(text)


@given(st.text(max_size=60))
def test_any_name_is_one_code_span(name: str) -> None:
    html = MARKDOWN.render(f"x {code_span(name)} y")
    assert html.count("<code>") == 1
    assert html.startswith("<p>x <code>")
    assert html.endswith("</code> y</p>\n")


@given(st.text(max_size=60))
def test_any_text_is_only_text(text: str) -> None:
    html = MARKDOWN.render(f"x {escape(text)} y")
    assert set(re.findall(r"<(/?\w+)", html)) == {"p", "/p"}


@given(st.text(alphabet="`~ab\n", max_size=80))
def test_any_source_stays_in_its_fence(source: str) -> None:
    block = fenced(source, "python").replace("\x00", "")
    html = MARKDOWN.render(f"{block}\n\nafter\n")
    assert html.count("<pre>") == 1
    assert html.endswith("<p>after</p>\n")


def test_the_next_steps_are_said_whole() -> None:
    assert "patch (a diff against the model's source):" in render_markdown(applied())


def test_one_fusion_that_is_left_out_is_one() -> None:
    report = applied()
    rows = (report.fusions * (MAX_ROWS + 1))[: MAX_ROWS + 1]
    assert "1 more fusion is in the full report." in render_markdown(replace(report, fusions=rows))
