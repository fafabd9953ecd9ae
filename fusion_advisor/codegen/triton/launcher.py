"""A Triton kernel file that runs by itself: the kernel, then its launch, a reference, and a main program."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from fusion_advisor.codegen.common.horizontal_fusion import MULTIPLE, Call, calls_of
from fusion_advisor.codegen.common.interface import Rendered, environment
from fusion_advisor.codegen.common.site import Layout, SiteTensor, tensors_of
from fusion_advisor.codegen.common.value_names import ValueNames
from fusion_advisor.codegen.split.choose import split_program
from fusion_advisor.codegen.split.parts import scratch_name
from fusion_advisor.codegen.triton.direct_launch import compile_options
from fusion_advisor.codegen.triton.launch import launch_of
from fusion_advisor.codegen.triton.reference import torch_reference
from fusion_advisor.codegen.triton.signature import aligned_names, open_names
from fusion_advisor.codegen.triton.tiling import FLAT_BLOCK, NARROWEST, Shape
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
    tensors = tensors_of(program, layouts)
    if rendered.parts:
        given = [ValueNames({"torch", "triton", "tl"}).fresh(tensor.name) for tensor in tensors]
        steps = _steps(program, rendered, given)
        return rendered.source + _rest(rendered, program, tensors, fast_math=fast_math, given=given, steps=steps)
    shape, integers = launch_of(calls, rendered)
    is_open = bool(rendered.open_arguments.names)
    blocks, grid, constants = (_open_launch if is_open else _launch)(calls, shape, rendered)
    scalars = _open_sizes(calls) if is_open else integers
    names = ValueNames({"grid", "torch", "triton", "tl", *(name for name, _ in (*integers, *scalars))})
    given = [names.fresh(tensor.name) for tensor in tensors]
    options = _options(calls, shape, rendered, is_exact=program.is_exact)
    passed = textwrap.wrap(", ".join([*given, *(name for name, _ in integers)]), 110)
    defaults = textwrap.wrap(", ".join(f"{name}={v}" for name, v in scalars), 110)
    return rendered.source + _rest(
        rendered, program, tensors, fast_math=fast_math, given=given, blocks=blocks, grid=grid, constants=constants,
        options=options, scalars=[line.removesuffix(",") for line in defaults],
        arguments=[line.removesuffix(",") for line in passed],
    )  # fmt: skip


def _rest(
    rendered: Rendered,
    program: Program,
    tensors: Sequence[SiteTensor],
    *,
    given: Sequence[str],
    fast_math: bool,
    **launch: object,
) -> str:
    """Return what follows the kernel in its file.

    Args:
        rendered: the kernel.
        program: of its site.
        tensors: its operands there.
        given: their names in the launch.
        fast_math: whether the kernel approximates.
        launch: what the template writes the launch with.
    """
    reference, own = torch_reference(program, tensors), own_dtype(program)
    return environment().get_template("triton/launcher.py.jinja").render(
        file=f"{rendered.entry}.py", entry=rendered.entry, given=", ".join(given),
        tensors=[{"name": t.name, "made": _made(t)} for t in tensors],
        helpers=reference.helpers, reference=reference.lines, own=own, moved_bytes=program.moved_bytes,
        input_count=sum(not tensor.is_output for tensor in tensors),
        output_names=repr(tuple(tensor.name for tensor in tensors if tensor.is_output)),
        floor=FAST_MATH_FLOOR if fast_math else FLOORS[own],
        **{"steps": [], "scalars": [], **launch},
    )  # fmt: skip


def _steps(program: Program, rendered: Rendered, given: Sequence[str]) -> list[str]:
    """Return the lines that launch a kernel of several parts, with scratch tensors between them."""
    parts = split_program(program)
    assert parts is not None
    lines = [
        f"{scratch_name(-1 - n)} = torch.empty({one.elements}, dtype=torch.{one.dtype}, device={given[0]}.device)"
        for n, one in enumerate(parts.scratch)
    ]
    for part, one in zip(parts.parts, rendered.parts, strict=True):
        calls = calls_of(part.program, flatten_rows=False)
        shape, integers = launch_of(calls, one)
        names = [given[number] if number >= 0 else scratch_name(number) for number in part.operands]
        constants = [f"{name}={f'tl.{value}' if name == 'INDEX' else value}" for name, value in shape.constants.items()]
        passed = [*names, *(str(value) for _, value in integers), *constants]
        text = ", ".join([*passed, _options(calls, shape, one, is_exact=program.is_exact)])
        lines += [f"{one.entry}[({shape.programs},)](", *(f"    {line}" for line in textwrap.wrap(text, 110)), ")"]
    return lines


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


def _launch(calls: Sequence[Call], shape: Shape, rendered: Rendered) -> tuple[list[str], str, str]:
    """Lines that set block sizes, the grid, and the constexpr arguments."""
    plan = calls[0].plan
    given = {name: f"tl.{value}" if name == "INDEX" else str(value) for name, value in shape.constants.items()}
    blocks = {name: value for name, value in given.items() if name.startswith("BLOCK")}
    constants = {name: name if name in blocks else value for name, value in given.items()}
    grid = str(shape.programs)
    if len(calls) == 1 and 0 not in plan.program.dims:
        across = f"triton.cdiv({plan.sizes[-1]}, BLOCK_COLS)"
        if plan.kind == "flat":
            grid = across
        elif plan.kind == "rows":
            grid = "triton.cdiv(rows, BLOCK_ROWS)"
            if not rendered.form.is_looped:
                blocks["BLOCK_COLS"] = f"triton.next_power_of_2({plan.sizes[-1]})"
            constants["FULL"] = f"{plan.sizes[-1]} % BLOCK_COLS == 0"
        else:
            # The size of the outermost dim is no argument of the kernel.
            outer = [str(size) for size in plan.program.dims[:-2]]
            grid = " * ".join([*outer, "triton.cdiv(rows, BLOCK_ROWS)", across])
    lines = [f"{name} = {value}" for name, value in blocks.items()]
    return lines, grid, ", ".join(f"{name}={value}" for name, value in constants.items())


def _open_launch(calls: Sequence[Call], shape: Shape, rendered: Rendered) -> tuple[list[str], str, str]:
    """The same of a kernel for many sizes: all that follows from the sizes is computed from them."""
    given = {name: f"tl.{value}" if name == "INDEX" else str(value) for name, value in shape.constants.items()}
    blocks = {name: value for name, value in given.items() if name.startswith("BLOCK")}
    constants = {name: name if name in blocks else value for name, value in given.items()}
    if "BY_FOUR" in constants:
        constants["BY_FOUR"] = "False"  # right for any sizes
    if "ALIGNED" in constants:
        constants["ALIGNED"] = "ALIGNED"
    if _has_open_rows(calls, rendered):
        cols = ", ".join(_named(call, number, call.plan.sizes[-1]) for number, call in enumerate(calls, start=1))
        width = f"triton.next_power_of_2({cols if len(calls) == 1 else f'max({cols})'})"
        blocks = {"BLOCK_COLS": f"max({NARROWEST}, {width})"}
        blocks["BLOCK_ROWS"] = f"max(1, {FLAT_BLOCK // _per_column(calls)} // BLOCK_COLS)"
    lines = [f"{name} = {value}" for name, value in blocks.items()]
    if "ALIGNED" in constants:
        lines.append(f"ALIGNED = ({' | '.join(aligned_names(calls, rendered.open_arguments))}) % {MULTIPLE} == 0")
    counts = [_programs(call, number) for number, call in enumerate(calls, start=1)]
    for number, count in enumerate(counts[:-1], start=2):
        lines.append(f"start_of_{number} = {f'start_of_{number - 1} + ' if number > 2 else ''}{count}")
    grid = f"start_of_{len(counts)} + {counts[-1]}" if len(counts) > 1 else counts[0]
    return lines, grid, ", ".join(f"{name}={value}" for name, value in constants.items())


def _has_open_rows(calls: Sequence[Call], rendered: Rendered) -> bool:
    """Whether a tile holds whole rows of a width that varies."""
    names = rendered.open_arguments.names
    is_open = any(call.plan.sizes[-1] in open_names(call, names) for call in calls)
    return is_open and calls[0].plan.kind == "rows" and not rendered.form.is_looped


def _per_column(calls: Sequence[Call]) -> int:
    """Elements that a column of a tile stands for."""
    return 2 if any(call.plan.has_pairs for call in calls) else 1


def _options(calls: Sequence[Call], shape: Shape, rendered: Rendered, *, is_exact: bool) -> str:
    """Compile options, as keywords."""
    options: dict[str, object] = {**compile_options(shape.num_warps, asserts=rendered.has_asserts, is_exact=is_exact)}
    if _has_open_rows(calls, rendered):
        options["num_warps"] = f"max(1, min(16, BLOCK_ROWS * BLOCK_COLS // {512 // _per_column(calls)}))"
    return ", ".join(f"{name}={value}" for name, value in options.items())


def _named(call: Call, number: int, name: str) -> str:
    """The name that a launch has for a size of a nest."""
    return f"{name}_of_{number}" if call.function else name


def _programs(call: Call, number: int) -> str:
    """How many programs a nest takes, as an expression."""
    plan = call.plan
    sizes = [_named(call, number, name) for name in plan.sizes]
    if plan.kind == "flat":
        return f"triton.cdiv({sizes[-1]}, BLOCK_COLS)"
    if plan.kind == "rows":
        return f"triton.cdiv({_named(call, number, 'rows')}, BLOCK_ROWS)"
    return " * ".join([*sizes[:-2], f"triton.cdiv({sizes[-2]}, BLOCK_ROWS)", f"triton.cdiv({sizes[-1]}, BLOCK_COLS)"])


def _open_sizes(calls: Sequence[Call]) -> list[tuple[str, int]]:
    """What a launch of a kernel for many sizes is given: its integers, and outermost sizes that only the grid depends on."""
    found = [item for call in calls for item in call.arguments]
    for number, call in enumerate(calls, start=1):
        name = _named(call, number, call.plan.sizes[0])
        if call.plan.kind == "tiled" and name not in dict(found):
            found.append((name, call.plan.program.dims[0]))
    return found
