"""A rewritten region as dynamo calls it: recorded into a CUDA graph for inputs like a call's."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule, Node

from fusion_advisor.fuse.cuda_graph.capturable import UNDO_BYTES, has_collectives, host_work, saved_inputs, writes_of
from fusion_advisor.fuse.cuda_graph.graph_bytes import GraphBytes, graph_bytes, symbols_given
from fusion_advisor.fuse.cuda_graph.recording import Outputs, Recorder, Recording, backend_flags, layout_of, results_of
from fusion_advisor.fuse.cuda_graph.region_inputs import Undo, sort_inputs
from fusion_advisor.fuse.cuda_graph.tail import LeftOut, left_out
from fusion_advisor.fuse.cuda_graph.watched_run import Watched
from fusion_advisor.fuse.rewrite.derived_tensors import Held
from fusion_advisor.fuse.rewrite.launch_count import Tally, tallies_in, total
from fusion_advisor.runtime.torch_internals import tensor_memory
from fusion_advisor.timing.interleaving import CannotRecord

if TYPE_CHECKING:
    from fusion_advisor.fuse.cuda_graph.replay import Graphs
    from fusion_advisor.fuse.cuda_graph.segmented_region import SegmentedRecording

_MOST_WAITS = 64
_MOST_MOVING_BYTES = 4096
"""Of a tensor that is copied in because it moves; a larger one, such as keys, has the region recorded again."""


@dataclass(slots=True, eq=False)
class GraphedRegion:
    """A rewritten region under one set of dynamo's guards: what dynamo calls when they hold."""

    module: GraphModule
    names: tuple[str, ...]
    graphs: Graphs
    refusal: str | None = None
    most_result_bytes: int | None = None
    """Of results that a graph may hold: whose are larger stays as it is, launch by launch. None: any."""
    is_bounded: bool = False
    """Its graph is one of many, of sizes in a range: all of them together may hold so many bytes."""
    is_too_large: bool = field(default=False, init=False)
    """It runs launch by launch for what its results or its graph would hold."""
    held: GraphBytes | None = field(default=None, init=False)
    """By its graph, where that is one of many."""
    waits: int = 1
    """Calls that still run launch by launch before one is recorded."""
    moves: int = 0
    moving: set[int] = field(default_factory=set, init=False)
    """Places of small inputs that an object of the call holds and that lie elsewhere in each call: they are copied in."""
    tallies: tuple[Tally, ...] = field(init=False)
    _patience: int = 1
    _written: frozenset[int] = field(default=frozenset(), init=False)
    _is_pure: bool = field(init=False)
    _saved: tuple[int, ...] | None = field(init=False)
    """Places of the inputs that must be put back after a replay in vain; None where that would not undo it."""

    def __post_init__(self) -> None:
        self.refusal = host_work(self.module, holds_collectives=self.graphs.meet is not None)
        self._written, self._is_pure = writes_of(self.module)
        self._saved = saved_inputs(self.module)
        self.tallies = tallies_in([self.module])

    def __call__(self, *args: Any) -> Any:
        """Run the region on dynamo's inputs."""
        return self.graphs.region(self, args)

    def wait_longer(self) -> None:
        """Be recorded again after twice as many calls as last time: more shapes take turns than may be recorded."""
        self._patience = self.waits = min(2 * self._patience, _MOST_WAITS)

    def copy_moved(self, moved: Sequence[int], args: Sequence[Any], objects: Sequence[Any]) -> None:
        """Copy in from now on what moved and is small: each new cache has a number of its own, in memory of its own.

        Args:
            moved: places of inputs.
            args: of the region.
            objects: what was read of the objects of the call.
        """
        held = {id(item) for seen in objects for item in seen.contents}
        small = {slot for slot in moved if id(args[slot]) in held and args[slot].nbytes <= _MOST_MOVING_BYTES}
        self.moving |= small - self._written

    def plain(self, *args: Any) -> Any:
        """Run it launch by launch."""
        return self.module.forward(*args)

    def awaited(self, *args: Any) -> Any:
        """Run it launch by launch ahead of being recorded, and look at how large its results are."""
        result = self.module.forward(*args)
        if self.most_result_bytes is not None:
            results = result if isinstance(result, tuple | list) else (result,)
            made = [one for one in results if isinstance(one, torch.Tensor) and all(one is not arg for arg in args)]
            self.is_too_large = sum(one.nbytes for one in made) > self.most_result_bytes
        return result

    def record(
        self,
        recorder: Recorder,
        args: Sequence[Any],
        leaves: Sequence[torch.Tensor],
        objects: Sequence[Any] = (),
        *,
        outputs: Outputs = "clone",
    ) -> Recording | SegmentedRecording:
        """Record the region for inputs like these.

        Raises:
            CannotRecord: naming the op and the line at which recording stopped.
            TooLarge: it would hold more than all graphs of a range may.
        """
        inputs = sort_inputs(args, leaves, self._written, self.moving)
        self._require_one_device(inputs.values)
        slots_of_copies = [copy.slot for copy in inputs.copies]
        after_graph = left_out(self.module, slots_of_copies, inputs.values) if outputs == "clone" else {}
        stand_ins = _stand_ins(after_graph)
        if self.is_bounded:
            symbols = symbols_given([node for node in self.module.graph.nodes if node.op == "placeholder"], args)
            needed = graph_bytes(self.module, symbols, stand_ins)
            self.graphs.admit(self, needed.and_inputs(sum(copy.static.nbytes for copy in inputs.copies)))
        runner = Watched(self.module, stand_ins)
        before = total(self.tallies)
        undo = self._undo(inputs.values)

        def step() -> Any:
            undo.save()
            return runner.run(*inputs.values)

        try:
            play, result = recorder.record(step)
        except CannotRecord as error:
            raise CannotRecord(f"{error} ({runner.where()})") from error
        slots = inputs.slots
        used = [args[slot] for slot in slots]
        read_after_graph = {slot for last in after_graph.values() for slot in last.slots}
        watched = [slot for slot in slots if slot in self._written or slot in read_after_graph]
        gone: list[weakref.ref[Any]] = []
        is_list = isinstance(result, tuple | list)
        memories, results = results_of(list(result) if is_list else [result], inputs.values, after_graph)
        return Recording(
            name=", ".join(self.names[slot] for slot in slots_of_copies),
            play=play, copies=inputs.copies, slots=slots, others=inputs.others,
            read=tuple(tensor_memory.storage_reference(tensor, gone.append) for tensor in used),
            watched=tuple(weakref.ref(args[slot], gone.append) for slot in watched), watched_slots=tuple(watched),
            watched_addresses=tensor_memory.Addresses([args[slot] for slot in watched]),
            layouts={place: layout_of(args[slot]) for place, slot in enumerate(watched) if slot in read_after_graph},
            gone=gone, addresses=tensor_memory.Addresses(used),
            folded_from=folded_from(self.module), flags=backend_flags(), is_pure=self._is_pure,
            meet=self.graphs.meet if has_collectives(self.module) else None,
            saved=undo.pairs(), objects=tuple(map(weakref.ref, objects)),
            memories=memories, results=results, kind=type(result) if is_list else torch.Tensor,
            launches=total(self.tallies) - before,
        )  # fmt: skip

    def _require_one_device(self, values: Sequence[Any]) -> None:
        """Refuse inputs that a CUDA graph cannot read.

        Raises:
            CannotRecord: they lie on several devices, or one lies in host memory.
        """
        devices = {value.device for value in values if isinstance(value, torch.Tensor)}
        if len(devices) > 1:
            on_host = [self.names[slot] for slot, value in enumerate(values) if getattr(value, "is_cpu", False)]
            raise CannotRecord(f"it reads `{on_host[0]}` in host memory" if on_host else "its inputs lie on several devices")

    def _undo(self, values: Sequence[Any]) -> Undo:
        """Make room for copies of the inputs that the region writes to, unless these are too large or would not undo it."""
        written = [values[slot] for slot in self._saved or ()]
        can_undo = self._saved is not None and sum(tensor.nbytes for tensor in written) <= UNDO_BYTES
        written = written if can_undo else []
        with torch.inference_mode(False):
            return Undo(can_undo=can_undo, written=tuple(written), saved=tuple(map(torch.empty_like, written)))


def folded_from(module: GraphModule) -> tuple[tuple[torch.Tensor, int], ...]:
    """Return what a graph's folded values were computed from, with the version count of then."""
    return tuple(version for node in module.graph.nodes if isinstance(node.target, Held) for version in node.target.versions)


def _stand_ins(after_graph: Mapping[int, LeftOut]) -> dict[Node, Node]:
    return {node: source for last in after_graph.values() for node, source in last.stand_ins.items()}
