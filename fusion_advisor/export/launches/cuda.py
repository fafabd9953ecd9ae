"""How a CUDA C++ kernel is launched: macros, grid, block and integers, computed where the package is exported."""

from __future__ import annotations

from fusion_advisor.codegen.common.horizontal_fusion import calls_of, starts
from fusion_advisor.codegen.common.interface import Rendered
from fusion_advisor.codegen.cuda.nvrtc import device_shared_memory
from fusion_advisor.codegen.cuda.shared_memory import SharedMemory
from fusion_advisor.codegen.cuda.tiling import launch_shapes, pack_width, shared_bytes_of
from fusion_advisor.ir.program import Program


def cuda_facts(program: Program, rendered: Rendered) -> dict[str, str]:
    """Return the launcher's arguments as Python source: the launch for aligned tensors, and one for any others.

    Args:
        program: of the site.
        rendered: its kernel.
    """
    calls, form = calls_of(program, flatten_rows=True), rendered.form
    plans = [call.plan for call in calls]
    widths = [pack_width(plan, form) for plan in plans]
    width, alignment = min(found for found, _ in widths), max(found for _, found in widths)
    shared = device_shared_memory() if form.is_looped else SharedMemory()
    launches = []
    for columns in dict.fromkeys((width, 1)):
        macros, grids = launch_shapes(
            plans, rendered.tuning, form=form, width=columns, shared=shared, opened=rendered.open_arguments.names
        )
        blocks = [across for across, _, _ in grids]
        integers = [value for _, value in [*starts(blocks), *(item for call in calls for item in call.arguments)]]
        grid = (sum(blocks), max(down for _, down, _ in grids), 1)
        block = (macros["THREADS"], macros.get("ROWS", 1), 1)
        launches.append(
            {
                "macros": macros, "grid": grid, "block": block,
                "shared_bytes": max(shared_bytes_of(plan, macros) for plan in plans),
                "integers": tuple(map(int, integers)),
            }
        )  # fmt: skip
    return {
        "launches": repr(tuple(launches)),
        "alignment": repr(alignment),
        "is_for_one_arch": repr(rendered.is_for_one_arch),
    }
