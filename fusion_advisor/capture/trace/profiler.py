"""Runs a step under torch.profiler, in ranges of our own, and returns its events.

The events come from the chrome trace that torch.profiler exports (its one public, complete form): ``key_averages()`` counts
device time twice, and its op rows hide which kernel ran. Times taken under the profiler are only ever used as shares.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import logging
import operator
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fusion_advisor.capture.trace.chrome_trace import TraceFile
from fusion_advisor.capture.trace.events import MODULE_RANGE, STEP_RANGE, Trace, read_events
from fusion_advisor.timing.alone import alone

_LET_GO = "TEARDOWN_CUPTI"
"""What Kineto goes by when a trace is over."""
_MARKER = b"USDT:"
_OLDER_MEMORY = b"Memory block of unknown size"
"""In what torch warns of where memory is taken back that was given out before it recorded."""
_log = logging.getLogger(__name__)


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
    with alone(), _profiler(on_cuda=on_cuda) as profiler:
        for number in range(steps):
            before()
            if on_cuda:
                torch.cuda.synchronize()
            with torch.profiler.record_function(f"{STEP_RANGE}{number}"):
                step()
                if on_cuda:
                    torch.cuda.synchronize()
    with _exported(profiler) as path:
        trace = read_events(TraceFile(path, is_strict=False).typed_events())
        if save_to is not None:
            _save(path, save_to)
        return trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Memory that an allocator gave out or took back.

    Attributes:
        moment_ns: on the trace's clock.
        address: of the memory.
        change_bytes: negative where it was taken back.
    """

    moment_ns: int
    address: int
    change_bytes: int


def record_memory(step: Callable[[], object], *, on_cuda: bool) -> tuple[Trace, list[Allocation]]:
    """Run ``step`` twice under torch.profiler and record what the second run allocates, in order of time.

    The first run bears what the profiler does when it begins.

    Args:
        step: the work; it must have been warmed up.
        on_cuda: record the device's allocator, not the host's.

    Returns:
        The trace with the second run in a range, and the allocations of both runs.
    """
    with markers_logged(), _profiler(on_cuda=on_cuda, with_memory=True) as profiler:
        step()
        with torch.profiler.record_function(f"{STEP_RANGE}0"):
            step()
            if on_cuda:
                torch.cuda.synchronize()
    with _exported(profiler) as path:
        trace = read_events(TraceFile(path, is_strict=False).typed_events())
        document = json.loads(path.read_text(encoding="utf-8", errors="replace"), strict=False)
    found = [
        Allocation(
            moment_ns=round(event["ts"] * 1000), address=event["args"]["Addr"], change_bytes=event["args"]["Bytes"]
        )
        for event in document["traceEvents"]
        if event.get("name") == "[memory]" and (event["args"]["Device Type"] != 0) is on_cuda
    ]  # fmt: skip
    return trace, sorted(found, key=operator.attrgetter("moment_ns"))


@contextlib.contextmanager
def _exported(profiler: Any) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        yield path


@contextlib.contextmanager
def _profiler(*, on_cuda: bool, with_memory: bool = False) -> Iterator[Any]:
    """Profile while the context lasts, on the host by what torch.profiler wraps: that imports Inductor, which takes 2.7 s."""
    if on_cuda:
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        profiler: Any = torch.profiler.profile(activities=activities, profile_memory=with_memory)
        start, stop = profiler.start, functools.partial(_stop_and_let_go, profiler)
    else:
        profiler = torch.autograd.profiler.profile(use_kineto=True, profile_memory=with_memory)
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
                if line.startswith(_MARKER) or _OLDER_MEMORY in line:
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
                if path and not isinstance(module, torch.jit.ScriptModule):  # which takes no hook
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
