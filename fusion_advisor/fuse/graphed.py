"""CUDA graphs around the rewritten step: a call that was verified replays one graph instead of hundreds of launches from Python.

A graph repeats kernels on the addresses it was recorded with, so everything it takes for granted must hold at each call:

- Dynamo's guards stay. They prove the module's attributes, hooks, train mode and submodules, grad mode and the layout of every
  tensor. They cost 150 of the 193 µs that dynamo takes for Qwen2.5-7B's 341 inputs (28 layers, one CPU core; with a KV cache and
  a slower core a millisecond), so the graph is launched *first* and the guards are evaluated while the device works. A result is
  handed out only after they held, and a replay that was launched in vain is thrown away. What is left in front of the launch is
  the call's signature, a look whether any memory that the graph reads was freed, and the copies of the inputs. Addresses are
  compared behind the launch: for BERT's 203 tensors that takes 24 µs, and some 80 where other work has emptied the processor's
  caches (H200 host). A graph that reads what is no longer the parameter's, but still somebody's, is merely launched in vain.
- A step that writes to memory that outlives it is launched first only if a replay in vain can be undone. The graph begins with
  copies of the small tensors that it writes to (a KV cache's counts), which are put back; what it appended behind such a count is
  then beyond what counts. Any other such step is launched after the guards.
- Tensors that the call passes are copied into static ones. All other inputs (parameters, buffers, what a cache object holds) are
  used where they are: their addresses are compared at each call and the step is recorded again when one has changed. So is a
  tensor of the call that the step writes to. What is written to is compared in front of the launch. (Memory that is taken from
  under a living storage and given back to the driver, ``untyped_storage().resize_(0)`` and ``empty_cache()``, is not seen.)
- Values that were folded from buffers are good as long as nothing is written to these: the buffers' version counts are compared.
- Flags that kernels were chosen by and that dynamo does not guard (SDPA backends, cuDNN, TF32) are part of the record.

Results are copied out of the graph's memory, so that no later call overwrites them (75 µs for bf16 logits of 512 × 152,064);
``outputs="static"`` hands out the memory itself, valid until the next call.

The first call of a signature runs launch by launch, which loads every kernel; the second is recorded (nothing runs then) and
replayed. So a step that writes to a cache writes once per call, always.
"""

from __future__ import annotations

import operator
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch.fx import GraphModule, Node

from fusion_advisor.capture import torch_internals
from fusion_advisor.capture.graph import source_of, storages, written_storages
from fusion_advisor.fuse.chain import extent
from fusion_advisor.fuse.held import Held
from fusion_advisor.fuse.rewrite import LayoutChanged
from fusion_advisor.fuse.rows_copy import RowsCopy
from fusion_advisor.timing.measure import CannotRecord

MOST_RECORDINGS = 8
"""Recordings kept per model; the one that was replayed longest ago goes first."""
_MOST_MOVES = 3
"""A step whose inputs' addresses changed this often in a row is not recorded again: recording costs more than it saves."""

_WAITING = frozenset({"_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "unique_dim", "_unique2", "equal"})
"""Ops that hand a value to the host, or whose result's size does."""
_UNDO_BYTES = 64 << 10
"""Of what a step writes to, as much is copied at each step so that it can be put back: a launch of two microseconds."""
_COPYING = frozenset({"_to_copy", "to", "copy_", "copy", "lift_fresh_copy", "cuda"})

Outputs = Literal["clone", "static"]
CopyOut = Callable[[torch.Tensor], torch.Tensor]


class HalfWritten(RuntimeError):
    """A fused call stopped after it may have written to its cache; the cache is not what either call would have left."""


class Recorder(Protocol):
    """Makes graphs; there is one per fused model, and it owns their memory pool."""

    def refusal(self) -> str | None:
        """Say why no graph may be used by the call under way, or None."""
        ...

    def record(self, call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Record a call; return the replay and the call's result, which lies in the graph's memory.

        Raises:
            CannotRecord: with the driver's sentence.
        """
        ...

    def pool_bytes(self) -> int:
        """Device memory that the graphs hold."""
        ...


class CudaRecorder:
    """CUDA graphs in one private memory pool, on the device that is current when this is made."""

    def __init__(self) -> None:
        self._device = torch.cuda.current_device()
        self._pool = torch.cuda.graph_pool_handle()
        self._stream: int | None = None

    def refusal(self) -> str | None:
        """Graphs share memory: they run one after the other on one stream, and never inside another capture."""
        if torch.cuda.current_device() != self._device:
            return f"the current device is not cuda:{self._device}, where it was recorded"
        if torch.cuda.is_current_stream_capturing():
            return "the call is itself being recorded into a CUDA graph"
        stream = torch_internals.current_stream_number(self._device)
        if self._stream is None:
            self._stream = stream
        return None if stream == self._stream else "the call comes from another stream than the first one did"

    def record(self, call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Capture a call that has run before, so that nothing is loaded or compiled while the stream is being captured."""
        graph = torch.cuda.CUDAGraph()
        try:
            # Only this thread's calls are watched: a data loader may pin memory meanwhile.
            with (
                torch_internals.own_gemm_workspace(),
                torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
            ):
                result = call()
        except LayoutChanged:
            raise
        except RuntimeError as error:
            # Ending a capture that an op has broken raises as well; the op's own words are the ones that help.
            cause = error.__context__ if isinstance(error.__context__, RuntimeError) else error
            raise CannotRecord(str(cause).strip().splitlines()[0]) from error
        return graph.replay, result

    def pool_bytes(self) -> int:
        """Sum the segments that the allocator set aside for the pool."""
        segments = torch.cuda.memory_snapshot()
        return sum(int(part["total_size"]) for part in segments if tuple(part.get("segment_pool_id", ())) == tuple(self._pool))


@dataclass(frozen=True, slots=True)
class _Copy:
    """A tensor of the call and the static one that it is copied into before each replay."""

    slot: int
    leaf: int
    static: torch.Tensor
    is_dense: bool

    def fill(self, value: torch.Tensor) -> None:
        self.static.copy_(value if self.is_dense else _flat(value))


@dataclass(frozen=True, slots=True)
class _Output:
    """Where one result comes from: a plain value, an input's memory, or one of the memories that are copied out."""

    value: Any = None
    slot: int = -1
    memory: int = -1
    view: tuple[Sequence[int], Sequence[int], int] | None = None
    """Size, strides and offset from the first element of what it is a view of; None: all of it."""


@dataclass(slots=True)
class Recording:
    """One recorded region: all that it holds and all that it assumes.

    Attributes:
        name: the region's inputs that the call passes, for reports.
        play: launches the graph on the current stream.
        copies: inputs that are copied in.
        slots: places of the inputs that are used where they are, ``addresses`` their addresses.
        read: the memory of those inputs. None is kept alive: holding the cache of an earlier ``generate`` would keep the next one
            from getting the same addresses.
        written: those of them that are written to, ``written_addresses`` theirs.
        gone: what was freed since, of ``read`` and ``written``.
        others: inputs that are no tensors, by place.
        folded_from: what folded values were computed from, with the version count of then.
        flags: backend flags that the kernels were chosen by.
        is_pure: whether it writes to nothing that outlives the call.
        saved: what is put back when it was launched in vain, each with the copy that the graph begins with; None: it cannot be.
        objects: what was read of the call's objects, whose tensors it writes to.
        memories: the graph's own memory that results lie in, each with what copies it out: what the region copies last, to give a
            result its strides, is left out of the graph and done then.
        results: how each result is made of it.
        replays: how often it ran.
    """

    name: str
    play: Callable[[], None]
    copies: tuple[_Copy, ...]
    read: tuple[weakref.ref[torch.UntypedStorage], ...]
    written: tuple[weakref.ref[torch.Tensor], ...]
    written_addresses: torch_internals.Addresses
    gone: list[weakref.ref[Any]]
    addresses: torch_internals.Addresses
    slots: tuple[int, ...]
    others: tuple[tuple[int, Any], ...]
    folded_from: tuple[tuple[torch.Tensor, int], ...]
    flags: tuple[Any, ...]
    is_pure: bool
    saved: tuple[tuple[weakref.ref[torch.Tensor], torch.Tensor], ...] | None
    objects: tuple[weakref.ref[Any], ...]
    memories: tuple[tuple[torch.Tensor, CopyOut], ...]
    results: tuple[_Output, ...]
    kind: type
    replays: int = 0

    def is_in_place(self) -> bool:
        """Whether it may be launched: nothing that it reads was freed, what it writes to has not moved, flags are the same."""
        if self.gone:
            return False
        written = [tensor for reference in self.written if (tensor := reference()) is not None]
        return self.written_addresses.are_of(written) and self.is_unwritten() and backend_flags() == self.flags

    def may_be_undone(self, objects: Sequence[Any]) -> bool:
        """Whether it may be launched before the guards have held, by a call that passes these objects."""
        if self.is_pure:
            return True
        known = [reference() for reference in self.objects]
        return self.saved is not None and len(known) == len(objects) and all(map(operator.is_, known, objects))

    def undo(self) -> None:
        """Put back what a replay in vain has written to."""
        pairs = [(reference(), copy) for reference, copy in self.saved or ()]
        alive = [(tensor, copy) for tensor, copy in pairs if tensor is not None]
        if alive:
            with torch.no_grad():
                torch._foreach_copy_([tensor for tensor, _ in alive], [copy for _, copy in alive])

    def is_unwritten(self) -> bool:
        """Whether folded values are still those of their sources."""
        return all(tensor._version == version for tensor, version in self.folded_from)

    def fits(self, args: Sequence[Any], leaves: Sequence[torch.Tensor]) -> bool:
        """Whether the graph's assumptions hold for these inputs, dynamo's guards having held."""
        return (
            self.addresses.are_of([args[slot] for slot in self.slots])
            and all(args[copy.slot] is leaves[copy.leaf] for copy in self.copies)
            and all(type(args[slot]) is type(value) and args[slot] == value for slot, value in self.others)
            and self.is_unwritten()
            and backend_flags() == self.flags
        )

    def replay(self, leaves: Sequence[torch.Tensor]) -> None:
        """Copy the call's tensors in and launch."""
        if len(self.copies) == 1:
            (only,) = self.copies
            only.fill(leaves[only.leaf])
        elif self.copies:  # one call, and one launch where they have one dtype
            values = [leaves[copy.leaf] if copy.is_dense else _flat(leaves[copy.leaf]) for copy in self.copies]
            torch._foreach_copy_([copy.static for copy in self.copies], values)
        self.play()
        self.replays += 1

    def give(self, args: Sequence[Any], outputs: Outputs) -> Any:
        """Return the results of the replay just launched."""
        is_copied = outputs == "clone"
        fresh = [copy(memory) if is_copied else memory for memory, copy in self.memories]
        given = []
        for output in self.results:
            value = output.value
            if output.slot >= 0:
                value = args[output.slot]
            elif output.memory >= 0:
                value = fresh[output.memory]
            if output.view is not None:
                size, stride, offset = output.view
                value = value.as_strided(size, stride, value.storage_offset() + offset)
            given.append(value)
        return given[0] if self.kind is torch.Tensor else self.kind(given)


@dataclass(slots=True)
class _Call:
    """The call under way."""

    thread: int
    key: Any
    leaves: Sequence[torch.Tensor]
    objects: Sequence[Any]
    launched: Recording | None

    def undo(self) -> None:
        """Take back what was launched ahead, if anything was."""
        launched, self.launched = self.launched, None
        if launched is not None:
            launched.undo()


class Graphs:
    """All recordings of one fused model: one pool, a bounded number, one replay at a time.

    Attributes:
        is_on: calls are replayed; off, every call runs launch by launch.
        outputs: ``clone`` copies results out, ``static`` hands out the graph's own memory until the next call.
        refusals: why calls ran launch by launch, and how often.
    """

    def __init__(self, recorder: Recorder, *, limit: int = MOST_RECORDINGS, outputs: Outputs = "clone") -> None:
        self.is_on = True
        self.outputs = outputs
        self.refusals: dict[str, int] = {}
        self._recorder = recorder
        self._limit = limit
        self._recordings: OrderedDict[GraphedRegion, Recording] = OrderedDict()
        self._latest: dict[Any, GraphedRegion] = {}
        self._lock = threading.Lock()
        self._call: _Call | None = None
        self._may_run_ahead = True

    @property
    def recordings(self) -> tuple[Recording, ...]:
        """What is held, the one replayed longest ago first."""
        return tuple(self._recordings.values())

    def pool_bytes(self) -> int:
        """Device memory that the graphs hold, static inputs included."""
        inputs = sum(copy.static.nbytes for recording in self.recordings for copy in recording.copies)
        return self._recorder.pool_bytes() + inputs

    def forget(self) -> None:
        """Drop every recording; the next call of each signature records anew."""
        self._recordings.clear()
        self._latest.clear()

    def run(self, key: Any, leaves: Sequence[torch.Tensor], call: Callable[[], Any], objects: Sequence[Any] = ()) -> Any:
        """Run one call of the model.

        Args:
            key: its signature.
            leaves: the tensors that it passes, in the signature's order.
            call: runs it through dynamo, which calls the region below if the guards hold.
            objects: what was read of the objects that it passes; the same ones as long as they hold the same.

        Raises:
            HalfWritten: the graph was launched ahead, and dynamo then ran the original ops without asking.
        """
        if not self.is_on:
            return call()
        if not self._lock.acquire(blocking=False):
            self._say("another thread is running it")
            return call()
        try:
            refusal = self._recorder.refusal()
            if refusal is not None:
                self._say(refusal)
                return call()
            latest = self._latest.get(key)
            recording = None if latest is None else self._recordings.get(latest)
            launched = None
            if recording is not None and self._may_run_ahead and recording.may_be_undone(objects) and recording.is_in_place():
                recording.replay(leaves)
                launched = recording
            under_way = self._call = _Call(threading.get_ident(), key, leaves, objects, launched)
            try:
                result = call()
            except BaseException:
                under_way.undo()
                raise
            if under_way.launched is not None and not under_way.launched.is_pure:
                self._may_run_ahead = False
                raise HalfWritten(
                    "the model's own ops ran after its CUDA graph had written to the cache: reset the cache and repeat"
                )
            return result
        finally:
            self._call = None
            self._lock.release()

    def region(self, region: GraphedRegion, args: Sequence[Any]) -> Any:
        """Run a region whose guards held: by its graph where it has one or may have one now."""
        call = self._call
        if call is None or call.thread != threading.get_ident():
            return region.plain(*args)
        recording = self._recordings.get(region)
        if call.launched is not recording:
            call.undo()
        if region.refusal is not None:
            self._say(region.refusal)
            return region.plain(*args)
        if recording is not None and not recording.fits(args, call.leaves):
            call.undo()
            del self._recordings[region]
            # Folded values whose sources were written to are computed again by a plain call, outside any graph.
            region.is_warm = recording.is_unwritten()
            recording = None
            region.moves += 1
            if region.moves > _MOST_MOVES:
                region.refusal = f"the addresses of its inputs changed {region.moves} times"
                return region.plain(*args)
        if recording is None:
            if not region.is_warm:
                region.is_warm = True
                return region.plain(*args)
            try:
                recording = region.record(self._recorder, args, call.leaves, call.objects, outputs=self.outputs)
            except CannotRecord as error:
                region.refusal = str(error)
                self._say(region.refusal)
                return region.plain(*args)
            self._recordings[region] = recording
            while len(self._recordings) > self._limit:
                self._recordings.popitem(last=False)
        else:
            region.moves = 0
        self._recordings.move_to_end(region)
        self._latest[call.key] = region
        while len(self._latest) > 4 * self._limit:
            del self._latest[next(iter(self._latest))]
        if call.launched is not recording:
            recording.replay(call.leaves)
        call.launched = None
        return recording.give(args, self.outputs)

    def other(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a graph that is never recorded, which first takes back what was launched ahead in its place."""

        def run(*args: Any) -> Any:
            if self._call is not None and self._call.thread == threading.get_ident():
                self._call.undo()
            return forward(*args)

        return run

    def _say(self, reason: str) -> None:
        self.refusals[reason] = self.refusals.get(reason, 0) + 1
        if self.refusals[reason] == 1:
            warnings.warn(f"fusion-advisor runs this call without its CUDA graph: {reason}", stacklevel=4)


@dataclass(slots=True, eq=False)
class GraphedRegion:
    """A rewritten region under one set of dynamo's guards: what dynamo calls when they hold."""

    module: GraphModule
    names: tuple[str, ...]
    graphs: Graphs
    refusal: str | None = None
    is_warm: bool = False
    moves: int = 0
    _written: frozenset[int] = field(init=False)
    _is_pure: bool = field(init=False)
    _saved: tuple[int, ...] | None = field(init=False)
    """Places of the inputs that must be put back after a replay in vain; None where that would not undo it."""

    def __post_init__(self) -> None:
        self.refusal = host_work(self.module)
        self._written, self._is_pure = _writes(self.module)
        self._saved = saved_inputs(self.module)

    def __call__(self, *args: Any) -> Any:
        """Run the region on dynamo's inputs."""
        return self.graphs.region(self, args)

    def plain(self, *args: Any) -> Any:
        """Run it launch by launch."""
        return self.module.forward(*args)

    def record(
        self,
        recorder: Recorder,
        args: Sequence[Any],
        leaves: Sequence[torch.Tensor],
        objects: Sequence[Any] = (),
        *,
        outputs: Outputs = "clone",
    ) -> Recording:
        """Record the region for inputs like these.

        Raises:
            CannotRecord: naming the op and the line at which recording stopped.
        """
        place = {id(leaf): position for position, leaf in enumerate(leaves)}
        copies, slots, others, inputs = [], [], [], list(args)
        for slot, value in enumerate(args):
            if not isinstance(value, torch.Tensor):
                others.append((slot, value))
            elif id(value) in place and slot not in self._written:
                copy = _static(slot, place[id(value)], value)
                copies.append(copy)
                inputs[slot] = copy.static if copy.is_dense else copy.static.as_strided(value.shape, value.stride())
            else:
                slots.append(slot)
        devices = {value.device for value in inputs if isinstance(value, torch.Tensor)}
        if len(devices) > 1:
            on_host = [self.names[slot] for slot, value in enumerate(inputs) if getattr(value, "is_cpu", False)]
            raise CannotRecord(f"it reads `{on_host[0]}` in host memory" if on_host else "its inputs lie on several devices")
        last = last_copies(self.module) if outputs == "clone" else {}
        own_copies = {place: node.target if isinstance(node.target, RowsCopy) else _contiguous for place, node in last.items()}
        runner = _Watched(self.module, frozenset(last.values()))
        written = [inputs[slot] for slot in self._saved or ()]
        can_undo = self._saved is not None and sum(tensor.nbytes for tensor in written) <= _UNDO_BYTES
        written = written if can_undo else []
        with torch.inference_mode(False):
            saved = [torch.empty_like(tensor) for tensor in written]

        def step() -> Any:
            if saved:
                torch._foreach_copy_(saved, written)
            return runner.run(*inputs)

        try:
            play, result = recorder.record(step)
        except CannotRecord as error:
            raise CannotRecord(f"{error} ({runner.where()})") from error
        used = [args[slot] for slot in slots]
        changed = [args[slot] for slot in slots if slot in self._written]
        gone: list[weakref.ref[Any]] = []
        kind = type(result) if isinstance(result, tuple | list) else torch.Tensor
        memories, results = _results(list(result) if isinstance(result, tuple | list) else [result], inputs, own_copies)
        return Recording(
            name=", ".join(self.names[copy.slot] for copy in copies),
            play=play, copies=tuple(copies), slots=tuple(slots), others=tuple(others),
            read=tuple(torch_internals.storage_reference(tensor, gone.append) for tensor in used),
            written=tuple(weakref.ref(tensor, gone.append) for tensor in changed),
            written_addresses=torch_internals.Addresses(changed), gone=gone, addresses=torch_internals.Addresses(used),
            folded_from=_folded_from(self.module), flags=backend_flags(), is_pure=self._is_pure,
            saved=tuple(zip(map(weakref.ref, written), saved, strict=True)) if can_undo else None,
            objects=tuple(map(weakref.ref, objects)),
            memories=memories, results=results, kind=kind,
        )  # fmt: skip


def _folded_from(module: GraphModule) -> tuple[tuple[torch.Tensor, int], ...]:
    return tuple(version for node in module.graph.nodes if isinstance(node.target, Held) for version in node.target.versions)


class _Watched(torch.fx.Interpreter):
    """Runs a region op by op and knows which op it is at: a failed recording is told with its line.

    Args:
        module: the region.
        skipped: ops that give their first operand instead.
    """

    def __init__(self, module: GraphModule, skipped: frozenset[Node] = frozenset()) -> None:
        super().__init__(module)
        self.extra_traceback = False
        self._skipped = skipped
        self._at: Node | None = None

    def run_node(self, n: Node) -> Any:
        self._at = n
        if n in self._skipped:
            source = n.args[0]
            assert isinstance(source, Node)
            return self.env[source]
        return super().run_node(n)

    def where(self) -> str:
        return "no op had run" if self._at is None else _place(self._at)


def last_copies(module: GraphModule) -> dict[int, Node]:
    """Return the results, by place, that are copies of the region's own memory to plain strides and are used for nothing else."""
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    given = output.args[0] if isinstance(output.args[0], tuple | list) else [output.args[0]]
    theirs = {key for node in module.graph.nodes if node.op in ("placeholder", "get_attr") for key in storages(node)}
    return {
        place: node
        for place, node in enumerate(given)
        if isinstance(node, Node)
        and (isinstance(node.target, RowsCopy) or _is_plain_clone(node))
        and len(node.users) == 1
        and given.count(node) == 1
        and not theirs & set(storages(node.all_input_nodes[0]))
    }


def _is_plain_clone(node: Node) -> bool:
    return node.target is torch.ops.aten.clone.default and node.kwargs == {"memory_format": torch.contiguous_format}


def _as_it_is(memory: torch.Tensor) -> torch.Tensor:
    return memory.clone(memory_format=torch.preserve_format)


def _contiguous(memory: torch.Tensor) -> torch.Tensor:
    return memory.clone(memory_format=torch.contiguous_format)


def host_work(module: GraphModule) -> str | None:
    """Say which op of a region makes the host take part in the step, so that no graph can hold it; None when none does."""
    for node in module.graph.nodes:
        name = _op_name(node)
        if node.op != "call_function" or name == "getitem":
            continue
        if name in _WAITING:
            return f"the host waits for a value of the device in {_place(node)}"
        devices = {value.device.type for value in _values(node)}
        for source in node.all_input_nodes:
            read = {value.device.type for value in _values(source)}
            if read == {"cuda"} and devices == {"cpu"}:
                return f"the host waits for a value of the device in {_place(node)}"
            if read == {"cpu"} and devices == {"cuda"} and (source.op == "placeholder" or name in _COPYING):
                return (
                    f"`{source.target if source.op == 'placeholder' else source.name}` is read in host memory in {_place(node)}"
                )
    return None


def backend_flags() -> tuple[Any, ...]:
    """Return the flags that choose kernels and that dynamo's guards do not all watch."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return (
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        cuda.matmul.allow_tf32,
        cudnn.allow_tf32,
        cudnn.enabled,
        cudnn.benchmark,
        cudnn.deterministic,
        torch.are_deterministic_algorithms_enabled(),
    )


def _writes(module: GraphModule) -> tuple[frozenset[int], bool]:
    """Return the inputs that a region writes to, by place, and whether it writes to nothing that outlives the call."""
    written = {key for node in module.graph.nodes for key in written_storages(node)}
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    own = [node for node in module.graph.nodes if node.op == "get_attr"]
    slots = frozenset(slot for slot, node in enumerate(placeholders) if written & set(storages(node)))
    return slots, not slots and not any(written & set(storages(node)) for node in own)


def saved_inputs(module: GraphModule) -> tuple[int, ...] | None:
    """Return the inputs whose old contents must be known to undo a region, by place; None where they would not suffice.

    What the region appends needs none: rows that ``index_copy_``, or a fused call in its place, writes at places counted by an
    input that the region moves on.
    With the count put back they lie where nothing is held yet, and the same call, run by the original ops, writes there again.
    """
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    appends: list[tuple[Node, list[Node]]] = []
    written: set[int] = set()
    for node in module.graph.nodes:
        if node.target is torch.ops.aten.index_copy_.default or ("fusion_id" in node.meta and written_storages(node)):
            appends.append((node, [source for source in node.all_input_nodes if source.meta["val"].dtype == torch.int64]))
        else:
            written.update(written_storages(node))
    if any(written & set(storages(node)) for node in module.graph.nodes if node.op == "get_attr"):
        return None
    saved = [slot for slot, node in enumerate(placeholders) if written & set(storages(node))]
    counts = {placeholders[slot] for slot in saved}
    given = {key for node in placeholders for key in storages(node)}
    for node, places in appends:
        outlives = given & set(written_storages(node))
        if outlives and (outlives & written or not places or not all(counts & _ancestors(place) for place in places)):
            return None
    return tuple(saved)


def _ancestors(value: Node) -> set[Node]:
    found: set[Node] = set()
    waiting = [value]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(node.all_input_nodes)
    return found


def _static(slot: int, leaf: int, value: torch.Tensor) -> _Copy:
    is_dense = extent(value) == value.numel()
    # A user may call in inference mode once and in no_grad the next time; a normal tensor may be written to in both.
    with torch.inference_mode(False):
        if is_dense:
            static = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        else:
            static = torch.empty(extent(value), dtype=value.dtype, device=value.device)
    copy = _Copy(slot, leaf, static, is_dense)
    copy.fill(value)
    return copy


def _flat(value: torch.Tensor) -> torch.Tensor:
    return value.as_strided((extent(value),), (1,))


def _results(
    values: list[Any], inputs: Sequence[Any], apart: Mapping[int, CopyOut]
) -> tuple[tuple[tuple[torch.Tensor, CopyOut], ...], tuple[_Output, ...]]:
    """Sort results into what is an input's memory and what must be copied out; results that share memory are copied once.

    Args:
        values: the results.
        inputs: of the region.
        apart: by place, what copies a result that is memory of its own, with plain strides, once it is copied.
    """
    slot_of = {_memory(value): slot for slot, value in enumerate(inputs) if isinstance(value, torch.Tensor) and value.numel()}
    sharing: dict[Any, list[torch.Tensor]] = {}
    for place, value in enumerate(values):
        if isinstance(value, torch.Tensor) and _memory(value) not in slot_of and place not in apart:
            sharing.setdefault(_memory(value) if value.numel() else id(value), []).append(value)
    memories: list[tuple[torch.Tensor, CopyOut]] = []
    found: dict[Any, tuple[int, int | None]] = {}
    for key, tensors in sharing.items():
        only = tensors[0]
        if all(tensor is only for tensor in tensors) and extent(only) == only.numel():
            found[key] = (len(memories), None)
            memories.append((only, _as_it_is))
            continue
        first = min(int(tensor.storage_offset()) for tensor in tensors)
        last = max(int(tensor.storage_offset()) + extent(tensor) for tensor in tensors)
        found[key] = (len(memories), first)
        memories.append((only.as_strided((last - first,), (1,), first), _as_it_is))
    results = []
    for place, value in enumerate(values):
        if place in apart:
            results.append(_Output(memory=len(memories)))
            memories.append((value, apart[place]))
            continue
        if not isinstance(value, torch.Tensor):
            results.append(_Output(value=value))
            continue
        layout = (value.shape, value.stride())
        if _memory(value) in slot_of:
            slot = slot_of[_memory(value)]
            start = int(inputs[slot].storage_offset())
            results.append(
                _Output(slot=slot, view=None if value is inputs[slot] else (*layout, int(value.storage_offset()) - start))
            )
        else:
            memory, first_element = found[_memory(value) if value.numel() else id(value)]
            view = None if first_element is None else (*layout, int(value.storage_offset()) - first_element)
            results.append(_Output(memory=memory, view=view))
    return tuple(memories), tuple(results)


def _memory(value: torch.Tensor) -> tuple[int, torch.dtype]:
    return value.untyped_storage().data_ptr(), value.dtype


def _values(node: Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    return [item for item in (value if isinstance(value, tuple | list) else [value]) if isinstance(item, torch.Tensor)]


def _op_name(node: Node) -> str:
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.partition("::")[2]
    return getattr(node.target, "__name__", str(node.target))


def _place(node: Node) -> str:
    file, line, text = source_of(node)
    where = f" at {file}:{line}" if file else ""
    return f"`{_op_name(node)}`{where}{f': {text}' if text else ''}"
