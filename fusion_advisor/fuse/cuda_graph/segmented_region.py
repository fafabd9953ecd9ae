"""A region of which only segments are recorded: one CUDA graph for each, and the ops between them launched one by one.

What a segment reads of the call, or of the ops in between, is copied into memory of the graphs. What a segment made is read where
it lies: all graphs of a recording are replayed in one order on one stream. A result of the call is copied out. The addresses of
weights are compared once for a call. A segment is never launched ahead of the guards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule, Node

from fusion_advisor.fuse.cuda_graph.graph_bytes import GraphBytes, bytes_of_values, graph_bytes, symbols_given
from fusion_advisor.fuse.cuda_graph.graphed_region import GraphedRegion, folded_from
from fusion_advisor.fuse.cuda_graph.input_copies import InputCopy, copy_in, inputs_are, static_copy
from fusion_advisor.fuse.cuda_graph.recording import (
    Memory,
    Output,
    Outputs,
    Recorder,
    backend_flags,
    given_results,
    results_of,
    versions_are,
)
from fusion_advisor.fuse.cuda_graph.region_inputs import sort_inputs
from fusion_advisor.fuse.cuda_graph.segments import Segment, Segments, split
from fusion_advisor.fuse.cuda_graph.watched_run import Watched
from fusion_advisor.fuse.rewrite.launch_count import Tally, tallies_in, total
from fusion_advisor.runtime.torch_internals import tensor_memory
from fusion_advisor.timing.interleaving import CannotRecord

if TYPE_CHECKING:
    from fusion_advisor.fuse.cuda_graph.replay import Graphs


@dataclass(slots=True, eq=False)
class SegmentedRegion(GraphedRegion):
    """A region whose segments are recorded for the sizes that do not grow.

    Attributes:
        segments: of its module.
    """

    segments: Segments | None = None

    def __post_init__(self) -> None:
        assert self.segments is not None  # a default, because the base class has some
        self.tallies = tallies_in([self.module])

    def record(
        self,
        recorder: Recorder,
        args: Sequence[Any],
        leaves: Sequence[torch.Tensor],
        objects: Sequence[Any] = (),
        *,
        outputs: Outputs = "clone",
    ) -> SegmentedRecording:
        """Record all segments, and run the region meanwhile: a segment is recorded on what the ops ahead of it have made.

        Raises:
            CannotRecord: naming the op and the line at which recording stopped.
            TooLarge: all segments together would hold more than all graphs may.
        """
        del objects, outputs  # nothing is undone, and results are always copied out
        segments = self.segments
        assert segments is not None
        slots = segments.slots
        moving = {place for place, slot in enumerate(slots) if slot in self.moving}
        inputs = sort_inputs([args[slot] for slot in slots], leaves, (), moving)
        making = _Making(
            recorder, self.tallies, {segments.placeholders[slot]: value for slot, value in zip(slots, inputs.values, strict=True)}
        )
        if self.is_bounded:
            self.graphs.admit(self, _bytes_of(segments, symbols_given(segments.placeholders, args)))
        players = [_BeingRecorded(making, part) for part in segments.parts]
        segments.whole.forward(*players, *args)
        used = tuple(slots[place] for place in inputs.slots)
        return SegmentedRecording(
            segments=segments, players=tuple(making.players), statics=tuple(making.statics),
            copies=tuple(replace(copy, slot=slots[copy.slot]) for copy in inputs.copies),
            slots=used, addresses=tensor_memory.Addresses([args[slot] for slot in used]),
            others=tuple((slots[place], value) for place, value in inputs.others),
            folded_from=folded_from(self.module), flags=backend_flags(), launches=making.launches,
        )  # fmt: skip


class Cutter:
    """Makes regions that are recorded in segments, one for each module and sizes that do not grow.

    Args:
        graphs: keep the recordings.
        growing: symbols of the sizes that grow.
    """

    def __init__(self, graphs: Graphs, growing: frozenset[Any]) -> None:
        self._graphs, self._growing = graphs, growing
        self._split: dict[GraphModule, Segments | None] = {}
        self._regions: dict[tuple[GraphModule, tuple[int, ...]], SegmentedRegion] = {}

    def region(self, module: GraphModule, names: tuple[str, ...], sizes: tuple[int, ...] = ()) -> SegmentedRegion | None:
        """Return what is called for all growing sizes; None where the module is not split.

        Args:
            module: with open sizes.
            names: of its inputs.
            sizes: all that do not grow.
        """
        if module not in self._split:
            self._split[module] = split(module, self._growing)
        segments = self._split[module]
        if segments is not None and (module, sizes) not in self._regions:
            self._regions[module, sizes] = SegmentedRegion(module, names, self._graphs, is_bounded=True, segments=segments)
        return self._regions.get((module, sizes))


def _bytes_of(segments: Segments, symbols: Mapping[Any, int]) -> GraphBytes:
    """Return what the graphs of all segments hold: each keeps its outputs, and copies of what is passed to it."""
    parts = [graph_bytes(part.module, symbols) for part in segments.parts]
    passed = bytes_of_values([node for part in segments.parts for node in part.passed], symbols)
    return GraphBytes(sum(part.kept for part in parts) + passed, max(part.passing for part in parts))


@dataclass(slots=True, kw_only=True)
class SegmentedRecording:
    """The recorded segments of a region: all that they hold and all that they take for granted.

    Attributes:
        segments: with the ops in between.
        players: replay one segment each.
        statics: memory that what is passed to segments is copied into.
        copies: inputs of the region that are copied in.
        slots: places of the inputs that are used where they are, ``addresses`` their addresses; none is kept alive.
        others: inputs that are no tensors, by place.
        folded_from: what folded values were computed from, with the version count of then.
        flags: backend flags that the kernels were chosen by.
        launches: generated kernels that the replays of one call launch.
        replays: how often it ran.
    """

    segments: Segments
    players: tuple[_Player, ...]
    statics: tuple[torch.Tensor, ...]
    copies: tuple[InputCopy, ...]
    slots: tuple[int, ...]
    addresses: tensor_memory.Addresses
    others: tuple[tuple[int, Any], ...]
    folded_from: tuple[tuple[torch.Tensor, int], ...]
    flags: tuple[Any, ...]
    launches: int
    replays: int = 0
    memories: tuple[Memory, ...] = ()
    """No op is left out of the graphs."""

    @property
    def input_bytes(self) -> int:
        """Memory of copied inputs."""
        return sum(one.nbytes for one in (*self.statics, *(copy.static for copy in self.copies)))

    def moved(self, args: Sequence[Any]) -> list[int]:
        """Return the places of the inputs that lie elsewhere than when it was recorded."""
        return [self.slots[place] for place in self.addresses.moved([args[slot] for slot in self.slots])]

    def fits(self, args: Sequence[Any], leaves: Sequence[torch.Tensor]) -> bool:
        """Whether the graphs' assumptions hold for these inputs; dynamo's guards have passed."""
        return (
            inputs_are(args, leaves, self.copies, self.others)
            and self.addresses.are_of([args[slot] for slot in self.slots])
            and versions_are(self.folded_from)
            and backend_flags() == self.flags
        )

    def run(self, args: Sequence[Any], leaves: Sequence[torch.Tensor], _: Outputs) -> Any:
        """Run the region: replay its segments, and launch the ops in between."""
        copy_in(self.copies, args, leaves)
        self.replays += 1
        return self.segments.whole.forward(*self.players, *args)

    def give(self, _: Sequence[Any], results: Any) -> Any:
        """Return the results, which are in memory of their own."""
        return results


class _Player:
    """Replays one segment.

    Args:
        play: launches its graph.
        places: of the tensors among what is passed.
        statics: memory that they are copied into.
        results: how each output is made, of ``memories``.
        memories: that are copied out.
    """

    __slots__ = ("_given", "_memories", "_places", "_play", "_results", "_statics")

    def __init__(
        self, play: Callable[[], None], places: Sequence[int], statics: Sequence[torch.Tensor], results: Sequence[Output],
        memories: Sequence[Memory],
    ) -> None:  # fmt: skip
        self._play = play
        self._places = tuple(places)
        self._statics = list(statics)
        self._results = tuple(results)
        self._memories = tuple(memories)
        self._given = given_results(results, (), ()) if not memories else []

    def run(self, *passed: Any) -> list[Any]:
        """Copy in what is passed, launch, and return the outputs: those that stay lie in the graph's memory."""
        if len(self._statics) == 1:
            self._statics[0].copy_(passed[self._places[0]])
        elif self._statics:
            torch._foreach_copy_(self._statics, [passed[place] for place in self._places])
        self._play()
        if not self._memories:
            return self._given
        return given_results(self._results, (), [memory.make(memory.tensor) for memory in self._memories])


class _Making:
    """The recording under way.

    Attributes:
        known: what segments read, by node of the region: numbers, weights, static copies, memory of earlier segments.
        players: of the segments that are recorded.
        statics: made for what is passed.
        launches: generated kernels in the graphs.
    """

    def __init__(self, recorder: Recorder, tallies: Sequence[Tally], known: dict[Node, Any]) -> None:
        self.known = known
        self.players: list[_Player] = []
        self.statics: list[torch.Tensor] = []
        self.launches = 0
        self._recorder, self._tallies = recorder, tallies

    def record(self, part: Segment, passed: Sequence[Any]) -> list[Any]:
        """Record a segment and replay it once; returns its outputs.

        Raises:
            CannotRecord: naming the op and the line at which recording stopped.
        """
        copies = {place: static_copy(place, -1, value) for place, value in enumerate(passed) if isinstance(value, torch.Tensor)}
        statics = {place: _as_passed(copy, passed[place]) for place, copy in copies.items()}
        self.known |= {
            node: statics.get(place, value) for place, (node, value) in enumerate(zip(part.passed, passed, strict=True))
        }
        inputs = [self.known[node] for node in part.inputs]
        if len({value.device for value in inputs if isinstance(value, torch.Tensor)}) > 1:
            raise CannotRecord("its inputs lie on several devices")
        runner = Watched(part.module, {})
        before = total(self._tallies)
        try:
            play, values = self._recorder.record(lambda: runner.run(*inputs))
        except CannotRecord as error:
            raise CannotRecord(f"{error} ({runner.where()})") from error
        self.launches += total(self._tallies) - before
        self.known |= dict(zip(part.outputs, values, strict=True))
        leaving = [place for place in range(len(values)) if place not in part.stays]
        memories, results = results_of([values[place] for place in leaving], inputs, {})
        if any(result.slot >= 0 for result in results):
            raise CannotRecord("a result may lie in the memory of an input")
        made = [Output(value=value) for value in values]
        for place, result in zip(leaving, results, strict=True):
            made[place] = result
        player = _Player(play, list(statics), list(statics.values()), made, memories)
        self.players.append(player)
        self.statics += statics.values()
        return player.run(*passed)


@dataclass(frozen=True, slots=True)
class _BeingRecorded:
    """Stands for a segment in the call in which it is recorded."""

    making: _Making
    part: Segment

    def run(self, *passed: Any) -> list[Any]:
        """Record it."""
        return self.making.record(self.part, passed)


def _as_passed(copy: InputCopy, value: torch.Tensor) -> torch.Tensor:
    """Return static memory laid out as a value is; a later value of other strides is copied element by element.

    Raises:
        CannotRecord: several elements of the value lie at one place.
    """
    if any(step == 0 and size > 1 for size, step in zip(value.shape, value.stride(), strict=True)):
        raise CannotRecord("what it reads is expanded")
    return copy.static if copy.is_dense else copy.static.as_strided(value.shape, value.stride())
