"""The events of one or more profiled steps, read from a chrome trace: kernels, launches, CPU ops and our own ranges.

In: decoded events of ``chrome_trace``. Out: a ``Trace`` of sorted events with times in nanoseconds. Nothing here needs torch.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from fusion_advisor.capture.trace.trace_event import NOT_RECORDED, EventArguments, TraceEvent, typed
from fusion_advisor.records import TensorMeta

STEP_RANGE = "fa:step:"
"""A recorded step's range; in traces made elsewhere it is ``ProfilerStep#``."""
KERNEL_RANGE = "fa:kernel:"
"""Stands for a fused kernel on a CPU, where it is no ATen op."""
MODULE_RANGE = "fa:module:"
"""The call of a submodule; its path follows."""
GLOO_RANGE = "gloo:"
"""A collective between CPUs, on a thread of the process group until it ends; the op that asks for it returns at once."""
_STEPS = (STEP_RANGE, "ProfilerStep#")
_RANGES = ("fa:", *_STEPS)
_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_ANNOTATION = "user_annotation"
_RUNTIME = frozenset({"cuda_runtime", "cuda_driver"})
_USED = _DEVICE | _RUNTIME | {_ANNOTATION, "cpu_op"}
_LAUNCHING = ("LaunchKernel", "LaunchCooperativeKernel", "GraphLaunch", "Memcpy", "Memset")
_DTYPES = {
    "float": "float32",
    "double": "float64",
    "c10::Half": "float16",
    "c10::BFloat16": "bfloat16",
    "long": "int64",
    "long int": "int64",
    "int": "int32",
    "short": "int16",
    "signed char": "int8",
    "unsigned char": "uint8",
    "bool": "bool",
}
"""Names of dtypes in a trace."""
_NS_PER_US = 1000
_KINDS = ("kernel", "launch", "range", "cpu_op")
_start_of = operator.itemgetter(1)
_duration_of = operator.itemgetter(2)
_new = tuple.__new__
"""Makes an event in half the time of its class, which would only put the values into a tuple again."""


class Event(NamedTuple):
    """One event of a trace; times in nanoseconds on the trace's own clock.

    A trace has hundreds of thousands: as frozen dataclasses they would take as long to make as their JSON to decode.
    """

    name: str
    start_ns: int
    duration_ns: int
    thread: str
    correlation: int = -1
    """Joins a kernel to the call that launched it."""
    external: int = -1
    """Joins a kernel to the innermost CPU op it was launched from."""
    stream: int = 0
    device: int = 0
    grid: tuple[int, ...] = ()
    block: tuple[int, ...] = ()
    sequence: int = -1
    """Autograd's number: of the node that a forward op makes next, or that an op of the backward pass evaluates."""
    inputs: tuple[TensorMeta | None, ...] | None = None
    """Of a CPU op recorded with its shapes; None stands for what is no single tensor."""

    @property
    def end_ns(self) -> int:
        """End of the event."""
        return self.start_ns + self.duration_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The events of one or more steps, each list in order of time."""

    kernels: tuple[Event, ...]
    launches: tuple[Event, ...]
    ranges: tuple[Event, ...]
    """Our own ``fa:`` ranges, and the steps of torch.profiler's schedule."""
    cpu_ops: tuple[Event, ...]
    unreadable: int = 0
    """Events that may be of these kinds, but have no usable name, category or time."""


def read_events(raw_events: Iterable[TraceEvent | dict[str, Any]]) -> Trace:
    """Sort a chrome trace's events; annotations mirrored onto the device are left out (they count twice)."""
    kinds: dict[str, list[Event]] = {kind: [] for kind in _KINDS}
    shapes: dict[bytes, tuple[TensorMeta | None, ...]] = {}
    threads: dict[tuple[object, object], str] = {}
    unreadable = 0
    for raw in raw_events:
        try:
            event = raw if isinstance(raw, TraceEvent) else _typed(raw)
            if event is not None and event.ph == "X" and (kind := _kind(event.cat, event.name)):
                kinds[kind].append(_event(event, shapes, threads))
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
            unreadable += 1
    for events in kinds.values():
        events.sort(key=_duration_of, reverse=True)
        events.sort(key=_start_of)
    return Trace(
        kernels=tuple(kinds["kernel"]),
        launches=tuple(kinds["launch"]),
        ranges=tuple(kinds["range"]),
        cpu_ops=tuple(kinds["cpu_op"]),
        unreadable=unreadable,
    )


def is_used(raw: TraceEvent | dict[str, Any]) -> bool:
    """Whether :func:`read_events` keeps an event, or counts it as unreadable."""
    if isinstance(raw, TraceEvent):
        return raw.ph == "X" and bool(_kind(raw.cat, raw.name))
    return raw.get("ph") == "X" and isinstance(raw.get("cat"), str) and raw["cat"] in _USED


def start_of(raw: TraceEvent | dict[str, Any]) -> int:
    """Return when an event began, in nanoseconds on the trace's clock; 0 where it does not tell."""
    try:
        event = raw if isinstance(raw, TraceEvent) else typed(raw)
        return round(event.ts * _NS_PER_US)
    except (ValueError, OverflowError):
        return 0


def _typed(raw: dict[str, Any]) -> TraceEvent | None:
    """Return a decoded object as an event; None where its kind is not used."""
    if raw.get("ph") == "X" and not isinstance(raw.get("cat", ""), str):
        raise ValueError("a category that is no text")
    return typed(raw) if is_used(raw) else None


@functools.cache
def _kind(category: str, name: str) -> str:
    """Return the list that an event belongs to; empty where none does."""
    if category in _DEVICE:
        return "kernel"
    if category == "cpu_op":
        return category
    if category in _RUNTIME and _is_launching(name):
        return "launch"
    if category != _ANNOTATION:
        return ""
    return "range" if name.startswith(_RANGES) else "cpu_op" if name.startswith(GLOO_RANGE) else ""


def _is_launching(name: str) -> bool:
    return any(word in name for word in _LAUNCHING)


def is_step(event: Event) -> bool:
    """Whether a range is one step of the recorded work."""
    return event.name.startswith(_STEPS)


def is_kernel(event: Event) -> bool:
    """Whether a range stands for a fused kernel."""
    return event.name.startswith(KERNEL_RANGE)


def _event(
    raw: TraceEvent, shapes: dict[bytes, tuple[TensorMeta | None, ...]], threads: dict[tuple[object, object], str]
) -> Event:
    arguments = raw.args
    duration_ns = round(raw.dur * _NS_PER_US)
    if duration_ns < 0:
        raise ValueError("a negative duration")
    stream, device, place = arguments.stream, arguments.device, (raw.pid, raw.tid)
    thread = threads.get(place)
    if thread is None:
        thread = threads.setdefault(place, f"{raw.pid}/{raw.tid}")
    return _new(
        Event,
        (
            sys.intern(raw.name),  # a million events have a few hundred names: each is stored once
            round(raw.ts * _NS_PER_US),
            duration_ns,
            thread,
            arguments.correlation,
            arguments.external,
            stream if type(stream) is int else 0,
            device if type(device) is int else 0,
            arguments.grid,
            arguments.block,
            arguments.sequence,
            None if arguments.input_dims is NOT_RECORDED else _inputs(arguments, shapes),
        ),
    )


def _inputs(arguments: EventArguments, shapes: dict[bytes, tuple[TensorMeta | None, ...]]) -> tuple[TensorMeta | None, ...]:
    """Return an op's recorded inputs; equal ones are one object."""
    texts = [bytes(raw) for raw in (arguments.input_dims, arguments.input_types, arguments.input_strides)]
    key = b"\0".join(texts)
    if key not in shapes:
        dims, types, strides = (msgspec.json.decode(text) if text else () for text in texts)
        known = []
        for number, (shape, kind) in enumerate(zip(dims, types, strict=False)):
            stride = strides[number] if number < len(strides) else ()
            is_tensor = kind in _DTYPES and all(type(size) is int for size in (*shape, *stride))
            known.append(TensorMeta(shape=tuple(shape), stride=tuple(stride), dtype=_DTYPES[kind]) if is_tensor else None)
        shapes[key] = tuple(known)
    return shapes[key]
