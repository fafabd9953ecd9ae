"""cuBLAS between kernels of the library: its RMSNorm before a linear layer, its gate after it.

Above the crossover a GEMM is best left to cuBLAS, but not what stands around it: ``F.rms_norm`` and the two ops of a gate take
longer than the library's kernels for the same sizes. Those are the kernels ``rmsnorm`` and ``swiglu_packed``, tuned for these
sizes like any others and launched with the GEMM as one prepared step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from fusion_advisor.autotune.cache import TuningStore
from fusion_advisor.autotune.tune import best_tuning
from fusion_advisor.codegen.common.interface import Header, Launcher, library_origin
from fusion_advisor.codegen.gemm.cublas import torch_launcher
from fusion_advisor.codegen.gemm.problem import GemvProblem
from fusion_advisor.codegen.registry import backend as backend_named
from fusion_advisor.ir.operand_names import with_names
from fusion_advisor.library.discover import load_kernel
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
        variant = "gemma" if problem.norm_offset else "builtin"  # F.rms_norm's: one rounding, at the store
        sizes = {"R": problem.m, "C": problem.k}
        launch_norm = _kernel("rmsnorm", variant, sizes, {"eps": problem.eps}, problem.dtype, backend, folder, store)

        def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(x)
            launch_norm(x, weight, out)
            return out

    if problem.is_gated:
        sizes = {"R": problem.m, "C": 2 * problem.n}
        gate = _kernel("swiglu_packed", "chunk", sizes, {}, problem.dtype, backend, folder, store)
    return torch_launcher(problem, norm=norm, gate=gate)


def _kernel(
    name: str,
    variant: str,
    sizes: Mapping[str, int],
    constants: Mapping[str, float],
    dtype: str,
    backend: str,
    folder: Path,
    store: TuningStore | None,
) -> Callable[..., None]:
    """Render, tune and bind a kernel of the library; its arguments are those of its reference, then the output."""
    kernel = load_kernel(name)
    spec, function = kernel.spec, dict(kernel.references)[variant]
    lowered = next(lower_reference(spec, function, sizes, constants=constants, dtype=getattr(torch, dtype)))
    program = with_names(lowered.program, manifest_names(spec, lowered))
    header = Header(title=name, summary=spec.summary, origin=library_origin(name, variant), source=spec.source)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tuned = best_tuning(program, spec.tunables, backend, device, header=header, store=store, budget_s=_BUDGET_S)
    maker = backend_named(backend)
    rendered = maker.render(program, header, tuning=tuned.tuning, fast_math=False)
    launch = maker.build(rendered, folder / f"{rendered.entry}{rendered.suffix}").bind(program)
    order = lowered.inputs
    if order == tuple(range(len(order))):
        return launch
    return lambda *tensors: launch(*(tensors[index] for index in order), tensors[-1])
