"""Tensors that a rewritten graph keeps between calls, and how it notices that what they were made from has changed.

A value computed once from buffers or parameters is stale after somebody exchanged or wrote to one of them. So the graph hands
the sources to a call at every step, which compares them with those it knows (a few hundred nanoseconds on the host, nothing on
the device) and computes again where they differ. Some writes change nothing that the host can compare: those through
``tensor.data``, a numpy or dlpack alias, or the storage count no version. So a graph holds such a value only under ``--freeze``,
and ``FusedModel.refresh`` computes it again. A view of the sources' own memory needs no such care, because it is them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fusion_advisor.fuse.rewrite.graph_rewriter import LayoutChanged
from fusion_advisor.workload.weight_packing import has_room, lie_together

Compute = Callable[..., torch.Tensor]


@dataclass(slots=True)
class _Known:
    """One source as it was when the value was computed."""

    tensor: torch.Tensor
    address: int
    version: int
    """-1 for an inference tensor, which counts no writes."""

    def is_still(self, tensor: torch.Tensor) -> bool:
        return tensor is self.tensor and tensor.data_ptr() == self.address and _version(tensor) == self.version


class Held:
    """A function of source tensors that computes only when one of them is another tensor or was written to.

    Args:
        name: stands in the graph's code.
        compute: makes the value from the sources.
        sources: the tensors of now; the value is computed from them at once.
    """

    def __init__(self, name: str, compute: Compute, sources: Sequence[torch.Tensor]) -> None:
        self.__name__ = self.__qualname__ = name
        self._compute = compute
        self._value = _computed(compute, sources)
        self._is_own = _is_apart(self._value, sources)
        self._known = _known(sources)

    def __call__(self, *now: torch.Tensor) -> torch.Tensor:
        """Return the value for the sources of this call."""
        if not all(one.is_still(source) for one, source in zip(self._known, now, strict=True)):
            self._update(now)
        return self._value

    @property
    def versions(self) -> tuple[tuple[torch.Tensor, int], ...]:
        """Each source that counts its writes, with the count that the value was computed after."""
        return tuple((one.tensor, one.version) for one in self._known if one.version >= 0)

    @property
    def held_bytes(self) -> int:
        """Memory of the value."""
        return self._value.untyped_storage().nbytes()

    def refresh(self) -> None:
        """Compute again from the sources of the last call, as they are now."""
        self._update([one.tensor for one in self._known])

    def _update(self, sources: Sequence[torch.Tensor]) -> None:
        fresh = _computed(self._compute, sources)
        if self._is_own and _layout(fresh) == _layout(self._value):
            self._value.untyped_storage().copy_(fresh.untyped_storage())  # a CUDA graph that was recorded reads this memory
        else:
            self._value, self._is_own = fresh, _is_apart(fresh, sources)
        self._known = _known(sources)


def _computed(compute: Compute, sources: Sequence[torch.Tensor]) -> torch.Tensor:
    # The value outlives the call: made in inference mode, it could not be written to outside of it.
    with torch.inference_mode(False), torch.no_grad():
        return compute(*sources)


def _known(sources: Sequence[torch.Tensor]) -> tuple[_Known, ...]:
    return tuple(_Known(tensor=source, address=source.data_ptr(), version=_version(source)) for source in sources)


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _layout(value: torch.Tensor) -> tuple[object, ...]:
    """Return what must be equal for one tensor's storage to hold the other's value."""
    nbytes = value.untyped_storage().nbytes()
    return (value.shape, value.stride(), value.storage_offset(), value.dtype, value.device, nbytes)


def _is_apart(value: torch.Tensor, sources: Sequence[torch.Tensor]) -> bool:
    """Whether a value lies in no source's memory, so that it may be overwritten."""
    return value.untyped_storage().data_ptr() not in {source.untyped_storage().data_ptr() for source in sources}


class Joined:
    """A function of tensors that lie one after the other in memory that views them as one, along their first dim.

    The view is made again when a source is another tensor or moved; nothing is copied, so what is written to a source is seen.

    Args:
        name: stands in the graph's code.
        sources: contiguous tensors for which :func:`~fusion_advisor.workload.weight_packing.lie_together` holds.

    Raises:
        LayoutChanged: (when called) they no longer lie together.
    """

    def __init__(self, name: str, sources: Sequence[torch.Tensor]) -> None:
        self.__name__ = self.__qualname__ = name
        self._view: torch.Tensor | None = None
        self._known: tuple[tuple[torch.Tensor, int], ...] = ()
        self._keep(sources)

    def __call__(self, *now: torch.Tensor) -> torch.Tensor:
        """Return the view."""
        view = self._view
        if view is not None and all(
            source is tensor and source.data_ptr() == address for (tensor, address), source in zip(self._known, now, strict=True)
        ):
            return view
        self._view, self._known = None, ()  # a fallback for good must not keep old weights alive
        return self._keep(now)

    def _keep(self, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        view = self._view = _view(sources)
        self._known = tuple((source, source.data_ptr()) for source in sources)
        return view


class Extended:
    """A function of a tensor that views it with more rows, taken from the memory after it; nothing is copied.

    Args:
        name: stands in the graph's code.
        rows: that the view has; what the further ones hold is whatever lies there.

    Attributes:
        rows: see above.

    Raises:
        LayoutChanged: (when called) there is not that much memory after the tensor.
    """

    def __init__(self, name: str, rows: int) -> None:
        self.__name__ = self.__qualname__ = name
        self.rows = rows
        self._view: torch.Tensor | None = None
        self._known: tuple[torch.Tensor, int] | None = None

    def __call__(self, now: torch.Tensor) -> torch.Tensor:
        """Return the view."""
        known = self._known
        if self._view is not None and known is not None and known[0] is now and known[1] == now.data_ptr():
            return self._view
        self._view, self._known = None, None
        if not has_room(now, self.rows):
            raise LayoutChanged("a weight that had room for more rows after it has none now")
        self._view = now.detach().as_strided((self.rows, *now.shape[1:]), now.stride(), now.storage_offset())
        self._known = (now, now.data_ptr())
        return self._view


def is_derived(target: object) -> bool:
    """Whether a node's target gives memory that was there ahead of the call: no launch makes it, and no graph holds it.

    Args:
        target: of a node.
    """
    return isinstance(target, Held | Joined | Extended)


def _view(sources: Sequence[torch.Tensor]) -> torch.Tensor:
    if not lie_together(sources):
        raise LayoutChanged("weights that lay one after the other in memory no longer do")
    first = sources[0].detach()
    rows = sum(source.shape[0] for source in sources)
    return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())
