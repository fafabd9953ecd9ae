"""cuBLAS between kernels of the library: its RMSNorm before a linear layer, its gate after it.

Above the crossover a GEMM is best left to cuBLAS, but not what stands around it: ``F.rms_norm`` and the two ops of a gate take
longer than the library's kernels for the same sizes. Those are the kernels ``rmsnorm`` and ``swiglu_packed``, tuned for these
sizes like any others and launched with the GEMM as one prepared step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fusion_advisor.autotune.build_ahead import Job
from fusion_advisor.autotune.cache import TuningStore
from fusion_advisor.autotune.tune import Gpu, best_tuning, jobs_of
from fusion_advisor.codegen.common.interface import Header, Launcher, Tuning, library_origin
from fusion_advisor.codegen.gemm.cublas import torch_launcher
from fusion_advisor.codegen.gemm.problem import GemvProblem
from fusion_advisor.codegen.registry import backend as backend_named
from fusion_advisor.content import content_dir
from fusion_advisor.ir.operand_names import with_names
from fusion_advisor.ir.program import Program
from fusion_advisor.library.discover import load_references
from fusion_advisor.library.manifest import read_spec
from fusion_advisor.library.patterns import lower_reference, manifest_names

_BUDGET_S = 0.3
"""For the launch parameters of each kernel: together with those of the GEMV kernels a choice stays under two seconds."""


def around_launcher(problem: GemvProblem, backend: str, *, folder: Path, store: TuningStore | None = None) -> Launcher:
    """Return a launcher of cuBLAS with the library's kernels around it; operands are the problem's.

    Args:
        problem: one that :func:`~fusion_advisor.codegen.gemm.problem.around` takes.
        backend: of the kernels, ``triton`` or ``cuda``.
        folder: where their sources are written.
        store: tuned launch parameters; the user's file by default.

    Raises:
        KernelBuildFailed: a kernel does not compile.
    """
    norm = gate = None
    if problem.has_norm:
        launch_norm = _kernel(_norm_of(problem), problem.dtype, backend, folder, store)

        def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(x)
            launch_norm(x, weight, out)
            return out

    if problem.is_gated:
        gate = _kernel(_gate_of(problem), problem.dtype, backend, folder, store)
    return torch_launcher(problem, norm=norm, gate=gate)


def jobs_around(problem: GemvProblem, backend: str, *, store: TuningStore, gpu: Gpu) -> tuple[Job, ...]:
    """Return what :func:`around_launcher` will build, so that it can be compiled ahead.

    Args:
        problem: as it will be given there.
        backend: the same.
        store: of launch parameters.
        gpu: where the kernels will run.
    """
    parts = [_norm_of(problem)] * problem.has_norm + [_gate_of(problem)] * problem.is_gated
    jobs: list[Job] = []
    for part in parts:
        made = _lowered(part, problem.dtype)
        jobs += jobs_of(
            made.program, made.tunables, backend, gpu.device, header=made.header, fast_math=False, store=store, gpu=gpu
        )
    return tuple(jobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A kernel of the library at its sizes."""

    name: str
    variant: str
    sizes: Mapping[str, int]
    constants: Mapping[str, float]


def _norm_of(problem: GemvProblem) -> _Part:
    variant = "gemma" if problem.norm_offset else "builtin"  # F.rms_norm's: one rounding, at the store
    return _Part(name="rmsnorm", variant=variant, sizes={"R": problem.m, "C": problem.k}, constants={"eps": problem.eps})


def _gate_of(problem: GemvProblem) -> _Part:
    return _Part(name="swiglu_packed", variant="chunk", sizes={"R": problem.m, "C": 2 * problem.n}, constants={})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lowered:
    program: Program
    header: Header
    tunables: Sequence[Tuning]
    order: tuple[int, ...]
    """Of the reference's arguments, as the kernel takes them."""


def _lowered(part: _Part, dtype: str) -> _Lowered:
    spec = read_spec(content_dir("kernels") / part.name)
    function = dict(load_references(spec).references)[part.variant]
    lowered = next(lower_reference(spec, function, part.sizes, constants=part.constants, dtype=getattr(torch, dtype)))
    origin = library_origin(part.name, part.variant)
    return _Lowered(
        program=with_names(lowered.program, manifest_names(spec, lowered)),
        header=Header(title=part.name, summary=spec.summary, origin=origin, source=spec.source),
        tunables=spec.tunables,
        order=lowered.inputs,
    )


def _kernel(part: _Part, dtype: str, backend: str, folder: Path, store: TuningStore | None) -> Callable[..., None]:
    """Render, tune and bind a kernel of the library; its arguments are those of its reference, then the output."""
    made = _lowered(part, dtype)
    program, header, order = made.program, made.header, made.order
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tuned = best_tuning(program, made.tunables, backend, device, header=header, store=store, budget_s=_BUDGET_S)
    maker = backend_named(backend)
    rendered = maker.render(program, header, tuning=tuned.tuning, fast_math=False)
    launch = maker.build(rendered, folder / f"{rendered.entry}{rendered.suffix}").bind(program)
    if order == tuple(range(len(order))):
        return launch
    return lambda *tensors: launch(*(tensors[index] for index in order), tensors[-1])
