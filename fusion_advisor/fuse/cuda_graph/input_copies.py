"""Tensors of a call that a CUDA graph copies into memory of its own ahead of each replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusion_advisor.verify.subgraph_oracle import extent


@dataclass(frozen=True, slots=True)
class InputCopy:
    """A tensor of the call and the static one that it is copied into before each replay.

    Attributes:
        slot: its place among the region's inputs.
        leaf: its place among the tensors that the call passes as such; -1: an object of the call holds it.
        static: the graph's own.
        is_dense: the tensor has no gaps.
    """

    slot: int
    leaf: int
    static: torch.Tensor
    is_dense: bool

    def given(self, args: Sequence[Any], leaves: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the call's tensor."""
        found: torch.Tensor = leaves[self.leaf] if self.leaf >= 0 else args[self.slot]
        return found

    def fill(self, value: torch.Tensor) -> None:
        """Copy the call's tensor in."""
        self.static.copy_(value if self.is_dense else flat(value))


def copy_in(copies: Sequence[InputCopy], args: Sequence[Any], leaves: Sequence[torch.Tensor]) -> None:
    """Copy a call's tensors into the static ones.

    Args:
        copies: of a recording.
        args: of the region; none where all copies are of leaves.
        leaves: tensors that the call passes as such.
    """
    if len(copies) == 1:
        copies[0].fill(copies[0].given(args, leaves))
    elif copies:  # one call, and one launch where they have one dtype
        values = [copy.given(args, leaves) for copy in copies]
        values = [value if copy.is_dense else flat(value) for copy, value in zip(copies, values, strict=True)]
        torch._foreach_copy_([copy.static for copy in copies], values)


def inputs_are(
    args: Sequence[Any], leaves: Sequence[torch.Tensor], copies: Sequence[InputCopy], others: Sequence[tuple[int, Any]]
) -> bool:
    """Whether inputs that are copied are the call's tensors, and those that are no tensors what they were."""
    for copy in copies:
        if args[copy.slot] is not copy.given(args, leaves):
            return False
    return all(type(args[slot]) is type(value) and args[slot] == value for slot, value in others)


def static_copy(slot: int, leaf: int, value: torch.Tensor) -> InputCopy:
    """Make the static tensor for one that the call passes, filled with it.

    Args:
        slot: its place among the region's inputs.
        leaf: its place among the call's tensors; -1: an object of the call holds it.
        value: the tensor.
    """
    is_dense = extent(value) == value.numel()
    # A user may call in inference mode once and in no_grad the next time; a normal tensor may be written to in both.
    with torch.inference_mode(False):
        if is_dense:
            static = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        else:
            static = torch.empty(extent(value), dtype=value.dtype, device=value.device)
    copy = InputCopy(slot, leaf, static, is_dense)
    copy.fill(value)
    return copy


def flat(value: torch.Tensor) -> torch.Tensor:
    """Return all that a tensor spans in memory, gaps included, as one dimension."""
    return value.as_strided((extent(value),), (1,))
