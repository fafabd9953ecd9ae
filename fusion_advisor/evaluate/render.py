"""A library kernel as source text, without a model: its reference at one of its own sizes, rendered by one backend."""

from __future__ import annotations

import torch

from fusion_advisor.codegen.common.interface import Header, Rendered, Tuning, library_origin
from fusion_advisor.codegen.gemm.registry import gemv_backend
from fusion_advisor.codegen.registry import backend as backend_of
from fusion_advisor.codegen.standalone import with_launcher
from fusion_advisor.errors import UsageError
from fusion_advisor.ir.program import Program
from fusion_advisor.library.discover import Kernel
from fusion_advisor.library.linear import problem_of
from fusion_advisor.library.match import Pattern, find_match
from fusion_advisor.library.patterns import example, kernel_patterns, lower_reference
from fusion_advisor.library.spec import Case, KernelSpec
from fusion_advisor.lowering.lower import Lowered
from fusion_advisor.records import TensorMeta

_OWN = Tuning()


def render_kernel(
    kernel: Kernel, backend: str, dtype: str, *, variant: str = "", tuning: Tuning = _OWN, case: Case | None = None
) -> Rendered:
    """Render a kernel as it would be for a model that spells it like one of the references.

    Args:
        kernel: from ``load_kernel``.
        backend: one of the manifest's.
        dtype: one of the manifest's.
        variant: name of a reference; the first by default.
        tuning: launch parameters; the backend's own by default.
        case: the sizes; those of the manifest's first benchmark by default.

    Returns:
        the kernel; its ``file_text`` ends in a launch and a check at these sizes, but for kernels of linear layers.

    Raises:
        UsageError: the manifest lacks the backend or dtype, or there is no such reference.
    """
    spec, references = kernel.spec, dict(kernel.references)
    chosen = variant or next(iter(references))
    for what, asked, known in (
        ("backend", backend, spec.backends), ("dtype", dtype, spec.dtypes), ("reference", chosen, tuple(references)),
    ):  # fmt: skip
        if asked not in known:
            raise UsageError(detail=f"`{spec.name}` has no {what} `{asked}`", help=f"one of: {', '.join(known)}")
    case = case or next((case for case in spec.bench if dtype in case.dtypes), spec.bench[0])
    if spec.gemv is not None:
        return gemv_backend(backend).render(problem_of(spec, chosen, case, dtype), header_of(spec, chosen))
    lowered = next(lower_reference(spec, references[chosen], dict(case.sizes), dtype=getattr(torch, dtype)))
    program = named_program(lowered.program, tuple(kernel_patterns(spec)))
    rendered = backend_of(backend).render(program, header_of(spec, chosen), tuning=tuning, fast_math=False)
    return with_launcher(rendered, program, tensors=_operand_layouts(kernel, lowered, case, dtype))


def _operand_layouts(kernel: Kernel, lowered: Lowered, case: Case, dtype: str) -> list[TensorMeta | None]:
    """The layouts of a kernel's inputs in one of its own cases; none of its outputs."""
    made = [example(kernel.spec.inputs[index], dict(case.sizes), getattr(torch, dtype)) for index in lowered.inputs]
    inputs = [TensorMeta(shape=tuple(t.shape), stride=tuple(t.stride()), dtype=str(t.dtype)) for t in made]
    return [*inputs, *[None] * len(lowered.outputs)]


def header_of(spec: KernelSpec, variant: str) -> Header:
    """The head comment of a library kernel."""
    return Header(title=spec.name, summary=spec.summary, origin=library_origin(spec.name, variant), source=spec.source)


def named_program(program: Program, patterns: tuple[Pattern, ...]) -> Program:
    """The Program with its kernel's own names; as it is where no pattern fits (a single element has no structure)."""
    found = find_match(program, patterns)
    return program if found is None else found.program
