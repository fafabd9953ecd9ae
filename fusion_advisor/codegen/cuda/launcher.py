"""A CUDA C++ kernel file that runs by itself: its launch shape, the kernel, then a launch, a reference and a main program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fusion_advisor.codegen.common.cpp_reference import check_context
from fusion_advisor.codegen.common.horizontal_fusion import Call, calls_of, starts
from fusion_advisor.codegen.common.interface import Rendered, environment
from fusion_advisor.codegen.common.value_names import ValueNames
from fusion_advisor.codegen.cuda.ops import SCALARS
from fusion_advisor.codegen.cuda.shared_memory import SharedMemory
from fusion_advisor.codegen.cuda.tiling import launch_shapes, pack_width, shared_bytes_of
from fusion_advisor.ir.program import Program

_PREAMBLE = """\
// Build and run: nvcc -O3 -std=c++17 -arch={target} {entry}.cu -o check && ./check
#ifndef __CUDACC_RTC__  // the launch that was chosen for the sizes at the end of this file
{macros}
#endif

"""
_TIMED = """\
CHECK_CUDA(launch({given}));
CHECK_CUDA(cudaDeviceSynchronize());
{copied}
void *flushed;  // written between runs, so that none of them finds its data in the L2 cache
const size_t flushed_bytes = size_t{{256}} << 20;
CHECK_CUDA(cudaMalloc(&flushed, flushed_bytes));
cudaEvent_t start, stop;
CHECK_CUDA(cudaEventCreate(&start));
CHECK_CUDA(cudaEventCreate(&stop));
std::vector<double> microseconds;
for (int run = 0; run < 30; ++run) {{
  CHECK_CUDA(cudaMemsetAsync(flushed, 0, flushed_bytes, nullptr));
  CHECK_CUDA(cudaEventRecord(start, nullptr));
  CHECK_CUDA(launch({given}));
  CHECK_CUDA(cudaEventRecord(stop, nullptr));
  CHECK_CUDA(cudaEventSynchronize(stop));
  float milliseconds = 0;
  CHECK_CUDA(cudaEventElapsedTime(&milliseconds, start, stop));
  microseconds.push_back(milliseconds * 1e3);
}}"""


def with_launcher(rendered: Rendered, program: Program, *, shared: SharedMemory, arch: int = 90, fast_math: bool = False) -> str:
    """Return the whole file of a CUDA C++ kernel.

    Args:
        rendered: the kernel.
        program: of its site.
        shared: the shared memory of the GPU; it decides how much of a wide row is kept there.
        arch: compute capability that the command line at the top names.
        fast_math: whether the kernel approximates.
    """
    calls, form = calls_of(program, flatten_rows=True), rendered.form
    plans = [call.plan for call in calls]
    if all(plan.is_empty for plan in plans):
        return rendered.source
    width = min(pack_width(plan, form)[0] for plan in plans)
    macros, grids = launch_shapes(
        plans, rendered.tuning, form=form, width=width, shared=shared if form.is_looped else SharedMemory()
    )
    blocks = [across for across, _, _ in grids]
    integers = [*starts(blocks), *(item for call in calls for item in call.arguments)]
    check = check_context(program, fast_math=fast_math)
    names = ValueNames({"stream", "grid", "block", *(name for name, _ in integers)})
    tensors = [names.fresh(tensor["name"]) for tensor in check["tensors"]]
    pointers = [
        f"{'' if operand.is_output else 'const '}{SCALARS[operand.dtype]}* {name}"
        for operand, name in zip(program.operands, tensors, strict=True)
    ]
    defined = "\n".join(f"#define {name} {value}" for name, value in macros.items())
    target = f"sm_{arch}{'a' * rendered.is_for_one_arch}"
    launcher = environment().get_template("cuda/launcher.cu.jinja").render(
        **check, entry=rendered.entry, note=", cold L2 cache", run=_run(program, check["tensors"]),
        parameters=[*pointers, *(f"index_t {name} = {value}" for name, value in integers)],
        arguments=[*tensors, *(name for name, _ in integers)],
        grid=_grid(calls, macros, grids), block=f"THREADS{', ROWS' if 'ROWS' in macros else ''}",
        shared_bytes=max(shared_bytes_of(plan, macros) for plan in plans),
    )  # fmt: skip
    return _PREAMBLE.format(target=target, entry=rendered.entry, macros=defined) + rendered.source + launcher


def _run(program: Program, tensors: Sequence[Mapping[str, str]]) -> list[str]:
    lines, given, copied = [], ["nullptr"], []
    for operand, tensor in zip(program.operands, tensors, strict=True):
        name, host, device = tensor["name"], tensor["host"], f"{tensor['name']}_device"
        size = f"{host}.size() * sizeof {host}[0]"
        lines += [
            f"{SCALARS[operand.dtype]} *{device};",
            f"CHECK_CUDA(cudaMalloc(&{device}, {size}));",
            f"CHECK_CUDA(cudaMemcpy({device}, {host}.data(), {size}, cudaMemcpyHostToDevice));",
        ]
        given.append(f"{name}_device")
        if operand.is_output:
            copied.append(f"CHECK_CUDA(cudaMemcpy({host}.data(), {device}, {size}, cudaMemcpyDeviceToHost));")
    timed = _TIMED.format(given=", ".join(given), copied="\n".join(copied))
    return [*lines, *timed.splitlines()]


def _grid(calls: Sequence[Call], macros: Mapping[str, int], grids: Sequence[tuple[int, int, int]]) -> str:
    """The grid from the sizes, where there is one loop nest."""
    across, down = sum(grid[0] for grid in grids), max(grid[1] for grid in grids)
    plan = calls[0].plan
    if len(calls) > 1 or 0 in plan.program.dims:
        return f"{across}, {down}"
    cols = plan.sizes[-1]
    packs = f"({cols} + VEC - 1) / VEC"
    if plan.kind == "flat":
        return f"({packs} + THREADS * PACKS - 1) / (THREADS * PACKS)"
    if plan.kind == "tiled":
        return f"(rows + ROWS * PACKS - 1) / (ROWS * PACKS), {down}"
    return f"(rows + {macros.get('ROWS', 1)} - 1) / {macros.get('ROWS', 1)}{' * CLUSTER' if 'CLUSTER' in macros else ''}"
