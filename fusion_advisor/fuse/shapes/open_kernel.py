"""A fusion's kernel rendered again for all sizes of a piece, and compiled ahead for what these can need.

A kernel that was built at one point may be compiled for that point's sizes (Triton's tiles are). Rendered with the program at
other sizes beside it, it takes what varies as arguments; what launches still choose by the sizes, tiles above all, comes in a
few classes, and each is compiled here and not in the middle of a call.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fusion_advisor.autotune.build_ahead import BuildAhead, Job
from fusion_advisor.codegen.common.interface import BuiltKernel, CompileAhead, KernelBuildFailed, KernelMaker, Rendered
from fusion_advisor.codegen.registry import backend as backend_named
from fusion_advisor.codegen.standalone import with_launcher
from fusion_advisor.fuse.decide.session import BuiltFusion
from fusion_advisor.ir.program import Program, layout_key
from fusion_advisor.ir.sized_program import NoOneProgram
from fusion_advisor.records import RenderedKernel, SizeRange, TensorMeta

_MOST_TRIED = 1000
"""Points of a piece whose machine code is looked up ahead of calls: a fifth of a millisecond each."""


@dataclass(slots=True)
class OpenKernels:
    """Kernels of one piece, by what they were rendered to: points of a piece share them.

    Attributes:
        built: by source.
        ahead: compiles the machine codes of one kernel side by side; None: one after the other.
    """

    built: dict[str, tuple[RenderedKernel, BuiltKernel]] = field(default_factory=dict)
    ahead: BuildAhead | None = None


def tried_points(ranges: Sequence[SizeRange]) -> list[tuple[int, ...]]:
    """Return sizes that take every machine code of a kernel between them.

    Tiles change at powers of two, and what vectors may be assumed of changes between multiples of 16, of 4, and others.

    Args:
        ranges: of the open dims.
    """
    each = []
    for one in ranges:
        powers = [1 << bit for bit in range(one.most.bit_length() + 1)]
        near = {size - less for size in powers for less in (0, 1, 4)}
        each.append(sorted({one.least, one.most, *(size for size in near if one.holds(size))}))
    count = 1
    for sizes in each:
        count *= len(sizes)
    if count <= _MOST_TRIED:
        return list(itertools.product(*each))
    number = random.Random(0)
    corners = itertools.islice(itertools.product(*((one.least, one.most) for one in ranges)), _MOST_TRIED)
    return [*corners, *(tuple(map(number.choice, each)) for _ in range(_MOST_TRIED))]


def for_all_sizes(
    fusion: BuiltFusion, ends: Sequence[tuple[str, Program]], between: Sequence[Program], tried: Iterator[Program],
    layouts: Sequence[TensorMeta | None], kernels: OpenKernels,
) -> tuple[RenderedKernel, BuiltKernel]:  # fmt: skip
    """Return a kernel that serves every size of a piece: the fusion's own where that does.

    Args:
        fusion: as it was built and checked at one point.
        ends: the corners of the piece: the sizes in words, and the program there.
        between: the program at other sizes, at least one; the kernel's file shows the first.
        tried: the program wherever it may take other machine code.
        layouts: of the operands at the first of ``between``; None for an output that lies in a tensor that is given.
        kernels: of the piece.

    Raises:
        NoOneProgram: the kernel is written in another form at some sizes (rows that are walked in parts), or does not compile.
    """
    kernel, maker = fusion.kernel, backend_named(fusion.kernel.backend)
    own, first = fusion.planned.program, between[0]
    elsewhere = [*between, *(program for _, program in ends)]
    rendered = _rendered(maker, fusion, first, elsewhere)
    # At a size of 1 it was built for fewer loops; the kernel for all sizes has them all, and is checked there with the piece.
    checked = [("the sizes where it was checked", own)] if layout_key(own) == layout_key(first) else []
    for where, program in (*checked, *ends):
        if _rendered(maker, fusion, program, elsewhere).entry != rendered.entry:
            raise NoOneProgram(f"at {where} it takes a kernel of another form")
    if rendered.entry == kernel.name:
        return kernel, fusion.built
    if rendered.source not in kernels.built:
        rendered = with_launcher(rendered, first, tensors=layouts, fast_math=kernel.fast_math)
        try:
            beside = None if kernels.ahead is None else _side_by_side(kernels.ahead, fusion, (first, *elsewhere))
            kernels.built[rendered.source] = _built(maker, rendered, kernel, tried, beside)
        except KernelBuildFailed as error:
            raise NoOneProgram(str(error)) from error
    return kernels.built[rendered.source]


def _rendered(maker: KernelMaker, fusion: BuiltFusion, program: Program, elsewhere: Sequence[Program]) -> Rendered:
    return maker.render(
        program, fusion.planned.header, tuning=fusion.kernel.parameters, fast_math=fusion.kernel.fast_math, elsewhere=elsewhere
    )


def _side_by_side(ahead: BuildAhead, fusion: BuiltFusion, sizes: tuple[Program, ...]) -> CompileAhead:
    """Return what has a kernel, rendered for all these sizes, compiled in other processes."""
    kernel, header = fusion.kernel, fusion.planned.header

    def compiled(programs: Sequence[Program]) -> None:
        jobs = [
            Job(
                program=program, header=header, backend=kernel.backend, tuning=kernel.parameters, fast_math=kernel.fast_math,
                elsewhere=sizes,
            )
            for program in programs
        ]  # fmt: skip
        ahead.submit(jobs)
        ahead.wait(jobs)

    return compiled


def _built(
    maker: KernelMaker, rendered: Rendered, kernel: RenderedKernel, tried: Iterator[Program], beside: CompileAhead | None
) -> tuple[RenderedKernel, BuiltKernel]:
    start = time.perf_counter_ns()
    with tempfile.TemporaryDirectory(prefix="fusion-advisor-") as folder:
        built = maker.build(rendered, Path(folder) / f"{rendered.entry}{rendered.suffix}")
        count = built.compile_for(tried, beside)
    codes = "one machine code for all sizes" if count == 1 else f"{count} machine codes for all sizes"
    found = replace(
        kernel, name=rendered.entry, source=rendered.file_text, build_ns=time.perf_counter_ns() - start, tuning=codes
    )  # fmt: skip
    return found, built


def programs_at(points: Sequence[tuple[int, ...]], program_at: Callable[[tuple[int, ...]], Program]) -> Iterator[Program]:
    """Yield a program at those of some sizes where it is the same one; elsewhere a call runs the original ops.

    Args:
        points: of :func:`tried_points`.
        program_at: raises NoOneProgram where there is none.
    """
    for point in points:
        with contextlib.suppress(NoOneProgram):
            yield program_at(point)
