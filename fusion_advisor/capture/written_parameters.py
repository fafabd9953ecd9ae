"""Puts back parameters that a forward pass writes to: an ActNorm's first call, an encoder that follows another one.

Small ones are copied ahead of a run. Large ones only where such a write is usual: without a gradient (a key encoder), or rows of
an embedding with ``max_norm``. A mode that copies them when an op is about to write would spare the copies, but torch compiles
nothing under one, and flex attention raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fusion_advisor.capture.graph.side_effects import holds
from fusion_advisor.runtime.call_tensors import what_it_lacks

_SMALL_BYTES = 1 << 20
_MOST_COPIED_BYTES = 4 << 30
"""Of large parameters together, in the host's memory; with more none is copied (adapters on a frozen base)."""


@contextmanager
def parameters_kept(model: torch.nn.Module) -> Iterator[None]:
    """Put back what parameters hold, and where they lie, when the context ends; what nothing was written to is not touched.

    Args:
        model: whose parameters these are.
    """
    dense = [one for one in model.parameters() if not what_it_lacks(one)]
    memory = [one.detach() for one in dense]  # stays where it is when a parameter's ``data`` is given other memory
    copies = [(one, one.detach().clone()) for one in dense if one.nbytes <= _SMALL_BYTES]
    large = _often_written(model, dense)
    if sum(one.nbytes for one in large) <= _MOST_COPIED_BYTES:
        copies += [(one, one.detach().to("cpu", copy=True)) for one in large]
    try:
        yield
    finally:
        with torch.no_grad():
            for one, before in zip(dense, memory, strict=True):
                if one.data_ptr() != before.data_ptr():
                    one.data = before
            for one, copy in copies:
                if not holds(one, copy.to(one.device)):
                    one.copy_(copy)


def _often_written(model: torch.nn.Module, dense: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """Return the large parameters that forward passes of some models write to."""
    tables = {id(one.weight) for one in model.modules() if getattr(one, "max_norm", None) is not None and hasattr(one, "weight")}
    return [one for one in dense if one.nbytes > _SMALL_BYTES and (not one.requires_grad or id(one) in tables)]
