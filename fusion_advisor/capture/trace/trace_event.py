"""One event of a chrome trace with the fields that are used, decoded without making the others.

msgspec skips the fields that no struct names: 163 MB of JSON take 0.25 s of one core where dicts take 2.8 s. A part of a file
that holds one odd event (a name that is a number, NaN) is decoded to dicts instead, and each dict is then typed alone.
"""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec

NOT_RECORDED = msgspec.Raw(b"")


class EventArguments(msgspec.Struct, gc=False):
    """``args`` of an event; texts of arrays stay undecoded until they are asked for."""

    correlation: int = -1
    external: int = msgspec.field(default=-1, name="External id")
    sequence: int = msgspec.field(default=-1, name="Sequence number")
    stream: Any = 0
    device: Any = 0
    grid: tuple[int, ...] = ()
    block: tuple[int, ...] = ()
    input_dims: msgspec.Raw = msgspec.field(default=NOT_RECORDED, name="Input Dims")
    input_types: msgspec.Raw = msgspec.field(default=NOT_RECORDED, name="Input type")
    input_strides: msgspec.Raw = msgspec.field(default=NOT_RECORDED, name="Input Strides")


class TraceEvent(msgspec.Struct, gc=False):
    """One event; the texts of its times keep the nanoseconds that a float loses on a clock that counts from 1970."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: msgspec.Raw = msgspec.Raw(b"")
    dur: msgspec.Raw = msgspec.Raw(b"0")
    pid: str | int | None = None
    tid: str | int | None = None
    args: EventArguments = msgspec.field(default_factory=EventArguments)


_decode_events = msgspec.json.Decoder(list[TraceEvent]).decode
_decode_event = msgspec.json.Decoder(TraceEvent).decode


def decode_events(text: str) -> list[TraceEvent] | None:
    """Return the events of a JSON array; None where any of them does not have the fields' types, or the text is no JSON."""
    with contextlib.suppress(msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
        return _decode_events(text)
    return None


def typed(event: dict[str, Any]) -> TraceEvent:
    """Return a decoded object as an event.

    Raises:
        ValueError: a field that is used has no usable type.
    """
    name = event.get("name")
    if isinstance(name, str):  # JSON may hold half a surrogate pair, and UTF-8 may not
        event = event | {"name": name.encode("utf-8", "backslashreplace").decode()}
    try:
        return _decode_event(msgspec.json.encode(event))
    except (msgspec.MsgspecError, UnicodeEncodeError, OverflowError, RecursionError, TypeError) as error:
        raise ValueError(str(error)) from error
