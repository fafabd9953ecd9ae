"""Reading a trace event by event: whole ones, and every way in which one can be broken."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fusion_advisor.capture.trace.chrome_trace import TraceFile
from fusion_advisor.capture.trace.events import read_events
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
def test_every_event_is_read_wherever_a_chunk_ends(tmp_path, chunk, indent):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(DOCUMENT, indent=indent), encoding="utf-8")
    file = TraceFile(path, part=chunk)
    assert list(file) == parsed(EVENTS)
    assert file.facts == {"schemaVersion": 12345, "deviceProperties": [{"name": "H200"}], "traceName": "x"}
    assert file.events == 40


@pytest.mark.parametrize("number", ["12", "1.25", "-0.5E-3", "1e+10", "7e5"])
def test_a_number_is_whole_wherever_a_chunk_ends(tmp_path, number):
    for chunk in range(1, 40):
        path = tmp_path / "trace.json"
        path.write_text(f'{{"traceEvents": [], "x": {number}, "y": {number}}}')
        file = TraceFile(path, part=chunk)
        assert list(file) == []
        assert file.facts == {"x": json.loads(number, parse_float=str), "y": json.loads(number, parse_float=str)}


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


def test_the_line_of_a_control_character_is_the_files_own(tmp_path):
    broken = WHOLE.replace(b"kernel 30", b"kernel\x0130")
    path = tmp_path / "trace.json"
    path.write_bytes(broken)
    line = broken[: broken.index(b"\x01")].count(b"\n") + 1
    with pytest.raises(UnreadableTrace, match=f"(?m)line {line:,}$"):
        list(TraceFile(path, part=100))
    assert len(list(TraceFile(path, is_strict=False, part=100))) == 40


def test_a_missing_file_is_a_mistake_of_the_users(tmp_path):
    with pytest.raises(UnreadableTrace, match="No such file"):
        list(TraceFile(tmp_path / "none.json"))
    with pytest.raises(UnreadableTrace, match="folder"):
        list(TraceFile(tmp_path))


def test_what_was_whole_before_the_end_is_told(tmp_path):
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(WHOLE + b" " * 5_000_000, compresslevel=0)[:-2_000_000])
    with pytest.raises(UnreadableTrace) as error:
        list(TraceFile(path))
    assert error.value.note_text == "40 events before that place are whole"


def read_in_parts(path, text, monkeypatch, part):
    """The events of a text, read with parts of so many characters, and how many decoder calls they took."""
    path.write_text(text, encoding="utf-8", newline="")
    file = TraceFile(path, part=part)
    decode = Mock(wraps=file._decoder.raw_decode)
    monkeypatch.setattr(file._decoder, "raw_decode", decode)
    return list(file), decode.call_count


# Where an object ends and another begins, but no event does.
IN_A_NAME = {"name": "k<{lambda(int)#1}, {lambda(int)#2}>", "args": {"also": '\\"}, {"'}}
NESTED = {"name": "k", "args": {"list": [{"a": 1}, {"b": {"c": []}}, {}], "last": {}}}
SPACED = {"indent": 1}, {"separators": (",", ":")}, {"separators": ("\r\n,\t ", " :")}, {}


@pytest.mark.parametrize("spaces", SPACED)
@pytest.mark.parametrize("part", [64, 150, 500, 3000])
@pytest.mark.parametrize("odd", [IN_A_NAME, NESTED, {"name": "}"}, {}])
def test_a_part_ends_between_two_events_alone(tmp_path, monkeypatch, odd, part, spaces):
    events = [event for pair in zip(EVENTS, [odd] * 40, strict=True) for event in pair]
    text = json.dumps({"traceEvents": events, "after": [{}, {}, NESTED]}, **spaces)
    assert read_in_parts(tmp_path / "t.json", text, monkeypatch, part)[0] == parsed(events)


def test_a_part_is_decoded_in_one_call(tmp_path, monkeypatch):
    events = EVENTS * 50
    found, calls = read_in_parts(tmp_path / "t.json", json.dumps(events), monkeypatch, 10_000)
    assert found == parsed(events)
    assert calls < len(events) / 20


LONG = {"name": "k", "args": {"list": [{}] * 2000}}


@pytest.mark.parametrize("events", [[IN_A_NAME] * 2000, [NESTED] * 2000, [*EVENTS, LONG] * 40])
def test_wrong_ends_cost_a_few_calls_more(tmp_path, monkeypatch, events):
    found, calls = read_in_parts(tmp_path / "t.json", json.dumps(events), monkeypatch, 10_000)
    assert found == parsed(events)
    assert calls < len(events) * 1.2


def test_behind_a_wrong_end_parts_are_decoded_again(tmp_path, monkeypatch):
    events = [*EVENTS, LONG, *EVENTS * 50]
    _, calls = read_in_parts(tmp_path / "t.json", json.dumps(events), monkeypatch, 10_000)
    assert calls < len(events) / 5


def test_an_event_may_be_larger_than_a_part(tmp_path, monkeypatch):
    huge = {"name": "h" * 5000, "args": {"list": [{"x": number} for number in range(500)]}}
    events = [*EVENTS, huge, *EVENTS, huge]
    assert read_in_parts(tmp_path / "t.json", json.dumps(events), monkeypatch, 300)[0] == parsed(events)


@pytest.mark.parametrize(
    ("text", "why", "whole"),
    [
        ('{"traceEvents": [{}, {}, 3, {}, {}]}', "event 3 is no object", 2),
        ('{"traceEvents": [{}, {}, {"a": [{}, 3}, {}]}', "it is not JSON", 2),
        ('{"traceEvents": [{}, {}, {}, ]}', "it is not JSON", 3),
        ('{"traceEvents": [{}, {}, {}, ], "x": [{}, {}]}', "it is not JSON", 3),
        ('{"traceEvents": [{}, {}, , {}]}', "it is not JSON", 2),
        ('{"traceEvents": [{}, {}, {}], "x": [{}, {}}, {}]}', "it is not JSON", 3),
        ('{"traceEvents": [{}, {}, {}], "x": [{}, {}]}, {}]}', "something follows", 3),
        ('{"traceEvents": [{}, {}}, {}, {}]}', "a comma is missing", 2),
        ('{"traceEvents": [{}, {}, {"name": "a}, {b}]}', "it ends early", 2),
    ],
)
@pytest.mark.parametrize("part", [7, 10, 20, 1 << 20])
def test_what_is_wrong_inside_a_part_is_found_at_its_place(tmp_path, text, why, whole, part):
    path = tmp_path / "trace.json"
    path.write_text(text + " " * 20)  # what is wrong in the last few characters counts as cut off
    found = []
    with pytest.raises(UnreadableTrace, match=why):
        found.extend(TraceFile(path, part=part))
    assert len(found) == whole


def until_refused(file: TraceFile) -> Iterator[dict]:
    with pytest.raises(UnreadableTrace, match="ends early"):
        yield from file


@pytest.mark.parametrize("part", [100, 1000, 1 << 20])
def test_a_file_cut_off_anywhere_gives_the_events_before_the_cut(tmp_path, part):
    events = [EVENTS[0], IN_A_NAME, NESTED, EVENTS[1], NESTED, IN_A_NAME]
    parts = [json.dumps(event) for event in events]
    opening = '{"traceEvents": ['
    text = opening + ", ".join(parts) + "]}"
    path = tmp_path / "trace.json"
    for length in range(len(opening), len(text)):
        path.write_text(text[:length])
        file = TraceFile(path, part=part)
        # An object is whole with its last bracket; what follows tells that the file is cut.
        whole = sum(len(opening + ", ".join(parts[: number + 1])) <= length for number in range(len(parts)))
        assert list(until_refused(file)) == parsed(events[:whole])
        assert file.events == whole


NAMES = st.text(alphabet='{}[],:"\\ \n\u20ac0a', max_size=12)
VALUES = st.recursive(
    st.none() | st.integers(-9, 9) | st.floats(allow_nan=False, allow_infinity=False, width=16) | NAMES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=8,
)


@given(
    events=st.lists(st.dictionaries(NAMES, VALUES, max_size=4), max_size=12),
    after=VALUES,
    part=st.integers(1, 300),
    spaces=st.sampled_from(SPACED),
    is_ascii=st.booleans(),
)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_events_are_read_as_the_standard_library_reads_them(tmp_path, monkeypatch, events, after, part, spaces, is_ascii):
    text = json.dumps({"traceEvents": events, "after": after}, ensure_ascii=is_ascii, **spaces)
    assert read_in_parts(tmp_path / "t.json", text, monkeypatch, part)[0] == parsed(events)


def written(tmp_path, events):
    path = tmp_path / "typed.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return path


KERNEL = {
    "ph": "X", "cat": "kernel", "name": "k", "ts": 1790000000000123.456, "dur": 2.5, "pid": 0, "tid": 7,
    "args": {"correlation": 3, "External id": 4, "stream": 7, "device": 1, "grid": [4, 1, 1], "block": [128, 1, 1]},
}  # fmt: skip
OP = {
    "ph": "X", "cat": "cpu_op", "name": "aten::mul", "ts": 1.0, "dur": 3, "pid": 1, "tid": 1,
    "args": {"Input Dims": [[2, 3], []], "Input type": ["float", "Scalar"], "Input Strides": [[3, 1], []]},
}  # fmt: skip
ODD = [
    {"ph": "X", "cat": "cpu_op", "name": 7, "ts": 1, "dur": 1},
    {"ph": "X", "cat": "kernel", "name": "k", "ts": "soon"},
    {"ph": "M", "name": "process_name", "args": {"name": "python"}},
    {"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": -1},
    {"ph": "X", "cat": "kernel", "name": "k", "ts": "12.500", "dur": "1.0e1"},
    {"ph": "X", "cat": 3, "name": "k"},
    {},
]


@pytest.mark.parametrize("odd", ODD)
def test_an_odd_event_changes_no_other(tmp_path, odd):
    plain = read_events(TraceFile(written(tmp_path, [KERNEL, OP] * 3)).typed_events())
    mixed = read_events(TraceFile(written(tmp_path, [KERNEL, OP, odd, KERNEL, OP, KERNEL, OP])).typed_events())
    assert mixed.cpu_ops == plain.cpu_ops
    assert [kernel for kernel in mixed.kernels if kernel.correlation == 3] == list(plain.kernels)
    as_dicts = read_events(TraceFile(written(tmp_path, [KERNEL, OP, odd, KERNEL, OP, KERNEL, OP])))
    assert as_dicts == mixed


def test_a_clock_that_counts_from_1970_keeps_its_nanoseconds(tmp_path):
    path = tmp_path / "typed.json"
    path.write_text('{"traceEvents": [' + json.dumps(KERNEL).replace("1790000000000123.5", "1790000000000123.456") + ", {}]}")
    assert [kernel.start_ns for kernel in read_events(TraceFile(path).typed_events()).kernels] == [1790000000000123456]


def test_parts_of_usual_events_make_no_dicts(tmp_path):
    found = list(TraceFile(written(tmp_path, [KERNEL, OP] * 10_000)).typed_events())
    assert len(found) == 20_000
    assert sum(isinstance(event, dict) for event in found) <= 5
