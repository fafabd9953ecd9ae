"""A Triton kernel file that runs by itself: the kernel, then its launch, a reference, and a main program."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from fusion_advisor.codegen.common.horizontal_fusion import Call, calls_of
from fusion_advisor.codegen.common.interface import Rendered, environment
from fusion_advisor.codegen.common.site import Layout, SiteTensor, tensors_of
from fusion_advisor.codegen.common.value_names import ValueNames
from fusion_advisor.codegen.triton.backend import compile_options
from fusion_advisor.codegen.triton.launch import launch_of
from fusion_advisor.codegen.triton.reference import torch_reference
from fusion_advisor.codegen.triton.signature import aligned_names
from fusion_advisor.codegen.triton.tiling import NARROWEST, Shape
from fusion_advisor.ir.program import Program

FLOORS = {"float32": 5e-7, "float64": 1e-14}
"""Relative error that is allowed even where the op-by-op computation has none: four units in the last place of the maths."""
FAST_MATH_FLOOR = 1e-4


def with_launcher(rendered: Rendered, program: Program, *, layouts: Sequence[Layout | None] = (), fast_math: bool = False) -> str:
    """Return the whole file of a Triton kernel.

    Args:
        rendered: the kernel.
        program: of its site.
        layouts: shape and strides of each operand at the site.
        fast_math: whether the kernel approximates.
    """
    calls = calls_of(program, flatten_rows=False)
    if all(call.plan.is_empty for call in calls):
        return rendered.source
    shape, integers = launch_of(calls, rendered)
    tensors = tensors_of(program, layouts)
    reference = torch_reference(program, tensors)
    own = own_dtype(program)
    of_grid = _sizes_of_grid(calls, shape, rendered)
    scalars = [*integers, *of_grid]
    blocks, grid, constants = _launch(calls, shape, rendered, of_grid)
    names = ValueNames({"grid", "torch", "triton", "tl", *(name for name, _ in scalars)})
    given = [names.fresh(tensor.name) for tensor in tensors]
    options = compile_options(shape.num_warps, asserts=rendered.has_asserts, is_exact=program.is_exact)
    passed = textwrap.wrap(", ".join([*given, *(name for name, _ in integers)]), 110)
    text = environment().get_template("triton/launcher.py.jinja").render(
        file=f"{rendered.entry}.py", entry=rendered.entry, blocks=blocks, grid=grid, constants=constants,
        tensors=[{"name": t.name, "made": _made(t)} for t in tensors], given=", ".join(given),
        scalars=[line.removesuffix(",") for line in textwrap.wrap(", ".join(f"{name}={v}" for name, v in scalars), 110)],
        arguments=[line.removesuffix(",") for line in passed], options=", ".join(f"{k}={v}" for k, v in options.items()),
        helpers=reference.helpers, reference=reference.lines, own=own, moved_bytes=program.moved_bytes,
        input_count=sum(not tensor.is_output for tensor in tensors),
        output_names=repr(tuple(tensor.name for tensor in tensors if tensor.is_output)),
        floor=FAST_MATH_FLOOR if fast_math else FLOORS[own],
    )  # fmt: skip
    return rendered.source + text


def own_dtype(program: Program) -> str:
    """The dtype that a kernel computes in: ``float64`` where an operand has it, else ``float32``."""
    return "float64" if any(operand.dtype == "float64" for operand in program.operands) else "float32"


def _made(tensor: SiteTensor) -> str:
    layout = tensor.layout or Layout(shape=(tensor.element_count,), strides=(1,))
    place, dtype = f"{layout.shape}, {layout.strides}, ", f"torch.{tensor.dtype}"
    if tensor.is_output:
        return f"torch.empty_strided({place}dtype={dtype}, device=device).zero_()"
    if tensor.dtype.startswith(("float", "bfloat")):
        return f"normal({place}{dtype})"
    return f"whole({place}{dtype}, {2 if tensor.dtype == 'bool' else tensor.below})"


def _sizes_of_grid(calls: Sequence[Call], shape: Shape, rendered: Rendered) -> list[tuple[str, int]]:
    """Sizes that vary and are no arguments of the kernel: its launch is given them for the grid alone."""
    if not rendered.open_arguments.names:
        return []
    if len(calls) > 1:
        return [("programs", shape.programs)]
    plan = calls[0].plan
    is_missing = plan.kind == "tiled" and plan.sizes[0] not in {name for name, _ in plan.arguments}
    return [(plan.sizes[0], plan.program.dims[0])] if is_missing else []


def _launch(
    calls: Sequence[Call], shape: Shape, rendered: Rendered, of_grid: Sequence[tuple[str, int]]
) -> tuple[list[str], str, str]:
    """Lines that set block sizes, the grid, and the constexpr arguments."""
    plan, opened = calls[0].plan, rendered.open_arguments
    given = {name: f"tl.{value}" if name == "INDEX" else str(value) for name, value in shape.constants.items()}
    blocks = {name: value for name, value in given.items() if name.startswith("BLOCK")}
    constants = {name: name if name in blocks else value for name, value in given.items()}
    grid = of_grid[0][0] if len(calls) > 1 and of_grid else str(shape.programs)
    if "ALIGNED" in constants:
        constants["ALIGNED"] = " == ".join([*(f"{name} % 16" for name in aligned_names(calls, opened)), "0"])
    if len(calls) == 1 and 0 not in plan.program.dims:
        across = f"triton.cdiv({plan.sizes[-1]}, BLOCK_COLS)"
        is_open = plan.sizes[-1] in opened.names
        if plan.kind == "flat":
            grid = across
        elif plan.kind == "rows":
            grid = "triton.cdiv(rows, BLOCK_ROWS)"
            if not rendered.form.is_looped:
                width = f"triton.next_power_of_2({plan.sizes[-1]})"
                blocks["BLOCK_COLS"] = f"max({NARROWEST}, {width})" if is_open else width
            constants["FULL"] = "False" if is_open else f"{plan.sizes[-1]} % BLOCK_COLS == 0"
        else:
            # The size of the outermost dim is no argument of the kernel.
            outer = [str(size) for size in (plan.sizes[:-2] if opened.names else plan.program.dims[:-2])]
            grid = " * ".join([*outer, "triton.cdiv(rows, BLOCK_ROWS)", across])
    lines = [f"{name} = {value}" for name, value in blocks.items()]
    return lines, grid, ", ".join(f"{name}={value}" for name, value in constants.items())
