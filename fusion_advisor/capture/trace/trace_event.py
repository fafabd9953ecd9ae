"""One event of a chrome trace with the fields that are used, decoded without making the others.

msgspec skips the fields that no struct names: 163 MB of JSON take 0.25 s of one core where dicts take 2.8 s. A part of a file
that holds one odd event (a name that is a number, NaN) is decoded to dicts instead, and each dict is then typed alone.
"""

from __future__ import annotations

import contextlib
import math
from decimal import Decimal
from operator import attrgetter
from types import GenericAlias
from typing import Any, cast

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
    """One event; times in microseconds."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: float = -math.inf
    dur: float = 0.0
    pid: str | int | None = None
    tid: str | int | None = None
    args: EventArguments = msgspec.field(default_factory=EventArguments)


_LATE_US = float(1 << 43)
"""Below it (102 days) a float is less than half a nanosecond off. The times of a clock that counts from 1970 become decimals."""
_TIMES = [("ts", Decimal, Decimal("-Infinity")), ("dur", Decimal, Decimal(0))]
_ClockEvent = cast("type[TraceEvent]", msgspec.defstruct("_ClockEvent", _TIMES, bases=(TraceEvent,), gc=False))
_LATEST_US = float(1 << 63)
_time_of = attrgetter("ts")
_decode_events = msgspec.json.Decoder(list[TraceEvent]).decode
_decode_late_events = msgspec.json.Decoder(GenericAlias(list, (_ClockEvent,))).decode
_decode_event = msgspec.json.Decoder(_ClockEvent).decode


def decode_events(text: str) -> list[TraceEvent] | None:
    """Return the events of a JSON array; None where any of them does not have the fields' types, or the text is no JSON."""
    with contextlib.suppress(msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
        events = _decode_events(text)
        return _decode_late_events(text) if max(map(_time_of, events), default=0.0) > _LATE_US else events
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
        found = _decode_event(msgspec.json.encode(event))
    except (msgspec.MsgspecError, UnicodeEncodeError, OverflowError, RecursionError, TypeError) as error:
        raise ValueError(str(error)) from error
    if not abs(float(found.ts)) < _LATEST_US:
        raise ValueError(f"no time: {found.ts}")
    return found
