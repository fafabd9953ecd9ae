"""CUDA graphs of one forward: recorded at the second call on the same memory, replayed at every later one.

An exported package has a copy of this file. A graph reads and writes fixed addresses: parameters, and a cache's tensors. So there
is one for each set of addresses. The call's own tensors are copied into memory of the graph before each replay, and results are
copied out of it after it. Recording runs nothing, so a cache is written once for each call. The first call runs kernel by kernel,
because it compiles and allocates what must not be in a graph.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

import torch

_address = torch.Tensor.data_ptr

MOST_GRAPHS = 8
"""Sets of addresses with a graph; calls on any others run kernel by kernel."""


class Recorder(Protocol):
    """Records what runs on a device."""

    def is_recording(self) -> bool:
        """Whether somebody records a graph around this call."""

    def record(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """Record a function without running its kernels; return its output and what replays them."""


class CudaRecorder:
    """Records CUDA graphs by torch."""

    def is_recording(self) -> bool:
        """Whether the current stream is recorded."""
        return torch.cuda.is_current_stream_capturing()

    def record(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """Record on a stream of its own.

        Raises:
            RuntimeError: something in it cannot be recorded.
        """
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            output = run()
        return output, graph.replay


@dataclasses.dataclass(frozen=True, eq=False)
class Late:
    """Stands for a large result in a recorded call. The result is made after each replay, in memory of the caller's.

    Inside the graph it would be written to the graph's memory and copied out of it.
    """

    function: Callable[..., torch.Tensor]
    given: tuple[Any, ...]
    """What it is made of; tensors among it are the model's, or what the graph wrote."""

    @classmethod
    def of(cls, function: Callable[..., torch.Tensor], *given: Any) -> Late:
        """Note a call instead of making it."""
        return cls(function, given)


def at_once(function: Callable[..., torch.Tensor], *given: Any) -> torch.Tensor:
    """Make a call that a CUDA graph would leave out."""
    return function(*given)


@dataclasses.dataclass(frozen=True)
class _Recorded:
    """A graph with the memory that it reads and writes."""

    call: dict[str, Any]
    """The arguments that it was recorded with: copies, and objects whose tensors lie at the key's addresses."""
    output: Any
    replay: Callable[[], None]
    kept: frozenset[int]
    """Addresses of memory that outlives the graph: the model's, and what the call's objects hold."""
    saved: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()
    """What is put back after a replay in vain, each with the copy that the graph begins with."""


@dataclasses.dataclass(frozen=True)
class Started:
    """A call whose graph is under way.

    Attributes:
        results: hands out its results; until then nobody has them.
        undo: puts back what the graph writes and the same call would not write again.
    """

    results: Callable[[], Any]
    undo: Callable[[], None]


class Graphs:
    """The graphs of one model's forward.

    Args:
        recorder: records.
        tensors: of the model: parameters and buffers.
        written: paths of the call's tensors that the forward writes into.
        note: gets the reason why a call has no graph.
        saved: paths of those that a replay in vain must put back: with a cache's counters as they were, the same call appends its
            rows at the same places. None: what it writes cannot be undone so.
    """

    def __init__(
        self, recorder: Recorder, tensors: Collection[torch.Tensor], written: Collection[str], note: Callable[[str], None],
        saved: Collection[str] | None = None,
    ) -> None:  # fmt: skip
        self._recorder = recorder
        self._tensors = tensors
        self._written = frozenset(written)
        self._note = note
        self._saved = saved
        self._known: dict[tuple[int, ...], _Recorded | str] = {}
        """By addresses: a graph, or why there is none; empty after the first call."""

    def run(
        self,
        call: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor],
        forward: Callable[[Mapping[str, Any]], Any],
        recorded: Callable[[Mapping[str, Any]], Any] | None = None,
    ) -> Any:
        """Make a call, by a graph where there is one.

        Args:
            call: arguments by name.
            tensors: of the call by path: ``input_ids``, ``cache.layers.0.keys``.
            forward: makes the call launch by launch.
            recorded: makes what a graph holds of the call; large results are :class:`Late`. None: ``forward``.
        """
        if self._recorder.is_recording():
            return forward(call)
        key, copied = self._place(tensors)
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= MOST_GRAPHS:
                self._note(f"no CUDA graph: {MOST_GRAPHS} other sets of caches have one")
                return forward(call)
            self._known[key] = ""
            return forward(call)
        if isinstance(known, str):
            known = known or self._recorded(key, call, tensors, copied, recorded or forward)
        if isinstance(known, str):
            self._note(known)
            return forward(call)
        return self._replayed(known, call, copied)()

    def started(self, call: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Started | None:
        """Replay a call's graph where it has one and can be undone: the model can be looked at while the GPU works.

        Args:
            call: as for :meth:`run`.
            tensors: as for :meth:`run`.
        """
        if self._recorder.is_recording() or (self._written and self._saved is None):
            return None
        key, copied = self._place(tensors)
        known = self._known.get(key)
        if not isinstance(known, _Recorded):
            return None
        return Started(self._replayed(known, call, copied), functools.partial(_copy, known.saved, backwards=True))

    def _replayed(self, known: _Recorded, call: Mapping[str, Any], copied: Collection[str]) -> Callable[[], Any]:
        for name in copied:
            known.call[name].copy_(call[name])
        known.replay()
        return lambda: _handed_out(known, call, copied)

    def _place(self, tensors: Mapping[str, torch.Tensor]) -> tuple[tuple[int, ...], list[str]]:
        """Return the addresses that a call's graph would read and write, and the names of what is copied into it."""
        copied = [name for name in tensors if "." not in name and name not in self._written]
        fixed = [tensor for name, tensor in tensors.items() if name not in copied]
        return tuple(map(_address, itertools.chain(self._tensors, fixed))), copied

    def _recorded(
        self, key: tuple[int, ...], call: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], copied: Collection[str],
        forward: Callable[[Mapping[str, Any]], Any],
    ) -> _Recorded | str:  # fmt: skip
        with torch.inference_mode(False):  # they are written in later calls, in no_grad too
            own = {**call, **{name: torch.empty_like(call[name]).copy_(call[name]) for name in copied}}
            saved = tuple((tensors[name], torch.empty_like(tensors[name])) for name in self._saved or ())

        def run() -> Any:
            _copy(saved)
            return forward(own)

        try:
            output, replay = self._recorder.record(run)
            held = [tensor for name, value in own.items() if name not in copied for tensor in _tensors_in(value)]
            kept = frozenset(tensor.untyped_storage().data_ptr() for tensor in (*self._tensors, *held))
            found: _Recorded | str = _Recorded(own, output, replay, kept, saved)
        except RuntimeError as error:  # nothing ran: the call can still be made
            found = f"no CUDA graph: {str(error).partition(chr(10))[0]}"
        self._known[key] = found
        return found


def _copy(saved: tuple[tuple[torch.Tensor, torch.Tensor], ...], *, backwards: bool = False) -> None:
    """Copy tensors to what keeps them, or back; in one launch."""
    if saved:
        own, copies = [one for one, _ in saved], [copy for _, copy in saved]
        torch._foreach_copy_(own if backwards else copies, copies if backwards else own)


def _handed_out(recorded: _Recorded, call: Mapping[str, Any], copied: Collection[str]) -> Any:
    """Return the output of a call: copies of what the graph wrote, which the next replay overwrites.

    What is an argument, or a view of one, is the caller's own. Results that share memory share a copy.
    """
    given = {id(value): call[name] for name, value in recorded.call.items()}
    of_caller = {recorded.call[name].untyped_storage().data_ptr(): call[name] for name in copied}
    copies: dict[int, torch.Tensor] = {}
    made_late: dict[int, torch.Tensor] = {}

    def handed(value: Any) -> Any:
        if id(value) in given and not isinstance(value, _PLAIN):
            return given[id(value)]
        if isinstance(value, Late):
            if id(value) not in made_late:
                made_late[id(value)] = value.function(*value.given)
            return made_late[id(value)]
        if not isinstance(value, torch.Tensor):
            return value
        address = value.untyped_storage().data_ptr()
        if address in recorded.kept:
            return value
        if address in of_caller:
            base = of_caller[address]
            return base.as_strided(value.shape, value.stride(), base.storage_offset() + value.storage_offset())
        if address not in copies:
            whole = torch.empty(0, dtype=torch.uint8, device=value.device).set_(value.untyped_storage())
            copies[address] = whole.clone()
        made = torch.empty(0, dtype=value.dtype, device=value.device)
        return made.set_(copies[address].untyped_storage(), value.storage_offset(), value.shape, value.stride())

    return _mapped(recorded.output, handed)


_PLAIN = (bool, int, float, str, type(None))


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return an output with every leaf changed."""
    if type(value) in (list, tuple):
        return type(value)(_mapped(item, change) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(item, change) for item in value))
    if type(value) is dict:
        return {name: _mapped(item, change) for name, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, Late)):
        fields = {name: getattr(value, name) for name in _field_names(type(value))}
        return type(value)(**{name: _mapped(item, change) for name, item in fields.items() if item is not None})
    return change(value)


@functools.cache
def _field_names(kind: Any) -> tuple[str, ...]:
    return tuple(one.name for one in dataclasses.fields(kind) if one.init)


def _tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    inner = value if isinstance(value, (list, tuple)) else list(vars(value).values()) if hasattr(value, "__dict__") else []
    return [] if isinstance(value, type) else [tensor for item in inner for tensor in _tensors_in(item)]
