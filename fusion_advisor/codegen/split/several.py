"""A kernel of several launches: one file with an entry point for each, called in order on scratch memory of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from fusion_advisor.codegen.common.interface import (
    BuiltKernel,
    CompileAhead,
    Header,
    KernelBuildFailed,
    KernelMaker,
    Launcher,
    Rendered,
)
from fusion_advisor.codegen.split.parts import Part, Parts, Scratch
from fusion_advisor.ir.program import Program, layout_key

Split = Callable[[Program], Parts | None]
"""Cuts a Program, or says that it does not."""


def render_parts(maker: KernelMaker, parts: Parts, header: Header, *, fast_math: bool) -> Rendered:
    """Print each launch, and put all into one file.

    Args:
        maker: prints one.
        parts: the launches.
        header: of the whole kernel.
        fast_math: whether it may approximate.

    Returns:
        The file under the entry point of its last launch, which has the whole kernel's title.
    """
    found = [maker.render(one.program, _header(header, one), tuning=one.tuning, fast_math=fast_math) for one in parts.parts]
    source = "\n\n".join(one.source for one in found)
    whole = tuple(replace(one, source=source) for one in found)
    return replace(whole[-1], parts=whole)


def _header(header: Header, part: Part) -> Header:
    if not part.does:
        return header
    return replace(header, title=f"{header.title[:40]}_{part.does}", summary=f"{part.does} of: {header.summary}")


def rendered_parts(program: Program, rendered: Rendered, split: Split) -> Iterator[tuple[Program, Rendered]]:
    """Yield each launch of a kernel with what it computes for a Program.

    Raises:
        KernelBuildFailed: the Program takes other launches than those which were rendered.
    """
    for part, one in zip(_parts(program, rendered, split).parts, rendered.parts, strict=True):
        yield part.program, one


def _parts(program: Program, rendered: Rendered, split: Split) -> Parts:
    """Cut a Program as the one that a kernel was rendered for."""
    found = split(program)
    if found is None or len(found.parts) != len(rendered.parts):
        cause = "sizes of its own take other launches"
        raise KernelBuildFailed(kernel=rendered.entry, target=f"shape {program.dims}", cause=cause)
    return found


class SeveralKernels:
    """The launches of one kernel.

    Args:
        rendered: with its parts.
        kernels: of the parts, in order.
        split: cuts a Program.

    Attributes:
        tuning: launch shapes of the Program bound last.
    """

    def __init__(self, rendered: Rendered, kernels: Sequence[BuiltKernel], split: Split) -> None:
        self._rendered = rendered
        self._kernels = tuple(kernels)
        self._split = split
        self._keys: tuple[str, ...] = ()
        self.tuning = ""

    @property
    def build_ns(self) -> int:
        """What building all of them took so far."""
        return sum(kernel.build_ns for kernel in self._kernels)

    def bind(self, program: Program) -> Launcher:
        """Fix sizes and strides of all launches.

        Raises:
            KernelBuildFailed: the Program takes other launches than those which were rendered.
        """
        parts = _parts(program, self._rendered, self._split)
        keys = tuple(layout_key(part.program) for part in parts.parts)
        self._keys = self._keys or keys
        if keys != self._keys:
            cause = "sizes of its own take other launches"
            raise KernelBuildFailed(kernel=self._rendered.entry, target=f"shape {program.dims}", cause=cause)
        launches = [kernel.bind(part.program) for kernel, part in zip(self._kernels, parts.parts, strict=True)]
        self.tuning = "; ".join(kernel.tuning for kernel in self._kernels)
        return _in_order(launches, [part.operands for part in parts.parts], parts.scratch)

    def compile_for(self, programs: Iterable[Program], ahead: CompileAhead | None = None) -> int:
        """Compile what binding any of these Programs takes; return how many machine codes that is."""
        del ahead  # its jobs are of kernels of one launch
        count = 0
        for program in programs:
            self.bind(program)
            count += len(self._kernels)
        return count


def _in_order(launches: Sequence[Launcher], operands: Sequence[tuple[int, ...]], scratch: Sequence[Scratch]) -> Launcher:
    """Return a launcher that calls all in order, each time on new scratch tensors, which a CUDA graph's memory may hold."""
    import torch

    sizes = [(one.elements, getattr(torch, one.dtype)) for one in scratch]
    steps = tuple(zip(launches, operands, strict=True))

    def launch(*tensors: Any) -> None:
        device = tensors[0].device
        made = [torch.empty(size, dtype=dtype, device=device) for size, dtype in sizes]
        for call, numbers in steps:
            call(*[tensors[number] if number >= 0 else made[-1 - number] for number in numbers])

    return launch
