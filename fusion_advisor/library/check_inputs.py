"""Inputs for checking a kernel, and its reference run on them: as it is, and in fp64."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.node import map_aggregate

from fusion_advisor.library.patterns import example
from fusion_advisor.library.spec import Case, KernelSpec, below_of

KINDS = {"normal": 1.0, "large": 3e3, "tiny": 1e-4, "NaN and Inf": 1.0}
"""Kinds of input, with the magnitude of what has the first input's shape; parameters stay near 1."""


def make_inputs(spec: KernelSpec, case: Case, dtype: str, kind: str, device: str = "cpu", *, seed: int = 0) -> list[torch.Tensor]:
    """Make the reference's arguments, laid out as the manifest says.

    Args:
        spec: the manifest.
        case: gives the sizes.
        dtype: of the tensors whose dtype the manifest leaves open.
        kind: a key of ``KINDS``.
        device: where the tensors are.
        seed: of the random numbers; the same on every device.
    """
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number, tensor in enumerate(spec.inputs):
        made = example(tensor, dict(case.sizes), getattr(torch, dtype))
        if made.dtype == torch.bool:
            values = torch.randint(0, 2, made.shape, generator=generator).bool()
        elif not made.is_floating_point():
            values = torch.randint(0, below_of(tensor, dict(case.sizes)), made.shape, generator=generator)
            for place, planted in enumerate(tensor.planted):
                values.view(-1)[place :: 3 * len(tensor.planted)] = planted
        else:
            values = torch.randn(made.shape, generator=generator, dtype=torch.float64)
            if tensor.shape == spec.inputs[0].shape:
                values = (values * KINDS[kind]).clamp(-1e4, 1e4)
            if kind == "NaN and Inf" and number == 0:
                _plant(values)
        found.append(made.copy_(values).to(device))
    return found


def _plant(values: torch.Tensor) -> None:
    """A NaN and both infinities, far apart; a single element gets the NaN."""
    count = values.numel()
    for place, special in ((count // 2, float("inf")), (count - 1, float("-inf")), (0, float("nan"))):
        if count:
            values.view(-1)[place] = special


def eager(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Run a traced reference."""
    with torch.no_grad():
        return _listed(graph(*inputs))


def oracle(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Run a traced reference in fp64: casts between floating types inside it do nothing.

    On the CPU, whatever the inputs' device: CUDA's own rms_norm turns a whole row into NaN where one element is infinite, and an
    oracle must not share a kernel's habits.
    """
    wide = [tensor.to("cpu", torch.float64) if tensor.is_floating_point() else tensor.cpu() for tensor in inputs]
    with torch.no_grad():
        return [result.to(inputs[0].device) for result in _listed(_InFloat64(graph).run(*wide))]


class _InFloat64(torch.fx.Interpreter):
    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return super().call_function(target, _wide(args), _wide(kwargs))


def _wide(arguments: Any) -> Any:
    def one(value: Any) -> Any:
        return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value

    return map_aggregate(arguments, one)


def _listed(answer: Any) -> list[torch.Tensor]:
    return list(answer) if isinstance(answer, tuple | list) else [answer]
