"""The CUDA C++ backend: source that needs no header, compiled in-process by NVRTC through cuda-core.

Every thread works on PACKS packs of VEC neighbouring columns and reads them all before it computes: that many independent
16-byte loads under way are what keeps the memory busy. A launch takes the widest packs that sizes, strides and addresses
allow, single columns in the end, so any stride, offset and width is served by one source. Reduced rows live in registers
between passes up to 16384 columns, wider ones in shared memory (``shared_memory.py``) or in the registers of a cluster of blocks
(CLUSTER; compute capability 9.0), where tuning finds that faster: many blocks are then at different points of their rows, so that
one's loads hide another's barriers and stores, and few rows still use many multiprocessors. The launch shape (THREADS, ROWS,
PACKS, VEC, FULL, STAGED, CLUSTER) and 64-bit indices are macros: a bind that needs others compiles once more, in tens of
milliseconds.

A launch costs 3.5 µs of host time (Triton's: 5.6 and more), so small shapes outside a CUDA graph are better off here.
"""

from __future__ import annotations

import functools
import operator
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from fusion_advisor.codegen.common.arguments import pointer_names
from fusion_advisor.codegen.common.column_passes import late_loads
from fusion_advisor.codegen.common.gelu_cdf import with_cdfs
from fusion_advisor.codegen.common.header_comment import dropout_notes, heading, sizes_note, tuning_note
from fusion_advisor.codegen.common.horizontal_fusion import Call, calls_of, functions_of, open_arguments, starts
from fusion_advisor.codegen.common.interface import (
    CompileAhead,
    Form,
    Header,
    KernelBuildFailed,
    Launcher,
    OpenArguments,
    Rendered,
    Tuning,
    body_of,
    entry_name,
    environment,
)
from fusion_advisor.codegen.common.printer import Unsupported
from fusion_advisor.codegen.cuda.body import body, ordered
from fusion_advisor.codegen.cuda.nvrtc import allow_shared_memory, compile_cubin, compile_loaded, device_shared_memory, target_of
from fusion_advisor.codegen.cuda.ops import SCALARS, CudaWriter, vector_width
from fusion_advisor.codegen.cuda.shared_memory import (
    SharedMemory,
    shared_memory_of,
)
from fusion_advisor.codegen.cuda.tiling import (
    BLOCK,
    divisors,
    form_for,
    launch_shapes,
    pack_width,
    shared_bytes_of,
)
from fusion_advisor.ir.program import Program
from fusion_advisor.records.serialize import write_atomic


class CudaBackend:
    """Renders and builds CUDA C++ kernels."""

    name: ClassVar[str] = "cuda"

    def render(
        self, program: Program, header: Header, *, tuning: Tuning, fast_math: bool, elsewhere: Sequence[Program] = ()
    ) -> Rendered:
        """Print a Program as CUDA C++.

        All sizes are arguments. Those that rows are divided by are constants too, where they are the same ``elsewhere``.

        Raises:
            KernelBuildFailed: the Program holds an op that CUDA cannot express.
            ValueError: a Program of ``elsewhere`` has another layout.
        """
        calls = calls_of(program, flatten_rows=True)
        plan = calls[0].plan
        arguments = open_arguments(program, elsewhere, flatten_rows=True)
        if len(calls) > 1 or divisors(plan).keys().isdisjoint(arguments.names):
            arguments = OpenArguments()
        form = form_for([call.plan for call in calls], tuning)
        kinds = {"looped": form.is_looped, "split": form.is_split, "shifted": form.is_shifted, "fast_math": fast_math}
        kinds |= {f"cluster_{tuning.cluster}": form.is_clustered, repr(arguments.names): bool(arguments.names)}
        extra = ["cuda", repr(tuning), *(name for name, is_one in kinds.items() if is_one)]
        entry = entry_name(program, f"{header.title[:54]}_fast" if fast_math else header.title, *extra)
        functions = functions_of(calls)
        try:
            given = {
                "fast_math": fast_math, "is_split": form.is_split, "is_shifted": form.is_shifted,
                "is_clustered": form.is_clustered,
            }  # fmt: skip
            plans = [replace(f.plan, program=with_cdfs(f.plan.program)) for f in functions]
            bodies = [body(own, CudaWriter(own, **given), is_looped=form.is_looped) for own in plans]
        except Unsupported as error:
            raise KernelBuildFailed(kernel=entry, target="cuda", cause=str(error)) from error
        is_reduced = plan.kind == "rows"
        macros = _macros(calls, form, tuning, is_staged=any(context["is_staged"] for context in bodies))
        helpers = ordered({name for context in bodies for name in context["helpers"]})
        notes = (*dropout_notes(program), *sizes_note(arguments), *tuning_note(tuning))
        common = {
            "heading": heading([call.plan for call in calls], header, fast_math=fast_math, notes=notes),
            "macros": macros, "entry": entry, "fast_math": fast_math, "helpers": helpers, "is_looped": form.is_looped,
            "is_shifted": form.is_shifted, "is_clustered": form.is_clustered,
            "reductions": max(context["reductions"] for context in bodies),
            "bits": 64 if any(v.dtype == "float64" for call in calls for v in call.plan.program.values) else 32,
            "bounds": "THREADS" if plan.kind == "flat" or form.is_clustered else "THREADS * ROWS",
            "has_pairs": any(call.plan.has_pairs for call in calls), "has_row": plan.kind != "flat",
        }  # fmt: skip
        template = f"cuda/{'rowwise' if is_reduced else 'pointwise'}.cu.jinja"
        if len(calls) == 1:
            context = {**bodies[0], **common, "size": plan.sizes[-1], "divisors": divisors(plan, arguments.names)}
            source = environment().get_template(template).render(**context)
        else:
            for function, own in zip(functions, bodies, strict=True):
                text = body_of(template, **{**own, **common, "size": function.plan.sizes[-1]})
                own["text"] = text.replace("blockIdx.x", "block")
                own["function"] = function.function
            source = environment().get_template("cuda/siblings.cu.jinja").render(
                **common, functions=bodies, calls=calls, signature=_entry_signature(program, calls),
            )  # fmt: skip
        return Rendered(
            backend=self.name, entry=entry, source=source, suffix=".cu", tuning=tuning, form=form, open_arguments=arguments
        )

    def build(self, rendered: Rendered, path: Path) -> CudaKernel:
        """Write the source to ``path``; machine code is made for each launch shape when a Program is bound."""
        write_atomic(path, rendered.file_text)  # a link that lies there is replaced, not followed
        return CudaKernel(rendered)


def _macros(calls: Sequence[Call], form: Form, tuning: Tuning, *, is_staged: bool) -> list[tuple[str, str, int]]:
    """The macros of a launch: what each means, its name, and its value where none is given."""
    kind = calls[0].plan.kind
    threads = ("threads along a row" if kind != "flat" else "threads of a block", "THREADS", BLOCK)
    width = min(vector_width(call.plan) for call in calls)
    divides = "" if form.is_shifted else ", a divisor of every row and stride"
    if kind == "flat":
        return [
            threads,
            ("packs of a thread", "PACKS", 4),
            (f"columns of a pack{divides}", "VEC", width),
        ]
    if kind == "tiled":
        is_divisor = any(len(call.plan.sizes) > 2 for call in calls)
        return [
            threads,
            ("threads along a column", "ROWS", 1),
            (f"packs of a thread: neighbouring rows{', a divisor of their count' * is_divisor}", "PACKS", 1 if is_divisor else 4),
            ("1 where the grid's second side holds all columns", "ONCE", 1),
            (f"columns of a pack{divides}", "VEC", width),
        ]
    product = f"{'CLUSTER * ' * form.is_clustered}PACKS * THREADS * VEC"
    rows = ("rows of a block; 1 when more than a warp shares a row", "ROWS", 1)
    cluster = ("blocks along a row, a cluster: compute capability 9.0 or later", "CLUSTER", tuning.cluster or 1)
    found = [
        threads,
        cluster if form.is_clustered else rows,
        (f"packs of a thread{' at a time' if form.is_looped else f': {product} >= cols'}", "PACKS", 4),
        (f"columns of a pack{divides}", "VEC", width),
        (f"1 where {product} divides cols", "FULL", 0),
    ]
    if any(late_loads(call.plan) for call in calls) and not form.is_looped:
        found.append(("1 where what rows share is read after the reductions", "LATE", 1))
    if is_staged:
        found.append(("columns that stay in dynamic shared memory, a multiple of 16", "STAGED", 0))
    return found


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

    def bind(self, program: Program, tuning: Tuning | None = None) -> Launcher:
        """Fix sizes, strides and grid.

        Args:
            program: a Program with the layout key that was rendered.
            tuning: overrides of the launch shape.

        Raises:
            KernelBuildFailed: NVRTC refuses the variant for this shape.
        """
        calls = calls_of(program, flatten_rows=True)
        if all(call.plan.is_empty for call in calls):
            return lambda *_tensors: None
        tuning = tuning or self._rendered.tuning
        widths = [pack_width(call.plan, self._rendered.form) for call in calls]
        width, alignment = min(width for width, _ in widths), max(alignment for _, alignment in widths)
        first = self._launch_of(calls, tuning, width)
        self.tuning = first.text
        return launcher_of(first, functools.cache(lambda: launcher_of(self._launch_of(calls, tuning, 1))), alignment)

    def compile_for(self, programs: Iterable[Program], ahead: CompileAhead | None = None) -> int:
        """Compile what binding any of these Programs takes.

        Args:
            programs: of the layout that was rendered.
            ahead: not asked: what a launch chooses here is in macros, which other processes do not compile.

        Returns:
            how many machine codes there are.

        Raises:
            KernelBuildFailed: NVRTC refuses one.
        """
        del ahead
        for program in programs:
            self.bind(program)
        return len(self._variants)

    def _launch_of(self, calls: Sequence[Call], tuning: Tuning, width: int) -> CudaLaunch:
        import numpy  # cuda-core's own dependency; it converts numpy's integers faster than those of ctypes
        from cuda.core import LaunchConfig

        plans, form = [call.plan for call in calls], self._rendered.form
        shared = device_shared_memory() if form.is_looped else SharedMemory()
        opened = self._rendered.open_arguments.names
        macros, grids = launch_shapes(plans, tuning, form=form, width=width, shared=shared, opened=opened)
        blocks = [across for across, _, _ in grids]
        grid = (sum(blocks), max(down for _, down, _ in grids), 1)
        if grid[0] >= 2**31:
            raise ValueError(f"a grid of {grid} blocks is more than CUDA launches")
        shared_bytes = max(shared_bytes_of(plan, macros) for plan in plans)
        scalar = numpy.int64 if "WIDE_INDEX" in macros else numpy.int32
        return CudaLaunch(
            kernel=self._variant(macros),
            config=LaunchConfig(grid=grid, block=(macros["THREADS"], macros.get("ROWS", 1), 1), shmem_size=shared_bytes),
            shared_bytes=shared_bytes,
            scalars=[scalar(value) for _, value in [*starts(blocks), *(item for call in calls for item in call.arguments)]],
            text=" ".join(f"{name}={value}" for name, value in macros.items()),
        )

    def _variant(self, macros: dict[str, int]) -> Any:
        key = tuple(macros.items())
        if key not in self._variants:
            start = time.perf_counter_ns()
            self._variants[key] = compile_loaded(self._rendered, macros)
            self.build_ns += time.perf_counter_ns() - start
        return self._variants[key]


def compile_for(rendered: Rendered, arch: int, *, program: Program | None = None, width: int = 0, compiler: str = "") -> bytes:
    """Compile a kernel for a GPU that need not be here.

    Args:
        rendered: the kernel.
        arch: compute capability, 80, 90 or 100.
        program: decides the launch shape; the file's own by default.
        width: columns of a pack; what the program allows by default.
        compiler: ``nvrtc`` or ``nvcc``; by default the one that is found first.

    Returns:
        the cubin.

    Raises:
        KernelBuildFailed: the cause is the compiler's first error.
    """
    macros: dict[str, int] = {}
    if program is not None:
        plans, tuning = [call.plan for call in calls_of(program, flatten_rows=True)], rendered.tuning
        form = rendered.form
        width = width or min(pack_width(plan, form)[0] for plan in plans)
        shared, opened = shared_memory_of(arch), rendered.open_arguments.names
        macros, _ = launch_shapes(plans, tuning, form=form, width=width, shared=shared, opened=opened)
    return compile_cubin(rendered, target_of(rendered, arch), macros, compiler=compiler)


def _entry_signature(program: Program, calls: Sequence[Call]) -> list[str]:
    """Arguments of a kernel of several loop nests: tensors, where the blocks of the later nests start, then their integers."""
    pointers = [
        f"{'' if operand.is_output else 'const '}{SCALARS[operand.dtype]}* __restrict__ {name}"
        for operand, name in zip(program.operands, pointer_names(program), strict=True)
    ]
    integers = [*starts([0] * len(calls)), *(item for call in calls for item in call.arguments)]
    return [*pointers, *(f"index_t {name}" for name, _ in integers)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaLaunch:
    """One variant with everything of its launch but the tensors."""

    kernel: Any
    config: Any
    scalars: list[Any]
    text: str
    shared_bytes: int = 0
    """Dynamic shared memory of a block."""


def launcher_of(first: CudaLaunch, unaligned: Callable[[], Launcher] | None = None, alignment: int = 1) -> Launcher:
    """Launch on the current stream of the device that the tensors are on, as torch's own ops do.

    Args:
        first: for tensors that start at a multiple of ``alignment`` bytes.
        unaligned: for any others; called whenever some of those come.
        alignment: a power of two.
    """
    import torch
    from cuda.core import Stream, launch

    current_device = torch.cuda.current_device
    # The handle alone: making torch's Stream object would cost half as much as the launch.
    raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _stream_handle)
    streams: dict[int, Any] = {}
    mask = alignment - 1

    def start(*tensors: Any) -> None:
        device = tensors[0].get_device()
        if device != current_device():
            with torch.cuda.device(device):
                start(*tensors)
            return
        handle = raw_stream(device)
        stream = streams.get(handle)
        if stream is None:
            if first.shared_bytes:  # of every device; once for a stream costs nothing
                allow_shared_memory(first.kernel, first.shared_bytes, device)
            stream = streams[handle] = Stream.from_handle(handle)
        pointers = [tensor.data_ptr() for tensor in tensors]
        if unaligned is not None and functools.reduce(operator.or_, pointers) & mask:
            unaligned()(*tensors)
            return
        launch(stream, first.config, first.kernel, *pointers, *first.scalars)

    return start


def _stream_handle(device: int) -> int:
    import torch

    return int(torch.cuda.current_stream(device).cuda_stream)
