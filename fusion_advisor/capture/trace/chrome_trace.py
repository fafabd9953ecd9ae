"""A chrome trace file, a part at a time: a million events are 300 MB of JSON, and five times that as Python objects.

One call decodes all events that end within a MB: to typed events by msgspec (:mod:`.trace_event`), to dicts by the standard
library. What is kept between calls is the text that is not yet decoded.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import itertools
import json
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Never

from fusion_advisor.capture.trace.trace_event import TraceEvent, decode_events
from fusion_advisor.errors import UnreadableTrace
from fusion_advisor.files.regular_file import open_regular

_CHUNK = 1 << 20
_TAIL = 16
"""A literal, number or escape that is cut off fails at most this many characters before the end of the text."""
_TRIES = 2
"""So many places are tried where a part may end: one may lie in a name (``{lambda()#1}, {lambda()#2}``)."""
_blank = re.compile(r"[ \t\n\r]*").match
_last_end = re.compile(r"(.*\})[ \t\n\r]*,[ \t\n\r]*\{", re.DOTALL).match
"""Matches the end of an object that another object follows."""
_LONGEST = 1 << 27
"""A value of more characters is no event: without a limit a string of zeros that gzip packed would fill the memory."""
_EVENTS = "traceEvents"


@dataclass(frozen=True, slots=True)
class Unpacker:
    """What reads gzip.

    Attributes:
        open: gives the content of a packed file.
        errors: what it raises at damaged data.
    """

    open: Callable[[BinaryIO], gzip.GzipFile]
    errors: tuple[type[Exception], ...]


ZLIB = Unpacker(lambda file: gzip.GzipFile(fileobj=file), (gzip.BadGzipFile, zlib.error))


class TraceFile:
    """Iterates over the events of a trace, compressed or not; each iteration reads the file again.

    Args:
        path: ``.json`` or ``.json.gz``; what the file holds decides, not its name.
        is_strict: refuse control characters inside strings, as JSON does.
        part: so many characters are read and decoded at once.
        unpacker: reads gzip.

    Raises:
        UnreadableTrace: while iterating: the file is missing, cut short, damaged, or no chrome trace.
    """

    def __init__(self, path: Path, *, is_strict: bool = True, part: int = _CHUNK, unpacker: Unpacker = ZLIB) -> None:
        self.path = path
        self._unpacker = unpacker
        self._part = part
        self.facts: dict[str, Any] = {}
        """The trace's other top-level keys (``deviceProperties``, ``record_shapes`` …); complete after an iteration."""
        self.events = 0
        self.read_bytes = 0
        """JSON that the last iteration read."""
        # Times stay text: a float holds a clock that counts from 1970 to a quarter of a microsecond.
        self._decoder = json.JSONDecoder(strict=is_strict, parse_float=str)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield every event as the object that it is in the file."""
        return itertools.chain.from_iterable(self._parts(is_typed=False))

    def typed_events(self) -> Iterator[TraceEvent | dict[str, Any]]:
        """Yield every event with the fields that are used; the dicts of a part that holds an event of other types."""
        return itertools.chain.from_iterable(self.typed_parts())

    def typed_parts(self) -> Iterator[list[TraceEvent | dict[str, Any]]]:
        """Yield what :meth:`typed_events` does, as many events at a time as one call decoded."""
        return self._parts(is_typed=True)

    def _parts(self, *, is_typed: bool) -> Iterator[list[Any]]:
        self.facts, self.events, self.read_bytes = {}, 0, 0
        try:
            with self._opened() as read:
                yield from _Document(self, read, self._decoder, is_typed=is_typed, part=self._part).parts()
        except EOFError as error:
            self.refuse(f"gzip ends early at byte {self.path.stat().st_size:,}", error)
        except self._unpacker.errors as error:
            self.refuse(f"gzip is damaged ({error})", error)
        except OSError as error:
            self.refuse(error.strerror or "it cannot be read", error)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[Callable[[int], bytes]]:
        """Give the function that reads on: so many bytes of JSON, fewer at the end."""
        with open_regular(self.path) as raw:
            is_packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            if not is_packed:
                yield raw.read
                return
            with self._unpacker.open(raw) as packed:
                yield packed.read

    def line_of(self, place: int) -> int:
        """Return the line of a character; the file is read again, since of whole traces nobody asks it."""
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        line = 1
        with self._opened() as read:
            while place > 0 and (text := decode(read(min(place, _CHUNK)))):  # no byte beyond it, where gzip may be damaged
                line += text.count("\n", 0, place)
                place -= len(text)
        return line

    def refuse(self, detail: str, cause: Exception | None = None, known: str = "") -> Never:
        """Say what is wrong with the file, and how far it could be read."""
        before = f"{self.events:,} events before that place are whole" if self.events else ""
        raise UnreadableTrace(name=self.path, detail=detail, known=known or before) from cause


class _Document:
    """The text of one JSON document with a cursor; reads on when a value is cut off."""

    def __init__(
        self, file: TraceFile, read: Callable[[int], bytes], decoder: json.JSONDecoder, *, is_typed: bool, part: int
    ) -> None:
        self._file, self._read, self._decoder, self._is_typed = file, read, decoder, is_typed
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._part = part
        self._text = ""
        self._at = 0
        self._dropped = 0
        """Characters before the text."""
        self._wrong_end = 0
        """Up to here events are decoded one by one."""

    def parts(self) -> Iterator[list[Any]]:
        self._more()
        self._text = self._text.removeprefix(codecs.BOM_UTF8.decode())
        opening = self._next()
        if opening == "[":  # the format's short form: events alone
            yield from self._array()
        elif opening == "{":
            yield from self._object()
        else:
            self._file.refuse("it is empty" if not opening else "it is not JSON")
        if self._next():
            self._file.refuse(f"something follows the trace at line {self._line_of(self._at):,}")

    def _object(self) -> Iterator[list[Any]]:
        has_events = False
        for _ in self._members("}"):
            key = self._value()
            if not isinstance(key, str) or self._next() != ":":
                self._file.refuse(f"a key is expected at line {self._line_of(self._at):,}")
            self._at += 1
            if key == _EVENTS and self._next() == "[":
                has_events = True
                yield from self._array()
            else:
                self._file.facts[key] = self._value()
        if not has_events:
            self._file.refuse(f'it has no "{_EVENTS}", so torch.profiler did not write it')

    def _array(self) -> Iterator[list[Any]]:
        for _ in self._members("]"):
            events = self._many() or [self._one()]
            self._file.events += len(events)
            yield events

    def _one(self) -> dict[str, Any]:
        event = self._value()
        if not isinstance(event, dict):
            self._file.refuse(f"event {self._file.events + 1:,} is no object (line {self._line_of(self._at):,})")
        return event

    def _many(self) -> list[Any]:
        """Decode the events that end within the next part and move past them; none where only one by one will do.

        A part that ends elsewhere than between two events leaves a string or an object open, and the decoder says so.
        """
        if self._at < self._wrong_end:
            return []
        if len(self._text) - self._at < self._part:  # else each part ends in an event that is tried in vain first
            self._more()
        end = self._at + self._part
        for _ in range(_TRIES):
            found = _last_end(self._text, self._at, end)
            if found is None:
                break
            end = found.end(1)
            if self._is_typed and (typed := decode_events(f"[{found[1]}]")):
                self._at = end
                return typed
            with contextlib.suppress(RecursionError, ValueError):  # also where the trace is no JSON: one by one tells the place
                events, after = self._decoder.raw_decode(f"[{found[1]}]")
                if set(map(type, events)) == {dict}:
                    self._at += after - 2  # at the bracket that was added here, or at the array's own before it
                    return events
            self._wrong_end = max(self._wrong_end, end)
        return []

    def _members(self, closing: str) -> Iterator[None]:
        """Stop at each member of the object or array that begins here, and after its end."""
        self._at += 1
        sign = self._next()
        while sign != closing:
            yield
            sign = self._next()
            if sign == ",":
                self._at += 1
                self._next()
            elif sign != closing:
                place = f"line {self._line_of(self._at):,}"
                self._file.refuse(f"it is not JSON: a comma is missing at {place}" if sign else f"it ends early at {place}")
        self._at += 1

    def _next(self) -> str:
        """Skip blanks and return the character at the cursor; empty at the end of the file."""
        while True:
            self._at = _blank(self._text, self._at).end()  # type: ignore[union-attr] # it matches the empty text too
            if self._at < len(self._text) or not self._more():
                return self._text[self._at : self._at + 1]

    def _value(self) -> Any:
        """Decode the value at the cursor and move past it."""
        self._next()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                why, place = error.msg, error.pos
            except (RecursionError, ValueError) as error:  # an integer of thousands of digits is a ValueError
                self._file.refuse(
                    f"it is nested too deeply, or holds a number too long, at line {self._line_of(self._at):,}", error
                )
            else:
                if end + len("e+") < len(self._text) or not self._more():
                    self._at = end
                    return value
                continue  # a number may go on: of 1.5e+3 the text may hold 1, or 1.5e+, of which 1.5 is a number too
            is_cut = why.startswith("Unterminated string") or place >= len(self._text) - _TAIL
            if is_cut and self._more():
                continue
            self._refuse(why, place, is_cut=is_cut)

    def _refuse(self, why: str, place: int, *, is_cut: bool) -> Never:
        line = f"line {self._line_of(place):,}"
        if why.startswith("Invalid control character"):
            known = "some versions of torch write names without escaping them (pytorch#130622)"
            self._file.refuse(f"JSON control character at {line}", known=known)
        self._file.refuse(f"it ends early at {line}" if is_cut else f"it is not JSON: {why[:1].lower()}{why[1:]} at {line}")

    def _more(self) -> bool:
        """Drop what was read and add as much as is waiting again, so that a long value is not decoded over and over."""
        rest = self._text[self._at :]
        if len(rest) > _LONGEST:
            self._file.refuse(f"a value at line {self._line_of(self._at):,} is longer than {_LONGEST:,} characters")
        packed = self._read(max(self._part, len(rest)))
        self._file.read_bytes += len(packed)
        chunk = self._decode(packed, final=not packed)
        if chunk:
            self._dropped += self._at
            self._wrong_end -= self._at
            self._text, self._at = rest + chunk, 0
        return bool(packed) or bool(chunk)

    def _line_of(self, place: int) -> int:
        return self._file.line_of(self._dropped + place)
