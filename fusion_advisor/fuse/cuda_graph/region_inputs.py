"""A region's inputs: which its CUDA graph copies in, which it uses where they lie, and which a replay in vain must put back."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusion_advisor.fuse.cuda_graph.input_copies import InputCopy, static_copy


@dataclass(frozen=True, slots=True, kw_only=True)
class Undo:
    """Copies of the inputs that a region writes to, made by its graph ahead of everything else.

    Attributes:
        can_undo: whether putting them back undoes a replay.
        written: the inputs.
        saved: memory for their copies.
    """

    can_undo: bool
    written: tuple[torch.Tensor, ...]
    saved: tuple[torch.Tensor, ...]

    def save(self) -> None:
        """Copy the inputs."""
        if self.saved:
            torch._foreach_copy_(self.saved, self.written)

    def pairs(self) -> tuple[tuple[weakref.ref[torch.Tensor], torch.Tensor], ...] | None:
        """Return each input with its copy; None where copies do not undo a replay."""
        return tuple(zip(map(weakref.ref, self.written), self.saved, strict=True)) if self.can_undo else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionInputs:
    """A region's inputs, by what its graph does with them.

    Attributes:
        copies: tensors that the caller passes and the region only reads, and those of objects that lie elsewhere in each call:
            copied into memory of the graph's own.
        slots: of tensors that the graph uses where they lie.
        others: slots and values of what is no tensor.
        values: what the region runs on: the inputs, with the graph's own memory in place of the copied ones.
    """

    copies: tuple[InputCopy, ...]
    slots: tuple[int, ...]
    others: tuple[tuple[int, Any], ...]
    values: tuple[Any, ...]


def sort_inputs(
    args: Sequence[Any], leaves: Sequence[torch.Tensor], written: Collection[int], moving: Collection[int] = ()
) -> RegionInputs:  # fmt: skip
    """Sort a region's inputs.

    Args:
        args: of the region.
        leaves: tensors of the model's call.
        written: slots of inputs that the region writes to.
        moving: slots of inputs that lie elsewhere in each call.
    """
    place = {id(leaf): position for position, leaf in enumerate(leaves)}
    copies, slots, others, values = [], [], [], list(args)
    for slot, value in enumerate(args):
        if not isinstance(value, torch.Tensor):
            others.append((slot, value))
        elif (id(value) in place or slot in moving) and slot not in written:
            copy = static_copy(slot, place.get(id(value), -1), value)
            copies.append(copy)
            values[slot] = copy.static if copy.is_dense else copy.static.as_strided(value.shape, value.stride())
        else:
            slots.append(slot)
    return RegionInputs(copies=tuple(copies), slots=tuple(slots), others=tuple(others), values=tuple(values))
