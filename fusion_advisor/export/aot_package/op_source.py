"""C++ source of an op library: each kernel as an op of torch's stable ABI, for the layouts in which it was checked."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from fusion_advisor.codegen.registry import descriptor
from fusion_advisor.errors import CannotExport
from fusion_advisor.export.kernel_ops import TORCH, KernelOp
from fusion_advisor.records import TensorMeta


def refuse_python_launches(ops: Sequence[KernelOp]) -> None:
    """Refuse kernels that no C++ op can launch.

    Args:
        ops: of the package.

    Raises:
        CannotExport: one is launched by Python, or needs what the library does not do; its name is in the message.
    """
    for op in ops:
        if op.in_place or (op.carried is not None and op.carried.first):
            why = "writes into its arguments" if op.in_place else "starts from a state that is computed from its arguments"
            raise CannotExport(detail=f"op `{op.name}` ({op.fusion_id}) {why}; use --format package for it")
        if op.rendered.suffix != ".cpp":
            what = "made of several ops" if op.rendered.backend == TORCH else f"a {descriptor(op.rendered.backend).title} kernel"
            raise CannotExport(
                detail=f"op `{op.name}` ({op.fusion_id}) is {what} that Python launches; use --format package for it"
            )


def library_ops(ops: Sequence[KernelOp]) -> list[dict[str, Any]]:
    """Return what the template of the library prints for each op.

    Args:
        ops: with C++ kernels.
    """
    found = []
    for op in ops:
        integers, checks = ast.literal_eval(op.launch["integers"]), ast.literal_eval(op.launch["checks"])
        given = ", ".join(f"Tensor {name}" for name, _ in op.inputs)
        returned = "Tensor" if len(op.outputs) == 1 else f"({', '.join(['Tensor'] * len(op.outputs))})"
        found.append(
            {
                "name": op.name, "entry": op.rendered.entry, "schema": f"{op.name}({given}) -> {returned}",
                "summary": f"{op.fusion_id}: {op.summary}", "integers": integers, "checks": checks,
                "inputs": [_laid(name, meta) for name, meta in op.inputs],
                "outputs": [_laid(name, meta) for name, meta in op.outputs],
                "state": _laid("state", op.carried.state) if op.carried else None, "operands": _operands(op),
            }
        )  # fmt: skip
    return found


def entries(ops: Sequence[KernelOp]) -> list[tuple[str, int, int, int]]:
    """Return the entry points of some ops, each once: name, tensors, integers, checks.

    Args:
        ops: with C++ kernels.
    """
    found = {}
    for op in ops:
        integers, checks = ast.literal_eval(op.launch["integers"]), ast.literal_eval(op.launch["checks"])
        found[op.rendered.entry] = (op.rendered.entry, len(_operands(op)), len(integers), checks)
    return list(found.values())


def _operands(op: KernelOp) -> list[str]:
    """Return the C++ variables that a kernel's operands are, in order."""
    if op.carried is None:
        return [f"in_{n}" for n, _ in enumerate(op.inputs, start=1)] + [f"out_{n}" for n, _ in enumerate(op.outputs, start=1)]
    words = {"STATE": "state", "ROWS": "out_1"}
    return [words.get(word) or f"in_{int(word) + 1}" for word in op.carried.operands]


def _laid(name: str, meta: TensorMeta) -> dict[str, Any]:
    def whole(values: Sequence[int]) -> str:
        return f"{{{', '.join(map(str, values))}}}"

    return {"name": name, "rank": len(meta.shape), "shape": whole(meta.shape), "stride": whole(meta.stride), "dtype": meta.dtype}
