"""Kernel files that can be taken away: each ends in a launch, a reference and a main program that checks and times it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Protocol

from fusion_advisor.codegen.common.interface import Rendered
from fusion_advisor.codegen.common.site import Layout
from fusion_advisor.codegen.registry import descriptor
from fusion_advisor.ir.program import Program
from fusion_advisor.records import TensorMeta


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

    Raises:
        ValueError: there are layouts, and not one for each operand.
    """
    if tensors and len(tensors) != len(program.operands):
        raise ValueError(f"{len(tensors)} layouts for the {len(program.operands)} operands of {rendered.entry}")
    layouts = [None if t is None else Layout(shape=tuple(t.shape), strides=tuple(t.stride)) for t in tensors]
    text = descriptor(rendered.backend).file_text(rendered, program, layouts, fast_math=fast_math)
    return replace(rendered, text=text)


def operand_layouts(
    given: Sequence[TensorMeta], made: Sequence[TensorMeta], in_place: Collection[int]
) -> list[TensorMeta | None]:
    """Return the layouts of a kernel's operands at a site; outputs that lie in tensors that it is given have none of their own.

    Args:
        given: of the tensors that a call passes: one for each input, then one for each output that is written in place.
        made: of the outputs.
        in_place: positions of the outputs that are written in place.
    """
    read = given[: len(given) - len(in_place)]
    return [*read, *(None if position in in_place else meta for position, meta in enumerate(made))]
