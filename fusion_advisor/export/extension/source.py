"""What the extension's C++ is printed from: ops with the layouts in which they were checked, and the launches of each."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fusion_advisor.export.kernel_ops import TORCH, KernelOp
from fusion_advisor.records import TensorMeta

MAP_ALIGNMENT_BYTES = 16
"""Of a matrix that is copied by tensor maps."""
_MAP_TYPES = {"float16": "CU_TENSOR_MAP_DATA_TYPE_FLOAT16", "bfloat16": "CU_TENSOR_MAP_DATA_TYPE_BFLOAT16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeLaunch:
    """One launch of a kernel.

    Attributes:
        function: that launches.
        op: whose kernel it is.
        note: which tensors it is for; empty for all.
        entry: of the kernel.
        arch: the only one that the kernel is for, as nvcc names it (``90a``); empty for any.
        facts: what the template prints of it.
    """

    function: str
    op: str
    note: str
    entry: str
    arch: str
    facts: dict[str, Any] = field(repr=False)

    @property
    def file(self) -> str:
        """Path of its file."""
        return f"csrc/{self.function.removeprefix('launch_')}.cu"

    @property
    def header(self) -> str:
        """Name of its kernel's file, in the same folder."""
        return f"{self.entry}.cuh"


def why_not(op: KernelOp) -> str:
    """Say why the extension does not have an op; empty where it has.

    Args:
        op: of the export.
    """
    if op.rendered.backend == TORCH:
        return "several ops of torch compute it, and Python calls them"
    if op.rendered.suffix == ".py":
        return "a Triton kernel: Triton compiles it in Python, and there is no CUDA C++ of it"
    if op.rendered.suffix != ".cu":
        return "C++ for the CPU, which the system's compiler builds at its first use"
    if not op.inputs:
        return "it reads no tensor, whose GPU it could run on"
    if op.in_place:
        return "it writes into tensors that it is given"
    if op.carried is not None:
        return "Python makes the state that it starts from"
    return ""


def in_extension(ops: Sequence[KernelOp]) -> tuple[KernelOp, ...]:
    """Return the ops whose kernels the extension has.

    Args:
        ops: of the export.
    """
    return tuple(op for op in ops if not why_not(op))


def launches_of(op: KernelOp, arch: str) -> list[NativeLaunch]:
    """Return the launches of an op: for tensors at aligned addresses, then for any others where there is one.

    Args:
        op: with a CUDA C++ kernel.
        arch: of the GPU that it was measured on, as ``90``.
    """
    only = f"{arch}a" if op.rendered.is_for_one_arch else ""
    tensors = [*op.inputs, *op.outputs]
    common: dict[str, Any] = {"count": len(tensors), "macros": [], "names": [], "maps": (), "integers": ()}
    if "maps" in op.launch:
        given = {name: ast.literal_eval(text) for name, text in op.launch.items()}
        facts = common | given | {"map_type": _MAP_TYPES[tensors[0][1].dtype]}
        return [_launch(op, "", only, facts)]
    found = []
    ways = ast.literal_eval(op.launch["launches"])
    for place, way in enumerate(ways):
        facts = common | way | {"macros": list(way["macros"].items()), "names": list(way["macros"])}
        found.append(_launch(op, "_any" * place, only, facts))
    return found


def _launch(op: KernelOp, suffix: str, arch: str, facts: dict[str, Any]) -> NativeLaunch:
    return NativeLaunch(
        function=f"launch_{op.name}{suffix}", op=op.name, note=" for tensors at any address" if suffix else "",
        entry=op.rendered.entry, arch=arch, facts=facts,
    )  # fmt: skip


def native_op(op: KernelOp, launches: Sequence[NativeLaunch]) -> dict[str, Any]:
    """Return what the template of the binding prints of an op.

    Args:
        op: with a CUDA C++ kernel.
        launches: of it.
    """
    given = ", ".join(f"Tensor {name}" for name, _ in op.inputs)
    returned = "Tensor" if len(op.outputs) == 1 else f"({', '.join(['Tensor'] * len(op.outputs))})"
    alignment = MAP_ALIGNMENT_BYTES if "maps" in op.launch else ast.literal_eval(op.launch["alignment"])
    return {
        "name": op.name, "schema": f"{op.name}({given}) -> {returned}", "summary": f"{op.fusion_id}: {op.summary}",
        "inputs": [_laid(name, meta) for name, meta in op.inputs],
        "outputs": [_laid(name, meta) for name, meta in op.outputs],
        "launches": [one.function for one in launches], "alignment": alignment,
        "sizes": ", ".join(f"{name} {' × '.join(map(str, meta.shape))}" for name, meta in op.inputs),
        "is_for_one_arch": op.rendered.is_for_one_arch,
        # an op with one launch is given copies where tensors are not aligned
        "asked_alignment": alignment if len(launches) == 1 else 1,
    }  # fmt: skip


def _laid(name: str, meta: TensorMeta) -> dict[str, Any]:
    def whole(values: Sequence[int]) -> str:
        return f"{{{', '.join(map(str, values))}}}"

    return {"name": name, "rank": len(meta.shape), "shape": whole(meta.shape), "stride": whole(meta.stride), "dtype": meta.dtype}
