"""CUDA graphs of one forward: recorded at the second call on the same memory, replayed at every later one.

An exported package has a copy of this file. A graph reads and writes fixed addresses: parameters, and a cache's tensors. So there
is one for each set of addresses. The call's own tensors are copied into memory of the graph before each replay, and results are
copied out of it after it. Recording runs nothing, so a cache is written once for each call. The first call runs kernel by kernel,
because it compiles and allocates what must not be in a graph.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import torch

from ._outputs import Given, Late, Make, Outlets, storage_of

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
    """Records CUDA graphs by torch.

    Args:
        replace: puts kernels in place of a captured graph's memsets, which are launched more slowly. A graph that it fails at is
            recorded again without it.
    """

    def __init__(self, replace: Callable[[Any], int] | None = None) -> None:
        self._replace = replace

    def is_recording(self) -> bool:
        """Whether the current stream is recorded."""
        return torch.cuda.is_current_stream_capturing()

    def stream(self, device: int) -> int:
        """Return the driver's handle of a device's current stream.

        Args:
            device: its number.
        """
        own = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        return int(torch.cuda.current_stream(device).cuda_stream if own is None else own(device))

    def record(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """Record on a stream of its own.

        Raises:
            RuntimeError: something in it cannot be recorded.
        """
        torch.cuda.synchronize()
        try:
            graph = torch.cuda.CUDAGraph(keep_graph=True)
        except TypeError:  # an older torch instantiates each graph at once
            self._replace = None
        if self._replace is None:
            graph = torch.cuda.CUDAGraph()
        # A workspace of GEMMs that was made for another graph may be freed with it.
        clear_workspaces = getattr(torch._C, "_cuda_clearCublasWorkspaces", int)
        clear_workspaces()
        try:
            # Where a capture fails, torch.cuda.graph leaves its own stream current.
            with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph, capture_error_mode="thread_local"):
                output = run()
        finally:
            clear_workspaces()
        if self._replace is not None:
            try:
                self._replace(graph)
            except (RuntimeError, TypeError, AttributeError):  # the last two: bindings of another CUDA
                self._replace = None
                return self.record(run)
            graph.instantiate()
        return output, graph.replay


@dataclasses.dataclass(frozen=True, eq=False)
class _Recorded:
    """A graph with the memory that it reads and writes."""

    statics: tuple[tuple[str, torch.Tensor], ...]
    """Arguments that are copied into it, with the memory that they are copied to."""
    objects: tuple[Any, ...]
    """The other arguments: what the graph writes into must live as long as it does."""
    replay: Callable[[], None]
    memories: tuple[torch.Tensor, ...]
    """What results are copied from."""
    late: tuple[Late, ...]
    make: Make
    """Makes the output."""
    addresses: list[int]
    """Of the model's tensors."""
    gone: list[Any]
    """What was freed since, of the memory of these."""
    references: tuple[Any, ...]
    saved: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()
    """What is put back after a replay in vain, each with the copy that the graph begins with."""

    def launch(self, call: Mapping[str, Any]) -> None:
        """Copy a call's tensors in and replay."""
        if len(self.statics) == 1:
            ((name, static),) = self.statics
            static.copy_(call[name])
        elif self.statics:  # in one launch where they have one dtype
            torch._foreach_copy_([static for _, static in self.statics], [call[name] for name, _ in self.statics])
        self.replay()

    def results(self, call: Mapping[str, Any], copies: Sequence[torch.Tensor]) -> Any:
        """Return the output of a call: what the next replay overwrites is copied, and what is an argument is the caller's own."""
        return self.make(Given(call, copies, [one.function(*one.given) for one in self.late]))

    def copies(self) -> list[torch.Tensor]:
        """Copy what results are made of."""
        return [one.clone() for one in self.memories]


class Started:
    """A call whose graph is under way; until its results are asked for, nobody has them.

    Args:
        recorded: its graph, launched.
        call: its arguments.
    """

    __slots__ = ("_call", "_copies", "_recorded")

    def __init__(self, recorded: _Recorded, call: Mapping[str, Any]) -> None:
        self._recorded, self._call = recorded, call
        self._copies = recorded.copies()

    def is_for(self, addresses: list[int]) -> bool:
        """Whether the graph reads a model whose tensors lie there: parameters, then buffers."""
        return addresses == self._recorded.addresses

    def results(self) -> Any:
        """Hand out the output."""
        return self._recorded.results(self._call, self._copies)

    def undo(self) -> None:
        """Put back what the graph writes and the same call would not write again."""
        _copy(self._recorded.saved, backwards=True)


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
        self, recorder: Recorder, tensors: Sequence[torch.Tensor], written: Collection[str], note: Callable[[str], None],
        saved: Collection[str] | None = None,
    ) -> None:  # fmt: skip
        self._recorder = recorder
        self._tensors = tensors
        self._written = frozenset(written)
        self._passed = [name for name in written if "." not in name]
        self._note = note
        self._saved = saved
        self._lock = threading.RLock()
        self._device = next((one.device.index or 0 for one in tensors), 0)
        self._stream_of: Callable[[int], int] = getattr(recorder, "stream", int)
        self._stream: int | None = None
        """Of the first call: a graph's memory is written and read in its order."""
        self._known: dict[tuple[int, ...], _Recorded | str] = {}
        """By addresses: a graph, or why there is none; empty after the first call."""
        self._latest: dict[tuple[int, ...], _Recorded] = {}
        """By the addresses of the call's own tensors, those of the model left out."""

    def alone(self, function: Callable[[dict[str, Any]], Any], call: dict[str, Any]) -> Any:
        """Call a function while no other thread is in one: all calls share a graph's memory, and what was noted of the last call.

        Args:
            function: uses the graphs.
            call: its argument.
        """
        with self._lock:
            return function(call)

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
        if self._is_elsewhere():
            self._note("no CUDA graph: the call comes from another stream than the first one did")
            return forward(call)
        own = self._own(call, {name: tensor for name, tensor in tensors.items() if "." in name})
        place = (*map(_address, self._tensors), *own)
        known = self._known.get(place)
        if known is None:
            if len(self._known) >= MOST_GRAPHS:
                self._note(f"no CUDA graph: {MOST_GRAPHS} other sets of caches have one")
                return forward(call)
            self._known[place] = ""
            return forward(call)
        if known == "":
            known = self._known[place] = self._recorded(call, tensors, recorded or forward)
        if isinstance(known, str):
            self._note(known)
            return forward(call)
        if known.gone:  # other memory at the same addresses
            gone: list[Any] = []
            known = self._known[place] = dataclasses.replace(known, gone=gone, references=_watched(self._tensors, gone))
        self._latest[own] = known
        return self._launched(known, call).results()

    def started(self, call: Mapping[str, Any], held: Mapping[str, torch.Tensor]) -> Started | None:
        """Replay a call's graph where it has one and can be undone: the rest is looked at while the GPU works.

        Nothing that the graph reads was freed, and what it writes lies where it lay. Whether it is the model's graph still is
        for :meth:`Started.is_for` to say.

        Args:
            call: as for :meth:`run`; its own tensors have the sizes and dtypes of the recorded call.
            held: tensors of its objects by path, in the order of :meth:`run`'s.
        """
        if not self._latest or self._recorder.is_recording() or (self._written and self._saved is None):
            return None
        known = self._latest.get(self._own(call, held))
        return None if known is None or known.gone or self._is_elsewhere() else self._launched(known, call)

    def _is_elsewhere(self) -> bool:
        """Whether a call comes from another stream than the first one did; a graph may still be under way there."""
        now = self._stream_of(self._device)
        if self._stream is None:
            self._stream = now
        return now != self._stream

    def _launched(self, known: _Recorded, call: Mapping[str, Any]) -> Started:
        known.launch(call)
        try:
            return Started(known, call)
        except BaseException:  # no memory for copies
            _copy(known.saved, backwards=True)
            raise

    def _own(self, call: Mapping[str, Any], held: Mapping[str, torch.Tensor]) -> tuple[int, ...]:
        """Return the addresses of the call's tensors that its graph reads and writes where they lie."""
        return (*map(_address, held.values()), *[_address(call[name]) for name in self._passed])

    def _recorded(
        self, call: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], forward: Callable[[Mapping[str, Any]], Any]
    ) -> _Recorded | str:
        copied = [name for name in tensors if "." not in name and name not in self._written]
        with torch.inference_mode(False):  # they are written in later calls, in no_grad too
            statics = {name: torch.empty_like(call[name]).copy_(call[name]) for name in copied}
            saved = tuple((tensors[name], torch.empty_like(tensors[name])) for name in self._saved or ())
        own = {**call, **statics}

        def run() -> Any:
            _copy(saved)
            return forward(own)

        try:
            output, replay = self._recorder.record(run)
        except RuntimeError as error:  # nothing ran: the call can still be made
            return f"no CUDA graph: {str(error).partition(chr(10))[0]}"
        objects = [value for name, value in own.items() if name not in statics]
        kept = {storage_of(tensor) for tensor in (*self._tensors, *_tensors_in(objects))}
        outlets, gone = Outlets(own, statics, kept, output), list[Any]()
        return _Recorded(
            statics=tuple(statics.items()), objects=tuple(objects), replay=replay, memories=outlets.memories,
            late=tuple(outlets.late), make=outlets.maker(output), addresses=[*map(_address, self._tensors)],
            gone=gone, references=_watched(self._tensors, gone), saved=saved,
        )  # fmt: skip


def _watched(tensors: Sequence[torch.Tensor], gone: list[Any]) -> tuple[Any, ...]:
    """Return weak references to tensors' memory; what is freed is appended to a list."""
    return tuple(weakref.ref(one.untyped_storage(), gone.append) for one in tensors)


def _copy(saved: tuple[tuple[torch.Tensor, torch.Tensor], ...], *, backwards: bool = False) -> None:
    """Copy tensors to what keeps them, or back; in one launch."""
    if saved:
        own, copies = [one for one, _ in saved], [copy for _, copy in saved]
        torch._foreach_copy_(own if backwards else copies, copies if backwards else own)


def _tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    inner = value if isinstance(value, (list, tuple)) else list(vars(value).values()) if hasattr(value, "__dict__") else []
    return [] if isinstance(value, type) else [tensor for item in inner for tensor in _tensors_in(item)]
