"""C++ source of an op library: each kernel as an op of torch's stable ABI, for the layouts in which it was checked."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from fusion_advisor.codegen.registry import descriptor
from fusion_advisor.errors import CannotExport
from fusion_advisor.export.extension.source import why_not
from fusion_advisor.export.kernel_ops import TORCH, KernelOp
from fusion_advisor.records import TensorMeta


def in_library(ops: Sequence[KernelOp]) -> tuple[KernelOp, ...]:
    """Return the ops whose kernels the op library launches: AOTInductor compiles all others into the model.

    Args:
        ops: of the package; on a CPU the library's kernels are C++, on a GPU CUDA C++.
    """
    return tuple(op for op in ops if op.rendered.suffix in (".cpp", ".cu"))


def refuse_python_launches(ops: Sequence[KernelOp]) -> None:
    """Refuse kernels that neither the op library nor a compiled model launches.

    Args:
        ops: of the package.

    Raises:
        CannotExport: one is launched by Python, or needs what the library does not do; its name is in the message.
    """
    for op in ops:
        why = ""
        if op.rendered.suffix == ".cu" and (reason := why_not(op)):
            why = f"is a CUDA C++ kernel that the op library cannot have: {reason}"
        elif op.rendered.suffix == ".py" and op.carried is not None:
            why = f"is a {descriptor(op.rendered.backend).title} kernel that Python launches"
        elif op.rendered.suffix == ".py" and "enable_fp_fusion=False" in op.rendered.file_text:
            why = "is compiled without fused multiply-adds, which AOTInductor does not do"
        elif op.rendered.suffix == ".cpp" and op.in_place:
            why = "writes into its arguments"
        elif op.rendered.suffix == ".cpp" and op.carried is not None and op.carried.first:
            why = "starts from a state that is computed from its arguments"
        if why:
            raise CannotExport(detail=f"op `{op.name}` ({op.fusion_id}) {why}; use --format package for it")


def traced_ops(listed: Mapping[str, Any], ops: Sequence[KernelOp]) -> dict[str, Any]:
    """Return the names of ``ops.py``'s template for a package that torch.export traces, in which Triton kernels can be seen.

    Args:
        listed: the template's names for a package.
        ops: of the package, in the same order.
    """
    shown = []
    for row, op in zip(listed["ops"], ops, strict=True):
        if op.rendered.backend == TORCH:
            shown.append({**row, "register": "plain_op", "launcher": "plain_launcher"})
        elif op.rendered.suffix == ".py":
            entries = tuple(one.entry for one in op.rendered.parts) or (op.rendered.entry,)
            launch = [("entries", repr(entries))]
            shown.append({**row, "register": "traced_op", "launcher": "traced_launcher", "launch": launch})
        else:
            shown.append(row)
    compiled = {row[part] for row in shown for part in ("register", "launcher") if "register" in row}
    library = {op.rendered.backend for op in ops if op.rendered.backend != TORCH and op.rendered.suffix != ".py"}
    backends = [one for one in listed["backends"] if one in library]
    return {**listed, "ops": shown, "compiled": sorted(compiled), "backends": backends}


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
