"""Turns kernels into torch ops: schema, layouts, a fake implementation, and how C++ and Triton kernels are launched.

The ops are defined with torch.library's define and impl, in C++'s dispatcher: a call costs 0.2 us more than the launch itself, one of
torch.library.custom_op 10 us. They are opaque to torch.compile on purpose: it compiles Triton kernels anew, with options of its own,
and the numbers would no longer be those that were checked.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from ._kept import INTO, Binaries

NAMESPACE = __package__.rpartition(".")[2]
BINARIES = Binaries(Path(__file__).parent / "built", NAMESPACE)
"""Compiled kernels."""
LAYOUTS: dict[str, tuple[Sequence["Laid"], Sequence["Laid"], Sequence[int], str]] = {}
"""By op: inputs, outputs, positions of the outputs that it is given, device."""
LIBRARY = torch.library.Library(NAMESPACE, "DEF")
_EXACT = getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)


class Laid(NamedTuple):
    """A tensor as it was when the kernel was checked: sizes and strides in elements."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def empty(self, device: torch.device) -> torch.Tensor:
        """Allocate one."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)

    def filled(self, values: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Make one of these values; of rows that share memory the first counts."""
        made = self.empty(device)
        once = tuple(slice(None if step else 1) for step in self.stride)
        made[once] = values[once]
        return made

    def laid_out(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        """Return the tensor with these strides, copied where it has others."""
        if tensor.shape != self.shape or tensor.dtype != self.dtype:
            found = f"{tuple(tensor.shape)} {tensor.dtype}"
            raise RuntimeError(f"{NAMESPACE}::{op}: `{self.name}` is {found}, the kernel is for {self.shape} {self.dtype}")
        pairs = zip(self.shape, self.stride, tensor.stride(), strict=True)
        if all(size == 1 or stride == own for size, stride, own in pairs):
            return tensor
        return self.empty(tensor.device).copy_(tensor)


def kernel_op(
    name: str,
    launch: Callable[..., None],
    inputs: Sequence[Laid],
    outputs: Sequence[Laid],
    device: str,
    in_place: Sequence[int] = (),
) -> torch._ops.OpOverload:
    """Register a kernel as an op and return it.

    Args:
        name: of the op, inside the package's namespace.
        launch: called with the inputs, then the outputs.
        inputs: layouts that the kernel was made for.
        outputs: what it computes.
        device: `cpu` or `cuda`.
        in_place: positions of the outputs that the op is given after its inputs; it allocates and returns the others.
    """
    LAYOUTS[name] = (inputs, outputs, in_place, device)
    if in_place:
        return _writing_op(name, launch, inputs, outputs, device, in_place)
    returned = "Tensor" if len(outputs) == 1 else f"({', '.join(['Tensor'] * len(outputs))})"
    given = ", ".join(f"Tensor {one.name}" for one in inputs)
    LIBRARY.define(f"{name}({given}) -> {returned}", tags=(torch.Tag.pt2_compliant_tag, _EXACT))
    strides = [one.stride for one in inputs]

    def run(*tensors: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        if [tensor.stride() for tensor in tensors] != strides or any(
            tensor.dtype != one.dtype or tensor.shape != one.shape for tensor, one in zip(tensors, inputs)
        ):
            tensors = tuple(one.laid_out(tensor, name) for one, tensor in zip(inputs, tensors, strict=True))
        made = tuple(one.empty(tensors[0].device) for one in outputs)
        launch(*tensors, *made)
        return made[0] if len(made) == 1 else made

    def fake(*tensors: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        made = tuple(one.empty(tensors[0].device) for one in outputs)
        return made[0] if len(made) == 1 else made

    LIBRARY.impl(name, run, device.upper())
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def _writing_op(
    name: str, launch: Callable[..., None], inputs: Sequence[Laid], outputs: Sequence[Laid], device: str, in_place: Sequence[int]
) -> torch._ops.OpOverload:
    """Register a kernel that writes into some of its arguments."""
    fresh = [one for place, one in enumerate(outputs) if place not in in_place]
    written = [outputs[place] for place in in_place]
    given = [f"Tensor {one.name}" for one in inputs]
    given += [f"Tensor({chr(97 + place)}!) {one.name}" for place, one in enumerate(written)]
    returned = "Tensor" if len(fresh) == 1 else f"({', '.join(['Tensor'] * len(fresh))})"
    LIBRARY.define(f"{name}({', '.join(given)}) -> {returned}", tags=(torch.Tag.pt2_compliant_tag, _EXACT))

    def run(*tensors: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...] | None:
        read, targets = tensors[: len(inputs)], tensors[len(inputs) :]
        for one, target in zip(written, targets, strict=True):
            if one.laid_out(target, name) is not target:
                raise RuntimeError(f"{NAMESPACE}::{name}: `{one.name}` has strides {target.stride()}, not {one.stride}")
        made = [one.empty(tensors[0].device) for one in fresh]
        new, old = iter(made), iter(targets)
        results = [next(old) if place in in_place else next(new) for place, _ in enumerate(outputs)]
        launch(*(one.laid_out(tensor, name) for one, tensor in zip(inputs, read, strict=True)), *results)
        return made[0] if len(made) == 1 else tuple(made) if made else None

    def fake(*tensors: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...] | None:
        made = tuple(one.empty(tensors[0].device) for one in fresh)
        return made[0] if len(made) == 1 else made or None

    LIBRARY.impl(name, run, device.upper())
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


@functools.cache
def _fill_triton_cache() -> None:
    """Give Triton the kernels that the package brought, unless some are compiled to be brought."""
    if INTO not in os.environ:
        home = os.environ.get("TRITON_CACHE_DIR")
        BINARIES.give_to_triton(Path(home) if home else Path.home() / ".triton" / "cache")


def triton_launcher(file: str) -> Callable[..., None]:
    """Return the launch of a Triton kernel's file; its defaults are the sizes and block sizes that were chosen."""
    module = f"{__package__}.kernels.{file.removesuffix('.py')}"

    @functools.cache
    def started() -> Callable[..., None]:
        _fill_triton_cache()
        return importlib.import_module(module).launch

    def launch(*tensors: torch.Tensor) -> None:
        start = started()
        if not tensors[0].is_cuda:  # the interpreter
            start(*tensors)
            return
        with torch.cuda.device(tensors[0].device):
            start(*tensors)

    return launch
