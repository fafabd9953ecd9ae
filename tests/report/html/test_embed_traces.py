"""Traces inside the page: whole, within the cap, and never missing without a sentence."""

from __future__ import annotations

import base64
import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from fusion_advisor.report.html import embed_traces
from fusion_advisor.report.html.embed_traces import AFTER, BEFORE, read_traces, warnings
from fusion_advisor.report.html.page import render_html
from tests.report.fixtures import applied, profiled
from tests.report.html.test_page import Page


def put(folder: Path, **sizes: int) -> None:
    for name, size in sizes.items():
        (folder / f"trace.{name}.json.gz").write_bytes(bytes(range(256)) * (size // 256) + b"x" * (size % 256))


def test_the_page_holds_the_files_byte_for_byte(tmp_path: Path) -> None:
    before = gzip.compress(b'{"traceEvents": ["</script><!--"]}', mtime=0)
    (tmp_path / BEFORE).write_bytes(before)
    put(tmp_path, after=1000)
    page = Page(render_html(applied(), traces=read_traces(tmp_path, applied())))
    assert base64.b64decode(json.loads(page.data["trace-0"])) == before
    assert base64.b64decode(json.loads(page.data["trace-1"])) == (tmp_path / AFTER).read_bytes()
    buttons = [attrs for tag, attrs in page.seen if tag == "button" and "data-trace" in attrs]
    assert [(one["data-trace"], one["data-name"]) for one in buttons] == [("trace-0", BEFORE), ("trace-1", AFTER)]


def test_a_page_without_traces_is_as_it_was() -> None:
    page = Page(render_html(applied()))
    assert not [name for name in page.data if name.startswith("trace")]
    assert not [script for script in page.raw["script"] if "data-trace" in script]


@pytest.mark.parametrize(
    ("sizes", "inside"),
    [
        ({"before": 600, "after": 400}, [BEFORE, AFTER]),
        ({"before": 600, "after": 401}, [BEFORE]),
        ({"before": 1001, "after": 400}, [AFTER]),
        ({"before": 1001, "after": 1001}, []),
        ({"after": 10}, [AFTER]),
    ],
)
def test_what_does_not_fit_or_is_not_there_has_a_sentence(tmp_path: Path, sizes: dict[str, int], inside: list[str]) -> None:
    put(tmp_path, **sizes)
    traces = read_traces(tmp_path, applied(), max_bytes=1000)
    assert [trace.name for trace in traces if trace.data] == inside
    page = render_html(applied(), traces=traces)
    for trace in traces:
        assert bool(trace.refusal) is not bool(trace.data)
        assert not trace.refusal or (trace.refusal.startswith(f"{trace.name} is not embedded: ") and trace.refusal in page)
    missing = [trace.refusal for trace in traces if trace.name == BEFORE and BEFORE not in inside]
    assert all(("does not hold it" in text) is ("before" not in sizes) for text in missing)


def test_a_full_page_says_what_takes_the_room(tmp_path: Path) -> None:
    put(tmp_path, before=600, after=401)
    assert (
        "a page takes 1.00 kB of traces, of which 600 B are taken" in read_traces(tmp_path, applied(), max_bytes=1000)[1].refusal
    )


def test_one_trace_where_nothing_was_kept(tmp_path: Path) -> None:
    left = replace(applied(), after=replace(applied().before, label="unchanged"))
    for report in (profiled(), left):
        assert [trace.name for trace in read_traces(tmp_path, report)] == [BEFORE]


def test_the_cap_keeps_a_page_below_25_mb_and_a_large_one_is_told(tmp_path: Path) -> None:
    put(tmp_path, before=embed_traces.MAX_BYTES)
    traces = read_traces(tmp_path, profiled())
    size = len(render_html(profiled(), traces=traces).encode())
    assert embed_traces.MAX_BYTES * 4 / 3 < size < 20_000_000
    assert warnings(traces, size) == [f"report.html has {size / 1e6:.1f} MB with its traces."]
    assert warnings(traces, 1_000_000) == warnings((), size) == []
