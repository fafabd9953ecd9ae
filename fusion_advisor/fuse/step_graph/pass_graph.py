"""One pass of a training step as a recorded CUDA graph: what it holds, what it takes for granted, and what a replay returns.

A graph's own memory is its pool's, which lives as long as the graph. No tensor here keeps the pool from giving memory to what is
recorded later. Results are copied out at once. What is kept for the backward pass is held by :class:`Kept` until that pass was
recorded, which reuses the memory of each after its last use.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fusion_advisor.fuse.cuda_graph.input_copies import InputCopy, flat, static_copy
from fusion_advisor.fuse.cuda_graph.recording import (
    Layout,
    Memory,
    Output,
    Recorder,
    backend_flags,
    given_results,
    layout_of,
    results_of,
)
from fusion_advisor.runtime.torch_internals import tensor_memory
from fusion_advisor.timing.interleaving import CannotRecord


@dataclass(slots=True)
class Kept:
    """What holds the memory of a forward pass's last results, one for each; None for one in memory that the pass was given."""

    owners: list[torch.Tensor | None]

    def take_over(self, values: Sequence[Any]) -> list[Any]:
        """Return a backward pass's arguments with these in their places, and let go of them."""
        owners, self.owners = self.owners, []
        first = [value if owner is None else owner for value, owner in zip(values, owners, strict=False)]
        return [*first, *values[len(first) :]]

    def read(self, results: Sequence[Any], place_of: Mapping[int, int], holder: object) -> tuple[torch.Tensor | int, ...]:
        """Return what stands for the results and holds no memory: an argument that is read where it lies is its slot.

        Args:
            results: of the forward pass.
            place_of: slots of its arguments, by identity.
            holder: keeps the graph's memory mapped.
        """
        return tuple(
            place_of.get(id(value), value) if owner is None else tensor_memory.without_memory(owner, holder)
            for owner, value in zip(self.owners, results, strict=True)
        )


@dataclass(slots=True)
class PassGraph:
    """A recorded pass.

    Attributes:
        play: launches the graph on the current stream.
        copies: tensors of the call that are copied into memory of the graph's own; ``leaf`` is the slot again.
        slots: places of the arguments that are read where they lie, ``addresses`` and ``places`` their addresses.
        layouts: shape, strides and dtype of arguments that the graph does not own, by slot.
        others: arguments that are no tensors, by slot.
        flags: backend flags that the kernels were chosen by.
        groups: memories of results that are copied out, those of one dtype together: each group is one launch.
        results: how each result that is handed out is made.
        kept: results that lie in the graph's memory, for the backward pass; an argument that is read where it lies is its slot.
        launches: generated kernels that one replay launches.
    """

    play: Callable[[], None]
    copies: tuple[InputCopy, ...]
    slots: tuple[int, ...]
    addresses: tensor_memory.Addresses
    places: tuple[int, ...]
    layouts: tuple[tuple[int, Layout], ...]
    others: tuple[tuple[int, Any], ...]
    flags: tuple[Any, ...]
    memories: tuple[Memory, ...]
    groups: tuple[tuple[int, ...], ...]
    results: tuple[Output, ...]
    kept: tuple[torch.Tensor | int, ...]
    launches: int = 0

    def moved(self, args: Sequence[Any]) -> list[int]:
        """Return the places of arguments that are read where they lie and lie elsewhere now."""
        if self.addresses.are_of([args[slot] for slot in self.slots]):
            return []
        return [slot for slot, address in zip(self.slots, self.places, strict=True) if args[slot].data_ptr() != address]

    def fits(self, args: Sequence[Any]) -> bool:
        """Whether all that the graph takes for granted holds for these arguments, addresses aside."""
        return (
            all(layout_of(args[slot]) == layout for slot, layout in self.layouts)
            and all(type(args[slot]) is type(value) and args[slot] == value for slot, value in self.others)
            and backend_flags() == self.flags
        )

    def replay(self, args: Sequence[Any]) -> list[Any]:
        """Copy what is copied, launch, and return the results: handed out ones in new memory, kept ones in the graph's.

        Args:
            args: of the pass.
        """
        if self.copies:
            values = [args[copy.slot] if copy.is_dense else flat(args[copy.slot]) for copy in self.copies]
            torch._foreach_copy_([copy.static for copy in self.copies], values)
        self.play()
        fresh = [torch.empty_like(memory.tensor) for memory in self.memories]
        for group in self.groups:
            torch._foreach_copy_([fresh[place] for place in group], [self.memories[place].tensor for place in group])
        kept = [args[one] if isinstance(one, int) else one for one in self.kept]
        return [*given_results(self.results, args, fresh), *kept]


def record_pass(
    recorder: Recorder, call: Callable[[list[Any]], Any], args: Sequence[Any], *, copied: frozenset[int], kept: Kept, keeps: int
) -> tuple[PassGraph, Kept]:
    """Record a pass for arguments like these; it has run before, so that nothing is compiled meanwhile.

    Args:
        recorder: makes the graph.
        call: runs the pass, launch by launch, on a list of arguments that it may empty.
        args: of the pass.
        copied: slots of the tensors that are copied into memory of the graph's own.
        kept: of the forward pass, which are the first arguments of a backward pass. Nothing holds their memory afterwards.
        keeps: how many of its last results are for the backward pass.

    Returns:
        The graph, and what holds the memory of the results that it keeps.

    Raises:
        CannotRecord: with the driver's sentence, or the argument that a graph cannot read.
    """
    copies = [static_copy(slot, slot, args[slot]) for slot in sorted(copied)]
    values = _with_copies(args, copies)
    kept_slots = range(len(kept.owners))
    owned = [slot for slot, owner in enumerate(kept.owners) if owner is not None]
    tensors = [slot for slot, value in enumerate(args) if isinstance(value, torch.Tensor)]
    if len({args[slot].device for slot in tensors}) > 1:
        raise CannotRecord("its inputs lie on several devices")
    slots = tuple(slot for slot in tensors if slot not in copied)

    def step() -> Any:
        return call(kept.take_over(values))

    play, found = recorder.record(step)
    results = list(found) if isinstance(found, tuple | list) else [found]
    del found
    _require_one_device(results, [args[slot] for slot in tensors])
    end = len(results) - keeps
    # What lies in the memory of what is kept is copied out as well: the next forward pass writes there.
    memories, given = results_of(results[:end], [None if slot in owned else value for slot, value in enumerate(values)], {})
    memories = tuple(replace(one, tensor=tensor_memory.without_memory(one.tensor, play)) for one in memories)
    place_of = {id(values[slot]): slot for slot in slots}
    given_at = {value.untyped_storage().data_ptr() for value in values if isinstance(value, torch.Tensor)}
    own = Kept([_own(value, given_at) for value in results[end:]])
    graph = PassGraph(
        play=play, copies=tuple(copies), slots=slots,
        addresses=tensor_memory.Addresses([args[slot] for slot in slots]),
        places=tuple(args[slot].data_ptr() for slot in slots),
        layouts=tuple((slot, layout_of(args[slot])) for slot in tensors if slot not in kept_slots),
        others=tuple((slot, value) for slot, value in enumerate(args) if not isinstance(value, torch.Tensor)),
        flags=backend_flags(), memories=memories, groups=_groups(memories), results=given,
        kept=own.read(results[end:], place_of, play),
    )  # fmt: skip
    return graph, own


def _with_copies(args: Sequence[Any], copies: Sequence[InputCopy]) -> list[Any]:
    """Return arguments with the graph's own memory in place of what is copied."""
    values = list(args)
    for copy in copies:
        value = args[copy.slot]
        values[copy.slot] = copy.static if copy.is_dense else copy.static.as_strided(value.shape, value.stride())
    return values


def _groups(memories: Sequence[Memory]) -> tuple[tuple[int, ...], ...]:
    """Return the places of memories of one dtype together."""
    by_dtype: dict[torch.dtype, list[int]] = {}
    for place, memory in enumerate(memories):
        by_dtype.setdefault(memory.tensor.dtype, []).append(place)
    return tuple(map(tuple, by_dtype.values()))


def _own(value: Any, given_at: Collection[int]) -> torch.Tensor | None:
    """Return a result that lies in the graph's own memory; None for another one, whose memory its caller holds."""
    is_own = isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() not in given_at
    return value if is_own else None


def _require_one_device(results: Sequence[Any], args: Sequence[torch.Tensor]) -> None:
    """Refuse a result in host memory.

    Raises:
        CannotRecord: a kernel would read there what it held when it was recorded.
    """
    devices = {value.device for value in (*results, *args) if isinstance(value, torch.Tensor)}
    if len(devices) > 1:
        raise CannotRecord("one of its results lies in host memory")
