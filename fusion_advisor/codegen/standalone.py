"""Kernel files that can be taken away: each ends in a launch, a reference and a main program that checks and times it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from fusion_advisor.codegen.common.interface import Rendered
from fusion_advisor.codegen.common.site import Layout
from fusion_advisor.codegen.registry import descriptor
from fusion_advisor.ir.program import Program


class _TensorLayout(Protocol):
    """A tensor's layout as captures record it."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def stride(self) -> tuple[int, ...]: ...


def with_launcher(
    rendered: Rendered, program: Program, *, tensors: Sequence[_TensorLayout | None] = (), fast_math: bool = False
) -> Rendered:
    """Return a kernel whose file runs by itself.

    Args:
        rendered: the kernel; what is compiled of it stays as it is.
        program: of its site.
        tensors: layout of each operand at the site, where it is known.
        fast_math: whether the kernel approximates.
    """
    layouts = [None if t is None else Layout(shape=tuple(t.shape), strides=tuple(t.stride)) for t in tensors]
    text = descriptor(rendered.backend).file_text(rendered, program, layouts, fast_math=fast_math)
    return replace(rendered, text=text)
