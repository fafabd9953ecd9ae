"""Inputs for checking a kernel, and its reference run on them: as it is, and in fp64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx.node import map_aggregate

from fusion_advisor.library.patterns import example
from fusion_advisor.library.spec import Case, KernelSpec, below_of

KINDS = {"normal": 1.0, "large": 3e3, "tiny": 1e-4, "NaN and Inf": 1.0}
"""Kinds of input, with the magnitude of what has the first input's shape; parameters stay near 1, and a linear layer's weight so
that its results have the magnitude of its inputs."""


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
            if spec.is_contracted(tensor):
                values /= values.shape[-1] ** 0.5
            if kind == "NaN and Inf" and number == 0:
                _plant(values)
        found.append(made.copy_(values).to(device))
    return found


def _plant(values: torch.Tensor) -> None:
    """A NaN and both infinities at distant positions; a single element gets the NaN."""
    count = values.numel()
    for place, special in ((count // 2, float("inf")), (count - 1, float("-inf")), (0, float("nan"))):
        if count:
            values.view(-1)[place] = special


def eager(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Run a traced reference where its inputs are."""
    return _run(graph, inputs, is_wide=False)


def in_float64(graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run a traced reference in fp64 where its inputs are: casts between floating types inside it do nothing."""
    return _run(graph, [t.to(torch.float64) if t.is_floating_point() else t for t in inputs], is_wide=True)


def oracle(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Run a traced reference in fp64 on the CPU, whatever the inputs' device.

    CUDA's own rms_norm turns a whole row into NaN where one element is infinite, and an oracle must not share a kernel's habits.
    """
    return [result.to(inputs[0].device) for result in in_float64(graph, [tensor.cpu() for tensor in inputs])]


def planned_layouts(graph: torch.fx.GraphModule) -> list[torch.Tensor]:
    """Meta tensors laid out as a traced reference lays out its results.

    A kernel is planned from these. Torch's index of a table by transposed numbers, for one, returns another layout when it runs.
    """
    returned = next(node for node in graph.graph.nodes if node.op == "output").all_input_nodes
    planned = [node.meta["val"] for node in returned]
    return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in planned]


def _run(graph: torch.fx.GraphModule, inputs: list[torch.Tensor], *, is_wide: bool) -> list[torch.Tensor]:
    with torch.no_grad():
        return _listed(_Replay(graph, inputs[0].device, is_wide=is_wide).run(*inputs))


class _Replay(torch.fx.Interpreter):
    """Runs a graph on another device than it was traced on: masks and positions that it makes are made there."""

    def __init__(self, graph: torch.fx.GraphModule, device: torch.device, *, is_wide: bool) -> None:
        super().__init__(graph)
        self._device, self._is_wide = device, is_wide

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return super().call_function(target, map_aggregate(args, self._moved), map_aggregate(kwargs, self._moved))

    def _moved(self, value: Any) -> Any:
        if isinstance(value, torch.device):
            return self._device
        return torch.float64 if self._is_wide and isinstance(value, torch.dtype) and value.is_floating_point else value


def _listed(answer: Any) -> list[torch.Tensor]:
    return list(answer) if isinstance(answer, tuple | list) else [answer]
