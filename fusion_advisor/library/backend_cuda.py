"""The CUDA C++ backend: source that needs no header, compiled in-process by NVRTC through cuda-core.

Every thread works on packs of neighbouring columns, 16 bytes where they are aligned and complete, lane by lane
otherwise; the choice is made per access at run time, so any stride, offset and width is served by one source. Reduced
rows live in registers between passes up to 16384 columns and are read again beyond. Launch shape (THREADS, ROWS,
PACKS) and 64-bit indices are macros: a bind that needs others compiles once more, in tens of milliseconds.

A launch costs 3.5 µs of host time (Triton's: 5.6 and more), so small shapes outside a CUDA graph are better off here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from fusion_advisor.library.cuda_body import body, vector_width
from fusion_advisor.library.cuda_ops import CudaWriter
from fusion_advisor.library.expressions import Unsupported
from fusion_advisor.library.heading import heading, tuning_note, tuning_of
from fusion_advisor.library.nvrtc import compile_cubin, compile_loaded
from fusion_advisor.library.program import Program
from fusion_advisor.library.schedule import MAX_RESIDENT_COLS, Schedule, schedule
from fusion_advisor.library.source import Header, KernelBuildFailed, Launcher, Rendered, Tuning, entry_name, environment

_BLOCK = 256
_MIN_BLOCKS = 512
"""Below this many blocks a 132-SM device has idle SMs, so rows are not grouped."""


class CudaBackend:
    """Renders and builds CUDA C++ kernels."""

    name: ClassVar[str] = "cuda"

    def render(self, program: Program, header: Header, *, tuning: Tuning, fast_math: bool) -> Rendered:
        """Print a Program as CUDA C++.

        Raises:
            KernelBuildFailed: the Program holds an op that CUDA cannot express.
        """
        plan = schedule(program, flatten_rows=True)
        is_looped = plan.kind == "rows" and program.dims[-1] > MAX_RESIDENT_COLS
        extra = ["cuda", repr(tuning), *(["looped"] if is_looped else []), *(["fast_math"] if fast_math else [])]
        entry = entry_name(program, f"{header.title[:54]}_fast" if fast_math else header.title, *extra)
        try:
            writer = CudaWriter(plan, fast_math=fast_math)
            context = body(plan, writer, is_looped=is_looped)
        except Unsupported as error:
            raise KernelBuildFailed(kernel=entry, target="cuda", cause=str(error)) from error
        is_reduced = plan.kind == "rows"
        macros = [("threads along a row", "THREADS", _BLOCK)]
        if plan.kind != "flat":
            macros.append(
                ("rows of a block; 1 when more than a warp shares a row" if is_reduced else "rows of a block", "ROWS", 1)
            )
        if is_reduced and not is_looped:
            macros.append(("packs of a thread: PACKS * THREADS * VEC >= cols", "PACKS", 2))
        macros.append(("columns of a pack", "VEC", vector_width(plan)))
        bits = 64 if any(v.dtype == "float64" for v in plan.program.values) else 32
        source = environment().get_template(f"cuda/{'rowwise' if is_reduced else 'pointwise'}.cu.jinja").render(
            heading=heading(plan, header, fast_math=fast_math, notes=tuning_note(tuning)),
            macros=macros, entry=entry, fast_math=fast_math, bits=bits,
            bounds="THREADS" if plan.kind == "flat" else "THREADS * ROWS",
            is_looped=is_looped, has_row=plan.kind != "flat", size=plan.sizes[-1], **context,
        )  # fmt: skip
        return Rendered(backend=self.name, entry=entry, source=source, suffix=".cu")

    def build(self, rendered: Rendered, path: Path) -> CudaKernel:
        """Write the source to ``path`` and compile it for the current device, with the launch shape that the file names.

        Raises:
            KernelBuildFailed: NVRTC refuses it, or there is no cuda-core.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(rendered.source, encoding="utf-8")
        return CudaKernel(rendered)


class CudaKernel:
    """A compiled kernel, with one variant for each launch shape that was bound.

    Attributes:
        build_ns: what NVRTC took so far.
        tuning: launch shape of the Program bound last.
    """

    def __init__(self, rendered: Rendered) -> None:
        self._rendered = rendered
        self._variants: dict[tuple[tuple[str, int], ...], Any] = {}
        self.build_ns = 0
        self.tuning = ""
        self._variant({})

    def bind(self, program: Program, tuning: Tuning | None = None) -> Launcher:
        """Fix sizes, strides and grid.

        Args:
            program: a Program with the layout key that was rendered.
            tuning: overrides of the launch shape.

        Raises:
            KernelBuildFailed: NVRTC refuses the variant for this shape.
        """
        plan = schedule(program, flatten_rows=True)
        if plan.is_empty:
            return lambda *_tensors: None
        is_looped = plan.kind == "rows" and "#define PACKS" not in self._rendered.source
        macros, grid = launch_shape(plan, tuning or tuning_of(self._rendered.source), is_looped=is_looped)
        self.tuning = " ".join(f"{name}={value}" for name, value in macros.items())
        kernel = self._variant(macros)
        import numpy  # cuda-core's own dependency; it takes numpy's integers apart faster than those of ctypes

        scalar = numpy.int64 if "WIDE_INDEX" in macros else numpy.int32
        return _launcher(
            kernel, grid, (macros["THREADS"], macros.get("ROWS", 1), 1), [scalar(value) for _, value in plan.arguments]
        )

    def _variant(self, macros: dict[str, int]) -> Any:
        key = tuple(macros.items())
        if key not in self._variants:
            start = time.perf_counter_ns()
            self._variants[key] = compile_loaded(self._rendered, macros)
            self.build_ns += time.perf_counter_ns() - start
        return self._variants[key]


def compile_for(rendered: Rendered, arch: int, *, program: Program | None = None, compiler: str = "") -> bytes:
    """Compile a kernel for a GPU that need not be here.

    Args:
        rendered: the kernel.
        arch: compute capability, 80, 90 or 100.
        program: decides the launch shape; the file's own by default.
        compiler: ``nvrtc`` or ``nvcc``; by default the one that is found first.

    Returns:
        the cubin.

    Raises:
        KernelBuildFailed: the cause is the compiler's first error.
    """
    macros: dict[str, int] = {}
    if program is not None:
        is_looped = "#define PACKS" not in rendered.source
        macros, _ = launch_shape(schedule(program, flatten_rows=True), tuning_of(rendered.source), is_looped=is_looped)
    return compile_cubin(rendered, f"sm_{arch}", macros, compiler=compiler)


def launch_shape(plan: Schedule, tuning: Tuning, *, is_looped: bool) -> tuple[dict[str, int], tuple[int, int, int]]:
    """Macros and grid for a Program."""
    wide = {"WIDE_INDEX": 1} if plan.needs_int64 else {}
    cols, rows = max(plan.program.dims[-1], 1), plan.row_count
    packs = -(-cols // vector_width(plan))
    asked = 32 * tuning.num_warps if tuning.num_warps else 0
    if plan.kind == "flat":
        threads = asked or _BLOCK
        return {"THREADS": threads, **wide}, (-(-packs // threads), 1, 1)
    if plan.kind == "tiled":
        threads = asked or min(_BLOCK, 1 << (packs - 1).bit_length())
        height = max(1, min(tuning.block_rows or _BLOCK // threads, 1024 // threads, rows))
        # More columns than the grid's second side can hold are reached by the loop over blocks.
        return {"THREADS": threads, "ROWS": height, **wide}, (-(-rows // height), min(-(-packs // threads), 65535), 1)
    # Two packs a thread: enough loads under way, few enough registers for full occupancy.
    threads = asked or max(32, min(1024, -(-packs // 64) * 32))
    height = (tuning.block_rows or 4) if threads == 32 and (tuning.block_rows or rows // 4 >= _MIN_BLOCKS) else 1
    per_thread = {} if is_looped else {"PACKS": -(-packs // threads)}
    return {"THREADS": threads, "ROWS": min(height, 32), **per_thread, **wide}, (-(-rows // min(height, 32)), 1, 1)


def _launcher(kernel: Any, grid: tuple[int, int, int], block: tuple[int, int, int], scalars: list[Any]) -> Launcher:
    """Launch on the current stream of the device that the tensors are on, as torch's own ops do."""
    import torch
    from cuda.core import LaunchConfig, Stream, launch

    if grid[0] >= 2**31:
        raise ValueError(f"a grid of {grid} blocks is more than CUDA launches")
    config = LaunchConfig(grid=grid, block=block)
    current_device = torch.cuda.current_device
    # The handle alone: making torch's Stream object would cost half as much as the launch.
    raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _stream_handle)
    streams: dict[int, Any] = {}

    def start(*tensors: Any) -> None:
        device = tensors[0].get_device()
        if device != current_device():
            with torch.cuda.device(device):
                start(*tensors)
            return
        handle = raw_stream(device)
        stream = streams.get(handle)
        if stream is None:
            stream = streams[handle] = Stream.from_handle(handle)
        launch(stream, config, kernel, *[tensor.data_ptr() for tensor in tensors], *scalars)

    return start


def _stream_handle(device: int) -> int:
    import torch

    return int(torch.cuda.current_stream(device).cuda_stream)
