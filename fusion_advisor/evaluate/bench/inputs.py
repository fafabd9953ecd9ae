"""The tensors of a bench case, made on the device, and the reference run on them in fp64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusion_advisor.library.patterns import example
from fusion_advisor.library.spec import KernelSpec, below_of


@dataclass(slots=True, kw_only=True)
class TensorSet:
    """One copy of a case's tensors."""

    inputs: list[torch.Tensor]
    """In the order of the reference's parameters."""
    outputs: list[torch.Tensor]
    """Preallocated for our kernels, laid out as the reference lays them out."""


def make_inputs(
    spec: KernelSpec, sizes: Mapping[str, int], dtype: torch.dtype, device: torch.device, *, seed: int
) -> list[torch.Tensor]:
    """Make the reference's arguments.

    Floats are normal; integers are uniform below what the manifest says; booleans are fair coins;
    ``cos`` and ``sin`` belong to one random angle, so that a rotation done in place again and again stays finite.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    found = []
    for tensor in spec.inputs:
        with torch.device("meta"):
            layout = example(tensor, sizes, dtype)
        made = torch.empty_strided(layout.shape, layout.stride(), dtype=layout.dtype, device=device)
        if made.dtype == torch.bool:
            made.bernoulli_(0.5, generator=generator)
        elif not made.is_floating_point():
            made.random_(0, below_of(tensor, sizes), generator=generator)
        elif tensor.name in ("cos", "sin"):
            angles = torch.Generator(device=device).manual_seed(seed)
            turn = torch.empty(made.shape, dtype=torch.float32, device=device).uniform_(0.0, 6.28, generator=angles)
            turn[..., made.shape[-1] // 2 :] = turn[..., : -(-made.shape[-1] // 2)]
            made.copy_(getattr(torch, tensor.name)(turn))
        else:
            made.normal_(generator=generator)
        found.append(made)
    return found


def outputs_like(
    results: Sequence[torch.Tensor], given: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Empty tensors with the layouts of a reference's results.

    Args:
        results: what the reference returned.
        given: what it was called with; a result that is one of these was written in place.
        inputs: of the set that the outputs are for: what is written in place is written into them.
    """
    places = {id(tensor): number for number, tensor in enumerate(given)}
    return [
        inputs[places[id(t)]] if id(t) in places else torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
        for t in results
    ]


def as_list(answer: Any) -> list[torch.Tensor]:
    """A reference's result as a list."""
    return list(answer) if isinstance(answer, tuple | list) else [answer]


def bytes_of(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes that tensors hold."""
    return sum(t.numel() * t.element_size() for t in tensors)
