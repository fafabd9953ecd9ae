"""Reading a trace event by event: whole ones, and every way in which one can be broken."""

from __future__ import annotations

import gzip
import json

import pytest

from fusion_advisor.capture import trace_file
from fusion_advisor.capture.trace_file import TraceFile
from fusion_advisor.errors import UnreadableTrace

EVENTS = [
    {"ph": "X", "name": f"kernel {number}", "ts": number + 0.125, "args": {"grid": [1, number, -3], "é": None}}
    for number in range(40)
]
DOCUMENT = {"schemaVersion": 12345, "deviceProperties": [{"name": "H200"}], "traceEvents": EVENTS, "traceName": "x"}


def parsed(document):
    return json.loads(json.dumps(document), parse_float=str)


@pytest.mark.parametrize("chunk", [1, 7, 64, 1 << 20])
@pytest.mark.parametrize("indent", [None, 2])
def test_every_event_is_read_wherever_a_chunk_ends(tmp_path, monkeypatch, chunk, indent):
    monkeypatch.setattr(trace_file, "_CHUNK", chunk)
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(DOCUMENT, indent=indent), encoding="utf-8")
    file = TraceFile(path)
    assert list(file) == parsed(EVENTS)
    assert file.facts == {"schemaVersion": 12345, "deviceProperties": [{"name": "H200"}], "traceName": "x"}
    assert file.events == 40


@pytest.mark.parametrize("document", [EVENTS, {"traceEvents": []}, {"traceEvents": EVENTS}])
def test_both_forms_of_the_format_are_read_packed_or_not(tmp_path, document):
    events = document if isinstance(document, list) else document["traceEvents"]
    text = json.dumps(document, ensure_ascii=False).encode()
    marked = b"\xef\xbb\xbf" + text
    for name, content in (("a.json", text), ("packed.json", gzip.compress(text)), ("marked.gz", marked)):
        (tmp_path / name).write_bytes(content)
        assert list(TraceFile(tmp_path / name)) == parsed(events)


WHOLE = json.dumps(DOCUMENT, indent=1).encode()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (gzip.compress(WHOLE, mtime=0)[:-30], "gzip ends early at byte"),
        (gzip.compress(WHOLE, mtime=0)[:20] + b"\xff" * 40, "gzip"),
        (WHOLE[:900], "it ends early at line"),
        (WHOLE.rstrip()[:-1], "it ends early at line"),
        (WHOLE.replace(b"kernel 7", b"kernel\x017"), "JSON control character at line"),
        (WHOLE.replace(b"kernel 7", b'kernel "7'), "it is not JSON"),
        (WHOLE + b"{}", "something follows the trace at line"),
        (WHOLE.replace(b"traceEvents", b"events"), 'it has no "traceEvents"'),
        (b'{"traceEvents": [1]}', "event 1 is no object"),
        (b'{"traceEvents": [{}', "it ends early at line 1"),
        (b'{"traceEvents": [{} {}]}', "a comma is missing"),
        (b'{"traceEvents": 3}', "it has no"),
        (b'{"a": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "a number too long"),
        (b"", "it is empty"),
        (b"hello", "it is not JSON"),
        (b"\x00\x01\x02", "it is not JSON"),
    ],
)
def test_what_is_no_whole_trace_is_refused_with_the_place(tmp_path, content, why):
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(UnreadableTrace) as error:
        list(TraceFile(path))
    assert why in str(error.value)
    assert error.value.code == "FA501" and error.value.exit_code == 9
    assert "{" not in error.value.note_text + error.value.hint_text


def test_the_line_of_a_control_character_is_the_files_own(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_file, "_CHUNK", 100)
    broken = WHOLE.replace(b"kernel 30", b"kernel\x0130")
    path = tmp_path / "trace.json"
    path.write_bytes(broken)
    line = broken[: broken.index(b"\x01")].count(b"\n") + 1
    with pytest.raises(UnreadableTrace, match=f"line {line:,}$"):
        list(TraceFile(path))
    assert len(list(TraceFile(path, is_strict=False))) == 40


def test_a_missing_file_is_a_mistake_of_the_users(tmp_path):
    with pytest.raises(UnreadableTrace, match="No such file"):
        list(TraceFile(tmp_path / "none.json"))
    with pytest.raises(UnreadableTrace, match="directory"):
        list(TraceFile(tmp_path))


def test_what_was_whole_before_the_end_is_told(tmp_path):
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(WHOLE + b" " * 5_000_000, compresslevel=0)[:-2_000_000])
    with pytest.raises(UnreadableTrace) as error:
        list(TraceFile(path))
    assert error.value.note_text == "40 events before that place are whole"
