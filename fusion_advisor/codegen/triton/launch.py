"""What a Triton kernel is launched with at some sizes, and which machine code that takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fusion_advisor.codegen.common.horizontal_fusion import MULTIPLE, Call, calls_of, starts
from fusion_advisor.codegen.common.interface import Rendered, Tuning
from fusion_advisor.codegen.triton.signature import aligned_names, fixed_arguments, fixed_of_all, open_names
from fusion_advisor.codegen.triton.tiling import Shape, choose_shapes
from fusion_advisor.ir.program import Program


def launch_of(calls: Sequence[Call], rendered: Rendered, tuning: Tuning | None = None) -> tuple[Shape, list[tuple[str, int]]]:
    """Return the launch of a kernel, and its integers in the order of the signature.

    Args:
        calls: the nests of the program that is launched.
        rendered: the kernel.
        tuning: in place of the kernel's own.

    Raises:
        KernelBuildFailed: the grid or the tile would pass what CUDA or Triton allow.
    """
    arguments = rendered.open_arguments
    shape, programs = choose_shapes(
        [call.plan for call in calls], tuning or rendered.tuning, is_looped=rendered.form.is_looped,
        opened=[open_names(call, arguments.names) for call in calls],
    )  # fmt: skip
    integers = [*starts(programs), *(item for call in calls for item in call.arguments)]
    if aligned := aligned_names(calls, arguments):
        values = dict(integers)
        is_aligned = all(values[name] % MULTIPLE == 0 for name in aligned)
        known = {"VECTORS": shape.constants["VECTORS"] and is_aligned} if "VECTORS" in shape.constants else {}
        shape = replace(shape, constants={**shape.constants, **known, "ALIGNED": is_aligned})
    return shape, integers


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What one machine code of a kernel is compiled for.

    Attributes:
        constants: name and value.
        num_warps: of a program.
        integers: for each of the others its name, its type, and what Triton assumes of it: ``1``, ``D`` (a multiple of 16), or
            nothing.
    """

    constants: tuple[tuple[str, Any], ...]
    num_warps: int
    integers: tuple[tuple[str, str, str], ...]


def variant_of(program: Program, rendered: Rendered) -> Variant | None:
    """Return which machine code a program takes, for tensors that start at multiples of 16 bytes; None where nothing is launched.

    Args:
        program: of the layout that was rendered.
        rendered: the kernel.

    Raises:
        KernelBuildFailed: as :func:`launch_of`.
    """
    calls = calls_of(program, flatten_rows=False)
    if all(call.plan.is_empty for call in calls):
        return None
    shape, integers = launch_of(calls, rendered)
    fixed = fixed_of_all(calls, fixed_arguments(calls, rendered.open_arguments.names))
    constants: list[tuple[str, Any]] = [(name, value) for name, value in integers if name in fixed]
    constants += [(name, str(value) if name == "INDEX" else value) for name, value in shape.constants.items()]
    unspecialized = rendered.open_arguments.unspecialized
    given = [
        (name, "i32" if -(2**31) <= value < 2**31 else "i64", "" if name in unspecialized else _assumed(value))
        for name, value in integers
        if name not in fixed
    ]
    return Variant(constants=tuple(constants), num_warps=shape.num_warps, integers=tuple(given))


def _assumed(value: int) -> str:
    return "1" if value == 1 else "D" if value % MULTIPLE == 0 else ""
