"""What the check in a C++ or CUDA C++ kernel file is printed from: its tensors as C++, and the reference."""

from __future__ import annotations

from typing import Any

from fusion_advisor.codegen.common.cpp_reference import HALVES, STORED, cpp_reference
from fusion_advisor.codegen.common.site import SiteTensor, tensors_of
from fusion_advisor.ir.program import Program

FLOORS = {"float": 5e-7, "double": 1e-14}
"""Relative error that is allowed even where the op-by-op computation has none: four units in the last place of the maths."""
FAST_MATH_FLOOR = 1e-4


def check_context(program: Program, *, fast_math: bool) -> dict[str, Any]:
    """What ``cpp/check.cpp.jinja`` needs, but for ``run``, ``entry`` and ``note``.

    Args:
        program: of the kernel's site.
        fast_math: whether the kernel approximates.
    """
    tensors = tensors_of(program)
    reference = cpp_reference(program, tensors)
    own = "double" if any(tensor.dtype == "float64" for tensor in tensors) else "float"
    helpers = reference.helpers | {HALVES[tensor.dtype] for tensor in tensors if tensor.dtype in HALVES}
    inputs = [f"{tensor.name}_host.data()" for tensor in tensors if not tensor.is_output]

    def arguments(suffix: str) -> str:
        # A vector of bool has no data: outputs that are bool are kept as bytes.
        return ", ".join([*inputs, *(f"{tensor.name}_{suffix}.data()" for tensor in tensors if tensor.is_output)])

    return {
        "tensors": [_printed(tensor, own) for tensor in tensors], "reference": reference.lines, "helpers": helpers, "own": own,
        "truth_arguments": arguments("truth"), "plain_arguments": arguments("plain"), "moved_bytes": program.moved_bytes,
        "floor": FAST_MATH_FLOOR if fast_math else FLOORS[own],
    }  # fmt: skip


def stored_type(dtype: str) -> str:
    """The element type of the check's own buffers; bool is a byte there, because a vector of bool has no array."""
    return "unsigned char" if dtype == "bool" else STORED[dtype]


def _printed(tensor: SiteTensor, own: str) -> dict[str, Any]:
    stored, is_real = stored_type(tensor.dtype), "float" in tensor.dtype
    half = HALVES.get(tensor.dtype)
    kind = "T" if is_real else stored
    made = f"({tensor.element_count})"
    if not tensor.is_output:
        limit = 2 if tensor.dtype == "bool" else tensor.below
        convert = f"to_{half}" if half else f"[](double number) {{ return static_cast<{stored}>(number); }}"
        made = f" = normal<{stored}>({tensor.element_count}, {convert})" if is_real else (
            f" = below<{stored}>({tensor.element_count}, {limit})"
        )  # fmt: skip
    return {
        "name": tensor.name, "host": f"{tensor.name}_host", "stored": stored, "is_output": tensor.is_output, "made": made,
        "count": tensor.element_count, "dtype": tensor.dtype,
        "parameter": f"{kind} *{tensor.name}" if tensor.is_output else f"const {stored} *{tensor.name}",
        "truth": "double" if is_real else stored, "plain": own if is_real else stored,
        "read": f"from_{half}(element)" if half else "element",
        "rounded": f"from_{half}(to_{half}(number))" if half else f"static_cast<{stored}>(number)",
    }  # fmt: skip
