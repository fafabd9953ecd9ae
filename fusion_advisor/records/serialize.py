"""Records as JSON and back, read off the dataclasses' own type hints; refuses what it does not know.

msgspec cannot do this for our records: it takes no union of dataclasses (``Match | NoMatch``), ignores unknown keys of a
dataclass, takes a key that occurs twice, and has no spelling of NaN.

A file says which schema it follows in its first key. Within a schema only fields with defaults may be added, so an older file
still reads; an unknown key means that a newer version wrote the file, and guessing would show half a truth, so it is refused.

JSON has no NaN and no infinity, and a numerics record may hold either on purpose. They are written as the strings ``"nan"``,
``"inf"`` and ``"-inf"`` where the hint is ``float``, and as ``{"kind": "float", "value": "inf"}`` where a string would be
allowed as well.

Nothing here imports torch: a report or a capture reads on any machine.
"""

from __future__ import annotations

import enum
import gzip
import json
import math
import os
import tempfile
import typing
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from fusion_advisor.errors import UnknownSchema, UnreadableReport
from fusion_advisor.files.regular_file import read_regular, unpack
from fusion_advisor.records import Capture, Report
from fusion_advisor.records.hints import (
    TAG,
    Mismatch,
    Wanted,
    classes_of,
    describe,
    hints_of,
    is_tagged,
    item_hints,
    items_of,
    keys_of,
    options_of,
    required_keys,
    shown,
    values_of,
    wanted_of,
)  # fmt: skip
from fusion_advisor.records.soundness import Unsound, check_capture, check_report

REPORT_SCHEMA = "fusion-advisor/1"
CAPTURE_SCHEMA = "fusion-advisor-capture/1"
TRACE_SCHEMA = "fusion-advisor-trace/1"
PLAN_SCHEMA = "fusion-advisor-plan/1"

T = TypeVar("T")

_MOST_DIGITS = 20
"""Of a whole number: an argument of an op may be any of 64 bits, with its sign."""


# -- to JSON ---------------------------------------------------------------------------------------------------------------


def encode(value: object, hint: object = None) -> Any:
    """Return ``value`` as plain JSON data, tagged wherever its hint alone does not tell the class."""
    options = options_of(hint)
    if is_dataclass(value) and not isinstance(value, type):
        cls = type(value)
        hints = hints_of(cls)
        body = {item.name: encode(getattr(value, item.name), hints[item.name]) for item in fields(cls)}
        return {TAG: cls.__name__, **body} if is_tagged(options) else body
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple):
        return [encode(item, inner) for item, inner in zip(value, item_hints(options, len(value)), strict=True)]
    if isinstance(value, float) and not math.isfinite(value):
        text = repr(value)
        return {TAG: "float", "value": text} if str in options else text
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"cannot write a {type(value).__name__} as JSON")


def dump_record(record: object, schema: str) -> str:
    """Return one record as a JSON document that names its schema first."""
    return json.dumps({"schema": schema, **encode(record)}, indent=1, allow_nan=False, ensure_ascii=True) + "\n"


def dump_report(report: Report) -> str:
    """Return ``report.json``'s text."""
    return dump_record(report, REPORT_SCHEMA)


def dump_capture(capture: Capture) -> str:
    """Return ``capture.json``'s text; compact, for a capture holds every op and launch."""
    return json.dumps({"schema": CAPTURE_SCHEMA, **encode(capture)}, separators=(",", ":"), allow_nan=False) + "\n"


# -- from JSON -------------------------------------------------------------------------------------------------------------


def load_record(cls: type[T], text: str | bytes, *, schema: str, name: str, check: Callable[[T], None] | None = None) -> T:
    """Read one record of class ``cls`` from a JSON document.

    Args:
        cls: The record's class.
        text: The document.
        schema: The only schema accepted.
        name: What to call the document in an error, usually its path.
        check: Raises :class:`Unsound` where the record's types fit and the record does not hold together.

    Raises:
        UnreadableReport: The document is truncated, is not JSON, or does not hold such a record.
        UnknownSchema: The document follows another schema.
    """
    data = _parse(text, name)
    found = data.pop("schema", None) if isinstance(data, dict) else None
    if not isinstance(found, str):
        raise UnreadableReport(name=name, schema=schema, detail='it has no "schema" key, so another program wrote it')
    if found != schema:
        raise UnknownSchema(name=name, found=found, expected=schema)
    try:
        record = decode(data, cls)
        if check is not None:
            check(record)
    except (Mismatch, Unsound) as error:
        raise UnreadableReport(name=name, schema=schema, detail=str(error)) from error
    except RecursionError as error:
        raise UnreadableReport(name=name, schema=schema, detail="it is nested too deeply") from error
    return typing.cast("T", record)


def load_report(text: str | bytes, name: str = "report.json") -> Report:
    """Read a report; see :func:`load_record` for what is refused."""
    return load_record(Report, text, schema=REPORT_SCHEMA, name=name, check=check_report)


def load_capture(text: str | bytes, name: str = "capture.json") -> Capture:
    """Read a capture; see :func:`load_record` for what is refused."""
    return load_record(Capture, text, schema=CAPTURE_SCHEMA, name=name, check=check_capture)


def decode(data: object, hint: object) -> Any:
    """Turn JSON data into a value of the type that ``hint`` describes, or say where it does not fit."""
    return _decode(data, wanted_of(hint))


def _decode(data: object, wanted: Wanted) -> Any:
    if type(data) in wanted.plain:
        return data
    if data is None:
        raise Mismatch("", f"expected {describe(wanted.options)}, found null")
    if isinstance(data, dict):
        return _decode_object(data, wanted)
    if isinstance(data, list):
        return _decode_list(data, wanted)
    return _decode_scalar(data, wanted.options)


def _decode_list(data: list[object], wanted: Wanted) -> tuple[Any, ...]:
    if not wanted.is_list:
        raise Mismatch("", f"expected {describe(wanted.options)}, found a list")
    values: list[Any] = []
    try:
        for item, inner in zip(data, items_of(wanted, len(data)), strict=True):
            values.append(item if type(item) in inner.plain else _decode(item, inner))
    except Mismatch as error:
        raise error.inside(f"[{len(values)}]") from error.__cause__
    return tuple(values)


def _decode_object(data: dict[str, object], wanted: Wanted) -> Any:
    classes = classes_of(wanted)
    if wanted.is_tagged:
        data = dict(data)
        tag = data.pop(TAG, None)
        if tag == "float" and float in wanted.options:
            return _decode_scalar(data.get("value"), (float,))
        if not isinstance(tag, str) or tag not in classes:
            raise Mismatch("", f'"{TAG}" must be one of {", ".join(sorted(classes))}, found {shown(tag)}')
        cls = classes[tag]
    elif classes:
        (cls,) = classes.values()
    else:
        raise Mismatch("", f"expected {describe(wanted.options)}, found an object")

    keys = keys_of(cls)
    if not data.keys() <= keys.keys():
        unknown = sorted(data.keys() - keys.keys())
        raise Mismatch("", f'unknown key "{unknown[0][:80]}" (a newer version may have written it)')
    values = {}
    name = ""
    try:
        for name, inner in keys.items():
            if name in data:
                item = data[name]
                values[name] = item if type(item) in inner.plain else _decode(item, inner)
    except Mismatch as error:
        raise error.inside(name) from error.__cause__
    if len(values) < len(keys):
        missing = next((name for name in required_keys(cls) if name not in values), None)
        if missing is not None:
            raise Mismatch("", f'the key "{missing}" is missing')
    try:
        return cls(**values)
    except ValueError as error:  # a record refuses a state that must not exist
        raise Mismatch("", str(error)) from error


def _decode_scalar(data: object, options: tuple[Any, ...]) -> Any:
    if float in options and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if isinstance(data, str):
        if float in options and str not in options and data in ("nan", "inf", "-inf"):
            return float(data)
        for option in options:
            if isinstance(option, type) and issubclass(option, enum.Enum) and data in values_of(option):
                return values_of(option)[data]
            if isinstance(option, type) and issubclass(option, Path):
                return Path(data)
    if any(typing.get_origin(option) is typing.Literal and data in typing.get_args(option) for option in options):
        return data
    raise Mismatch("", f"expected {describe(options)}, found {shown(data)}")


def _parse(text: str | bytes, name: str) -> Any:
    def refuse_constant(constant: str) -> object:
        raise Mismatch("", f"it holds {constant}, which is not JSON")

    def refuse_twins(pairs: list[tuple[str, object]]) -> dict[str, object]:
        data = dict(pairs)
        if len(data) != len(pairs):
            raise Mismatch("", "a key occurs twice in one object")
        return data

    def integer(digits: str) -> int:
        if len(digits) > _MOST_DIGITS:
            raise Mismatch("", f"it holds a whole number of {len(digits)} digits")
        return int(digits)

    def number(digits: str) -> float:
        value = float(digits)
        if math.isinf(value):
            raise Mismatch("", f"it holds {digits[:20]}, which is beyond every number")
        return value

    try:
        source = text.decode("utf-8") if isinstance(text, bytes) else text
        if not source.strip():
            raise UnreadableReport(name=name, schema="", detail="it is empty")
        return json.loads(source, parse_constant=refuse_constant, object_pairs_hook=refuse_twins,
                          parse_int=integer, parse_float=number)  # fmt: skip
    except json.JSONDecodeError as error:
        is_cut = error.pos >= len(source.rstrip()) - 1 or error.msg.startswith("Unterminated string")
        place = f"line {error.lineno}, column {error.colno}"
        why = f"it ends early at {place}" if is_cut else f"{error.msg} at {place}"
        raise UnreadableReport(name=name, schema="", detail=why) from error
    except UnicodeDecodeError as error:
        raise UnreadableReport(name=name, schema="", detail=f"byte {error.start:,} is not UTF-8 text") from error
    except (Mismatch, RecursionError, ValueError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise UnreadableReport(name=name, schema="", detail=why) from error


# -- files -----------------------------------------------------------------------------------------------------------------


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader, or a crash half-way, never sees a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(raw)
        umask = os.umask(0)  # mkstemp makes files private; a report is as readable as any other file of the user
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_report(report: Report, path: Path) -> None:
    """Write ``report.json``."""
    write_atomic(path, dump_report(report))


def read_report(path: Path) -> Report:
    """Read ``report.json``."""
    return load_report(read_document(path), str(path))


def write_capture(capture: Capture, path: Path) -> None:
    """Write ``capture.json``, compressed where the name ends in ``.gz``; equal captures give equal bytes."""
    text = dump_capture(capture)
    write_atomic(path, gzip.compress(text.encode(), mtime=0) if path.suffix == ".gz" else text)


def read_capture(path: Path) -> Capture:
    """Read ``capture.json`` or ``capture.json.gz``."""
    return load_capture(read_document(path), str(path))


def read_document(path: Path) -> bytes:
    """Return a document's text, unpacked where the name ends in ``.gz``.

    Raises:
        UnreadableReport: it is missing, no regular file, no gzip, or larger than any of ours.
    """
    try:
        raw = read_regular(path)
    except OSError as error:
        raise UnreadableReport(name=str(path), schema="", detail=error.strerror or "it cannot be read") from error
    if path.suffix != ".gz":
        return raw
    try:
        return unpack(raw)
    except EOFError as error:
        raise UnreadableReport(name=str(path), schema="", detail=f"gzip ends early at byte {len(raw):,}") from error
    except OSError as error:
        detail = error.strerror or f"it is not a gzip file ({error})"
        raise UnreadableReport(name=str(path), schema="", detail=detail) from error
