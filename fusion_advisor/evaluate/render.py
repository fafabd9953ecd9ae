"""A library kernel as source text, without a model: its reference at one of its own sizes, rendered by one backend."""

from __future__ import annotations

from fusion_advisor.codegen.common.interface import Rendered, Tuning
from fusion_advisor.errors import UsageError
from fusion_advisor.evaluate.kinds import kind_of
from fusion_advisor.library.discover import Kernel
from fusion_advisor.library.spec import Case

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
        the kernel; its ``file_text`` ends in a launch and a check at these sizes.

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
    return kind_of(spec).render(spec, chosen, references[chosen], backend, case, dtype, tuning)
