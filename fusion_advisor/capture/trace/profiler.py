"""One profiled step as raw events: kernels, the calls that launched them, CPU ops and our own ranges.

The events come from the chrome trace that torch.profiler exports (its one public, complete form): ``key_averages()`` counts
device time twice, and its op rows hide which kernel ran. Times taken under the profiler are only ever used as shares.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import logging
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from fusion_advisor.capture.trace.chrome_trace import TraceFile
from fusion_advisor.capture.trace.trace_event import NOT_RECORDED, EventArguments, TraceEvent, typed
from fusion_advisor.records import TensorMeta

STEP_RANGE = "fa:step:"
"""A recorded step's range; in traces made elsewhere it is ``ProfilerStep#``."""
KERNEL_RANGE = "fa:kernel:"
"""Stands for a fused kernel on a CPU, where it is no ATen op."""
MODULE_RANGE = "fa:module:"
"""The call of a submodule; its path follows."""
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
_LET_GO = "TEARDOWN_CUPTI"
"""What Kineto goes by when a trace is over."""
_NS_PER_US = 1000
_MARKER = b"USDT:"
_log = logging.getLogger(__name__)


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


def record(
    step: Callable[[], object],
    *,
    steps: int,
    on_cuda: bool,
    save_to: Path | None = None,
    before: Callable[[], object] = lambda: None,
) -> Trace:
    """Run ``step`` under torch.profiler ``steps`` times, each in a range ``fa:step:<n>``.

    Args:
        step: the work; it must have been warmed up.
        steps: how many times it is recorded.
        on_cuda: record device activity.
        save_to: keep the raw trace here, gzipped (it opens in Perfetto).
        before: called ahead of each step, outside its range (it puts back what a step moves on).
    """
    with _profiler(on_cuda=on_cuda) as profiler:
        for number in range(steps):
            before()
            if on_cuda:
                torch.cuda.synchronize()
            with torch.profiler.record_function(f"{STEP_RANGE}{number}"):
                step()
                if on_cuda:
                    torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace = read_events(TraceFile(path, is_strict=False).typed_events())
        if save_to is not None:
            _save(path, save_to)
        return trace


@contextlib.contextmanager
def _profiler(*, on_cuda: bool) -> Iterator[Any]:
    """Profile while the context lasts, on the host by what torch.profiler wraps: that imports Inductor, which takes 2.7 s."""
    if on_cuda:
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        profiler: Any = torch.profiler.profile(activities=activities, acc_events=True)
        start, stop = profiler.start, functools.partial(_stop_and_let_go, profiler)
    else:
        profiler = torch.autograd.profiler.profile(use_kineto=True)
        start, stop = profiler.__enter__, functools.partial(profiler.__exit__, None, None, None)
    with markers_logged():
        start()
    try:
        yield profiler
    finally:
        with markers_logged():
            stop()


def _stop_and_let_go(profiler: Any) -> None:
    """Stop, and have CUPTI let go of the process: what is timed afterwards is to run as it does where nobody profiles.

    Kineto leaves CUPTI attached unless a variable asks for the opposite, because letting go crashed with CUDA graphs before CUDA
    12.6. On an H200 (torch 2.11) a hundred launches took 1.41 ms in a process that had profiled, 1.00 in one that had not, and a
    graph of them 277 µs, 26 of them on the host, instead of 235 and 4. Let go of: 0.97 ms, and 253 and 3 µs.
    """
    version = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    if _LET_GO in os.environ or version < (12, 6):
        profiler.stop()
        return
    os.environ[_LET_GO] = "1"
    try:
        profiler.stop()
        torch.cuda.synchronize()  # a call that returns is where it lets go
    finally:
        del os.environ[_LET_GO]


def _save(exported: Path, save_to: Path) -> None:
    """Keep a trace as strict ASCII JSON without the host's name; Kineto writes the name, and control characters as they come."""
    document = json.loads(exported.read_text(encoding="utf-8", errors="replace"), strict=False)
    document.pop("host_name", None)
    save_to.parent.mkdir(parents=True, exist_ok=True)
    save_to.unlink(missing_ok=True)  # a link that lies there is replaced, not followed
    with gzip.open(save_to, "wt", encoding="ascii", compresslevel=4) as packed:
        # dumps uses the encoder written in C, dump does not
        packed.write(json.dumps(document, ensure_ascii=True))


@contextlib.contextmanager
def markers_logged() -> Iterator[None]:
    """Send Kineto's ``USDT:`` lines to the log instead of the terminal; whatever else is written to stderr still gets there.

    Kineto writes them to file descriptor 2 at a level above its errors, so its own switch (``KINETO_LOG_LEVEL``) would hide both.
    """
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    try:
        terminal = os.dup(2)
    except OSError:  # no stderr at all
        yield
        return
    with tempfile.TemporaryFile() as captured:
        os.dup2(captured.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(terminal, 2)
            os.close(terminal)
            captured.seek(0)
            for line in captured.read().splitlines(keepends=True):
                if line.startswith(_MARKER):
                    _log.debug(line.decode(errors="replace").rstrip())
                else:
                    os.write(2, line)


@contextlib.contextmanager
def module_ranges(model: torch.nn.Module, open_range: Callable[[str], contextlib.AbstractContextManager[Any]]) -> Iterator[None]:
    """Open a range around every call of a submodule, so that a trace shows ``model.layers.3.mlp`` above its ops.

    The ranges hang on forward hooks, which are taken off again. A model that runs otherwise with hooks than without gets none:
    torch's own transformer layers leave their fast path, and compiled modules are compiled again.

    Args:
        model: called in the block, from one thread.
        open_range: makes the range of a name (``torch.profiler.record_function``, say).
    """
    ranges: list[contextlib.AbstractContextManager[Any]] = []
    handles: list[Any] = []

    def entering(name: str) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            ranges.append(open_range(name))
            ranges[-1].__enter__()

        return enter

    def leave(*_: Any) -> None:
        ranges.pop().__exit__(None, None, None)

    try:
        if not any(_minds_hooks(module) for module in model.modules()):
            for path, module in model.named_modules():
                if path:
                    handles.append(module.register_forward_pre_hook(entering(f"{MODULE_RANGE}{plain_name(path)}")))
                    handles.append(module.register_forward_hook(leave, always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _minds_hooks(module: torch.nn.Module) -> bool:
    fast = torch.nn.TransformerEncoder, torch.nn.TransformerEncoderLayer, torch.nn.MultiheadAttention
    is_compiled = hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
    return isinstance(module, fast) or is_compiled


def plain_name(path: str) -> str:
    """Return a module's path as a range may carry it: Kineto writes quotes unescaped and drops what is not ASCII."""
    return re.sub(r'[^ -~]|["\\]', "?", path)


def read_events(raw_events: Iterable[TraceEvent | dict[str, Any]]) -> Trace:
    """Sort a chrome trace's events; annotations mirrored onto the device are left out (they count twice)."""
    kinds: dict[str, list[Event]] = {kind: [] for kind in ("kernel", "launch", "range", "cpu_op")}
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
        events.sort(key=lambda event: (event.start_ns, -event.duration_ns))
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
        return _nanoseconds(event.ts)
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
    return "range" if category == _ANNOTATION and name.startswith(_RANGES) else ""


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
    duration_ns = _nanoseconds(raw.dur)
    if duration_ns < 0:
        raise ValueError("a negative duration")
    stream, device, place = arguments.stream, arguments.device, (raw.pid, raw.tid)
    thread = threads.get(place)
    if thread is None:
        thread = threads.setdefault(place, f"{raw.pid}/{raw.tid}")
    # By position: with names an event takes 2.8 µs instead of 2.3.
    return Event(
        # A million events have a few hundred names: each is stored once.
        sys.intern(raw.name),
        _nanoseconds(raw.ts),
        duration_ns,
        thread,
        arguments.correlation,
        arguments.external,
        stream if type(stream) is int else 0,
        device if type(device) is int else 0,
        arguments.grid,
        arguments.block,
        arguments.sequence,
        _inputs(arguments, shapes),
    )


def _nanoseconds(microseconds: msgspec.Raw) -> int:
    """Convert a trace's time; as text it keeps the nanoseconds that a float loses on a clock that counts from 1970."""
    text = bytes(microseconds)
    if text[-4:-3] == b".":
        try:
            return int(text.replace(b".", b""))
        except ValueError:  # 1.0e5, or a text in quotes
            pass
    return _of_any_number(text.strip(b'"'))


def _of_any_number(text: bytes) -> int:
    return int(text.replace(b".", b"")) if text[-4:-3] == b"." and b"e" not in text else round(float(text) * _NS_PER_US)


def _inputs(
    arguments: EventArguments, shapes: dict[bytes, tuple[TensorMeta | None, ...]]
) -> tuple[TensorMeta | None, ...] | None:
    """Return an op's inputs, None where they were not recorded; equal ones are one object."""
    if arguments.input_dims is NOT_RECORDED:
        return None
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
