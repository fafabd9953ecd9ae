"""The op graph of a step: ops, their tensors, and the kernels that they launched."""

from __future__ import annotations

import enum
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMeta:
    """Layout of one tensor value; ``stride`` and ``offset`` count elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    """torch's name without the prefix: ``float32``, ``bfloat16``, ``int64``, ``bool``."""
    offset: int = 0
    device: str = "cpu"
    """Device type only (``cpu``, ``cuda``): a plan is not tied to a device index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ref:
    """An argument that is the value of another op."""

    index: int
    """:attr:`OpNode.index` of the producer."""


Arg = Ref | int | float | bool | str | None | tuple["Arg", ...]
"""An op's argument; lists become tuples, dtypes become ``dtype:float32``, devices ``device:cuda``."""


class OpClass(enum.StrEnum):
    """Class of an op, decided by its computation and aliasing, never by a kernel's name."""

    INPUT = "input"
    VIEW = "view"
    """Runs no kernel: its value aliases one of its inputs."""
    POINTWISE = "pointwise"
    REDUCTION = "reduction"
    """A reduction or a normalisation along trailing dims (sum, mean, softmax, layer_norm …)."""
    GEMM = "gemm"
    ATTENTION = "attention"
    CONVOLUTION = "convolution"
    MEMORY = "memory"
    """Moves data without arithmetic: copy, cat, gather, embedding, index_copy_."""
    COLLECTIVE = "collective"
    """Moves data between processes (all_reduce, all_gather), or waits for such an op."""
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpNode:
    """One ATen op of a captured graph, or one of the graph's inputs."""

    index: int
    """Position in :attr:`Capture.ops`; unique over all regions."""
    region: int
    """Which captured graph it belongs to: 0 unless dynamo broke the graph."""
    target: str
    """``aten.mul.Tensor``; for an input its qualified name (``model.layers.0.mlp.weight``, ``input_ids``)."""
    op_class: OpClass
    args: tuple[Arg, ...] = ()
    kwargs: tuple[tuple[str, Arg], ...] = ()
    outputs: tuple[TensorMeta, ...] = ()
    alias_of: int | None = None
    """Index of the op that owns the storage this value lies in (a view, an in-place result); None when it owns its storage."""
    mutates: tuple[int, ...] = ()
    """Indices of the ops whose storage this op writes into."""
    role: str = "op"
    """``op``, ``input``, ``parameter``, ``buffer``, ``constant`` or ``output``."""
    module_path: str = ""
    """``model.layers.0.mlp.act_fn``; empty at the top level."""
    source_file: str = ""
    """Path relative to site-packages or the working directory."""
    source_line: int = 0
    source_text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One device kernel (on a CPU: one ATen op call that computes), joined to the op that launched it."""

    kernel_name: str
    op_index: int | None
    """None: the kernel could not be joined to an op."""
    duration_ns: int
    start_ns: int = 0
    """Since the first kernel of the step."""
    stream: int = 0
    grid: tuple[int, ...] = ()
    block: tuple[int, ...] = ()
    category: str = "other"
    """An :class:`OpClass` value, or ``fused`` for one of our kernels."""
    call_start_ns: int = 0
    """Start of the call that launched it, on ``start_ns``'s clock: mostly negative or ahead of the kernel."""
    call_ns: int = 0
    """How long that call took; 0 where none was seen (a CPU op runs in its own call)."""
