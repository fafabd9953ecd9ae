"""One pass of a training step as a recorded CUDA graph: what it holds, what it takes for granted, and what a replay returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusion_advisor.fuse.cuda_graph.recording import (
    InputCopy,
    Layout,
    Memory,
    Output,
    Recorder,
    backend_flags,
    flat,
    given_results,
    layout_of,
    results_of,
    static_copy,
)
from fusion_advisor.runtime.torch_internals import tensor_memory
from fusion_advisor.timing.interleaving import CannotRecord


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
        kept: results that stay in the graph's memory, for the backward pass; an argument that is read where it lies is its slot.
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
    recorder: Recorder, call: Callable[..., Any], args: Sequence[Any], *, copied: frozenset[int], owned: frozenset[int],
    keeps: int,
) -> PassGraph:  # fmt: skip
    """Record a pass for arguments like these; it has run before, so that nothing is compiled meanwhile.

    Args:
        recorder: makes the graph.
        call: runs the pass, launch by launch.
        args: of the pass.
        copied: slots of the tensors that are copied into memory of the graph's own.
        owned: slots of tensors that lie in the memory of another graph of the step: their layouts never change.
        keeps: how many of its last results stay in the graph's memory.

    Raises:
        CannotRecord: with the driver's sentence, or the argument that a graph cannot read.
    """
    values = list(args)
    copies = []
    for slot in sorted(copied):
        copy = static_copy(slot, slot, args[slot])
        copies.append(copy)
        values[slot] = copy.static if copy.is_dense else copy.static.as_strided(args[slot].shape, args[slot].stride())
    tensors = [slot for slot, value in enumerate(args) if isinstance(value, torch.Tensor)]
    if len({args[slot].device for slot in tensors}) > 1:
        raise CannotRecord("its inputs lie on several devices")
    slots = tuple(slot for slot in tensors if slot not in copied)
    play, found = recorder.record(lambda: call(*values))
    results = list(found) if isinstance(found, tuple | list) else [found]
    _require_one_device(results, [args[slot] for slot in tensors])
    end = len(results) - keeps
    memories, given = results_of(results[:end], values, {})
    by_dtype: dict[torch.dtype, list[int]] = {}
    for place, memory in enumerate(memories):
        by_dtype.setdefault(memory.tensor.dtype, []).append(place)
    place_of = {id(values[slot]): slot for slot in slots}
    return PassGraph(
        play=play, copies=tuple(copies), slots=slots,
        addresses=tensor_memory.Addresses([args[slot] for slot in slots]),
        places=tuple(args[slot].data_ptr() for slot in slots),
        layouts=tuple((slot, layout_of(args[slot])) for slot in tensors if slot not in owned),
        others=tuple((slot, value) for slot, value in enumerate(args) if not isinstance(value, torch.Tensor)),
        flags=backend_flags(), memories=memories, groups=tuple(map(tuple, by_dtype.values())), results=given,
        kept=tuple(place_of.get(id(value), value) for value in results[end:]),
    )  # fmt: skip


def _require_one_device(results: Sequence[Any], args: Sequence[torch.Tensor]) -> None:
    """Refuse a result in host memory.

    Raises:
        CannotRecord: a kernel would read there what it held when it was recorded.
    """
    devices = {value.device for value in (*results, *args) if isinstance(value, torch.Tensor)}
    if len(devices) > 1:
        raise CannotRecord("one of its results lies in host memory")
