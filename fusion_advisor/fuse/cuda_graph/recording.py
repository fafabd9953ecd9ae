"""One recorded CUDA graph: what it holds, what it takes for granted, and how it is replayed.

See :mod:`fusion_advisor.fuse.cuda_graph.replay` for when that may be done.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from fusion_advisor.codegen.cuda.graph_memsets import Memsets
from fusion_advisor.fuse.cuda_graph.input_copies import InputCopy, copy_in, inputs_are
from fusion_advisor.fuse.cuda_graph.tail import LeftOut, MakeResult, as_it_is
from fusion_advisor.fuse.rewrite.graph_rewriter import LayoutChanged
from fusion_advisor.runtime.graph_capture import recording_into
from fusion_advisor.runtime.torch_internals import cuda_state, tensor_memory
from fusion_advisor.timing.interleaving import CannotRecord
from fusion_advisor.verify.subgraph_oracle import extent

Outputs = Literal["clone", "static"]
Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]


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

    def give_back(self) -> None:
        """Give the memory of all graphs back to the device; none is left."""
        ...


class CudaRecorder:
    """CUDA graphs in one private memory pool, on the device that is current when this is made."""

    def __init__(self) -> None:
        self._device = torch.cuda.current_device()
        self._pool = torch.cuda.graph_pool_handle()
        self._stream: int | None = None
        self._memsets = Memsets()

    def refusal(self) -> str | None:
        """Graphs share memory: they run one after the other on one stream, and never inside another capture."""
        if cuda_state.current_device_number() != self._device:
            return f"the current device is not cuda:{self._device}, where it was recorded"
        if torch.cuda.is_current_stream_capturing():
            return "the call is itself being recorded into a CUDA graph"
        stream = cuda_state.current_stream_number(self._device)
        if self._stream is None:
            self._stream = stream
        return None if stream == self._stream else "the call comes from another stream than the first one did"

    def record(self, call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Capture a call that has run before, so that nothing is loaded or compiled while the stream is being captured."""
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        try:
            # Only this thread's calls are watched: a data loader may pin memory meanwhile.
            with (
                cuda_state.own_gemm_workspace(),
                recording_into(graph, pool=self._pool, capture_error_mode="thread_local"),
            ):
                result = call()
            self._memsets.replace(graph)
            graph.instantiate()
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

    def give_back(self) -> None:
        """Have the allocator free the pool, and begin another: a caller may still hold a result in the old one."""
        self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class Output:
    """Where one result comes from: a plain value, an input's memory, or one of the memories that are copied out."""

    value: Any = None
    slot: int = -1
    memory: int = -1
    view: tuple[Sequence[int], Sequence[int], int] | None = None
    """Size, strides and offset from the first element of what it is a view of; None: all of it."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of the graph that a result is made from.

    Attributes:
        tensor: in the graph's memory.
        make: copies it out, or computes the result from it.
        slots: places of the inputs that this takes besides.
        name: of the product that it runs; empty for a copy.
    """

    tensor: torch.Tensor
    make: MakeResult
    slots: tuple[int, ...] = ()
    name: str = ""


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
        watched: those of them that are written to or that a product after the graph reads: their addresses are compared in front
            of the launch. ``watched_slots`` are their places.
        layouts: of those that a product after the graph reads, by place in ``watched``; in front of the guards nothing else
            vouches for them.
        gone: what was freed since, of ``read`` and ``watched``.
        others: inputs that are no tensors, by place.
        folded_from: what folded values were computed from, with the version count of then.
        flags: backend flags that the kernels were chosen by.
        is_pure: whether it writes to nothing that outlives the call.
        meet: waits until all ranks took back a launch in vain; None where it has no collectives.
        saved: what is put back when it was launched in vain, each with the copy that the graph begins with; None: it cannot be.
        objects: what was read of the call's objects, whose tensors it writes to.
        memories: the graph's own memory that results are copied or computed from. What the region does last for a result alone (a
            copy that gives it its strides, the product that computes the logits) is left out of the graph and done then.
        results: how each result is made of it.
        replays: how often it ran.
    """

    name: str
    play: Callable[[], None]
    copies: tuple[InputCopy, ...]
    read: tuple[weakref.ref[torch.UntypedStorage], ...]
    watched: tuple[weakref.ref[torch.Tensor], ...]
    watched_slots: tuple[int, ...]
    watched_addresses: tensor_memory.Addresses
    layouts: Mapping[int, Layout]
    gone: list[weakref.ref[Any]]
    addresses: tensor_memory.Addresses
    slots: tuple[int, ...]
    others: tuple[tuple[int, Any], ...]
    folded_from: tuple[tuple[torch.Tensor, int], ...]
    flags: tuple[Any, ...]
    is_pure: bool
    meet: Callable[[], object] | None
    saved: tuple[tuple[weakref.ref[torch.Tensor], torch.Tensor], ...] | None
    objects: tuple[weakref.ref[Any], ...]
    memories: tuple[Memory, ...]
    results: tuple[Output, ...]
    kind: type
    replays: int = 0
    launches: int = 0
    """Generated kernels that one replay launches."""

    def is_in_place(self) -> bool:
        """Whether it may be launched: nothing that it reads was freed, and what is watched lies where it lay."""
        watched: list[Any] = list(map(operator.call, self.watched))
        if self.gone:  # checked after the references: where there is none, no tensor is None
            return False
        if not self.watched_addresses.are_of(watched):
            return False
        return all(layout_of(watched[place]) == layout for place, layout in self.layouts.items())

    def known_inputs(self) -> dict[int, Any]:
        """Return the inputs that results are made from, by place among the region's; None for one that was freed."""
        if not self.layouts:
            return {}
        return dict(zip(self.watched_slots, map(operator.call, self.watched), strict=True))

    def may_be_undone(self, objects: Sequence[Any]) -> bool:
        """Whether a call that passes these objects may launch it before its guards are checked."""
        if any(copy.leaf < 0 for copy in self.copies):
            return False  # nobody knows yet what the region is given
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

    @property
    def input_bytes(self) -> int:
        """Memory of copied inputs."""
        return sum(copy.static.nbytes for copy in self.copies)

    def moved(self, args: Sequence[Any]) -> list[int]:
        """Return the places of the inputs that lie elsewhere than when it was recorded."""
        return [self.slots[place] for place in self.addresses.moved([args[slot] for slot in self.slots])]

    def fits(self, args: Sequence[Any], leaves: Sequence[torch.Tensor]) -> bool:
        """Whether the graph's assumptions hold for these inputs; dynamo's guards have passed."""
        return (
            inputs_are(args, leaves, self.copies, self.others)
            and self.addresses.are_of([args[slot] for slot in self.slots])
            and versions_are(self.folded_from)
            and backend_flags() == self.flags
        )

    def replay(self, leaves: Sequence[torch.Tensor], args: Sequence[Any] = ()) -> None:
        """Copy the call's tensors in and launch; ahead of the guards there are no inputs of the region yet."""
        copy_in(self.copies, args, leaves)
        self.play()
        self.replays += 1

    def run(self, args: Sequence[Any], leaves: Sequence[torch.Tensor], outputs: Outputs) -> list[torch.Tensor]:
        """Replay once the guards have passed; returns memory for the results."""
        self.replay(leaves, args)
        return self.hand_out(args, outputs)

    def hand_out(self, inputs: Sequence[Any] | Mapping[int, Any], outputs: Outputs) -> list[torch.Tensor]:
        """Launch the ops that follow the replay just launched; returns memory for the results: new each time, or ``static``.

        Args:
            inputs: of the region, by place; those that are watched suffice.
            outputs: ``static`` gives the graph's own memory.
        """
        if outputs == "static":
            return [memory.tensor for memory in self.memories]
        return [memory.make(memory.tensor, *[inputs[slot] for slot in memory.slots]) for memory in self.memories]

    def give(self, args: Sequence[Any], fresh: Sequence[torch.Tensor]) -> Any:
        """Return the results, once the guards have passed.

        Args:
            args: of the region.
            fresh: from :meth:`hand_out`.
        """
        given = given_results(self.results, args, fresh)
        return given[0] if self.kind is torch.Tensor else self.kind(given)


def versions_are(folded_from: Sequence[tuple[torch.Tensor, int]]) -> bool:
    """Whether folded values are still those of their sources."""
    return all(tensor._version == version for tensor, version in folded_from)


def backend_flags() -> tuple[Any, ...]:
    """Return the flags that choose kernels and that dynamo's guards do not all watch."""
    return cuda_state.kernel_switches()


def results_of(
    values: list[Any], inputs: Sequence[Any], left_out: Mapping[int, LeftOut]
) -> tuple[tuple[Memory, ...], tuple[Output, ...]]:
    """Sort results into what is an input's memory and what must be copied out; results that share memory are copied once.

    Args:
        values: the results.
        inputs: of the region.
        left_out: by place, the results with memory of their own, and the value of which each is made.
    """
    slot_of = {_memory(value): slot for slot, value in enumerate(inputs) if isinstance(value, torch.Tensor) and value.numel()}
    sharing: dict[Any, list[torch.Tensor]] = {}
    for place, value in enumerate(values):
        if isinstance(value, torch.Tensor) and _memory(value) not in slot_of and place not in left_out:
            sharing.setdefault(_memory(value) if value.numel() else id(value), []).append(value)
    memories: list[Memory] = []
    found: dict[Any, tuple[int, int | None]] = {}
    for key, tensors in sharing.items():
        only = tensors[0]
        if all(tensor is only for tensor in tensors) and extent(only) == only.numel():
            found[key] = (len(memories), None)
            memories.append(Memory(only, as_it_is))
            continue
        first = min(int(tensor.storage_offset()) for tensor in tensors)
        last = max(int(tensor.storage_offset()) + extent(tensor) for tensor in tensors)
        found[key] = (len(memories), first)
        memories.append(Memory(only.as_strided((last - first,), (1,), first), as_it_is))
    results = []
    for place, value in enumerate(values):
        if place in left_out:
            results.append(Output(memory=len(memories)))
            left = left_out[place]
            memories.append(Memory(value, left.make, left.slots, left.name))
            continue
        if not isinstance(value, torch.Tensor):
            results.append(Output(value=value))
            continue
        layout = (value.shape, value.stride())
        if _memory(value) in slot_of:
            slot = slot_of[_memory(value)]
            start = int(inputs[slot].storage_offset())
            results.append(
                Output(slot=slot, view=None if value is inputs[slot] else (*layout, int(value.storage_offset()) - start))
            )
        else:
            memory, first_element = found[_memory(value) if value.numel() else id(value)]
            view = None if first_element is None else (*layout, int(value.storage_offset()) - first_element)
            results.append(Output(memory=memory, view=view))
    return tuple(memories), tuple(results)


def given_results(results: Sequence[Output], args: Sequence[Any], fresh: Sequence[torch.Tensor]) -> list[Any]:
    """Return results as a caller gets them.

    Args:
        results: how each is made.
        args: of the region.
        fresh: new memory that the graph's was copied to, in the order of the memories.
    """
    given = []
    for output in results:
        value = output.value
        if output.slot >= 0:
            value = args[output.slot]
        elif output.memory >= 0:
            value = fresh[output.memory]
        if output.view is not None:
            size, stride, offset = output.view
            value = value.as_strided(size, stride, value.storage_offset() + offset)
        given.append(value)
    return given


def layout_of(tensor: torch.Tensor) -> Layout:
    """Return what an op's result depends on, a tensor's address excepted: shape, strides and dtype."""
    return tensor.shape, tensor.stride(), tensor.dtype


def _memory(value: torch.Tensor) -> tuple[int, torch.dtype]:
    return value.untyped_storage().data_ptr(), value.dtype
