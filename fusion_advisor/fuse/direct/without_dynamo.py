"""Notes what was read of a model whose calls no guard of dynamo's looks at: its tensors are compared here.

Two kinds of tensors are asked for their layouts at each call of dynamo's, all others are known by the dict that holds them: those
that no dict holds, and those that are to be another tensor than the rest (buffers are).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fusion_advisor.fuse.direct.guard_nodes import OF_PAIRS
from fusion_advisor.fuse.direct.unchanged import Unchanged
from fusion_advisor.runtime.torch_internals.compiled_code import same_tensors


class UnchangedModel(Unchanged):
    """What was reached from a model. Whoever reads all of it has compared which of its tensors and objects are one."""

    def __init__(self) -> None:
        super().__init__()
        self._compared: dict[int, torch.Tensor] = {}
        self._tensors: tuple[torch.Tensor, ...] = ()
        self._layouts: list[Any] = []
        self._have_layouts: Callable[..., bool] = _always

    def finish(self) -> None:
        """Remember everything as it is now."""
        super().finish()
        self._tensors = tuple(self._compared.values())
        self._layouts = list(map(_layout, self._tensors))
        self._have_layouts = same_tensors(self._tensors) if self._tensors else _always

    def holds(self) -> bool:
        """Whether everything is as it was."""
        return super().holds() and (self._have_layouts(*self._tensors) or self._have_layouts_in_python())

    def _have_layouts_in_python(self) -> bool:
        """Whether layouts are the same though dynamo's check says no: in inference mode the same tensors have other keys."""
        try:
            is_same = list(map(_layout, self._tensors)) == self._layouts
        except RuntimeError:  # one has no strides now
            return False
        if is_same:
            self._have_layouts = same_tensors(self._tensors)
        return is_same

    def _asked(self, node: Any) -> set[str]:
        return super()._asked(node) - OF_PAIRS  # the same objects as when they were compared

    def _is_known(self, node: Any, value: Any) -> bool:
        if isinstance(value, torch.Tensor) and not OF_PAIRS.isdisjoint(super()._asked(node)):
            self._compared[id(value)] = value
        return super()._is_known(node, value)

    def _may_leave(self, holder: Any, value: Any) -> bool:
        if not super()._may_leave(holder, value):
            self._compared[id(value)] = value
        return True


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return type(tensor), tensor.dtype, tensor.device, tensor.shape, tensor.stride(), tensor.requires_grad


def _always() -> bool:
    return True
