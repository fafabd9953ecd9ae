"""The first call of a kernel that was just built, with a site's own tensors, where it can do no harm."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusion_advisor.codegen.common.interface import BuiltKernel
from fusion_advisor.codegen.cpp.backend import CppKernel
from fusion_advisor.fuse.rewrite.graph_rewriter import fused_call
from fusion_advisor.ir.program import Program
from fusion_advisor.records import TensorMeta


def call_in_child(
    built: BuiltKernel,
    program: Program,
    roots: Sequence[torch.Tensor],
    inputs: Sequence[TensorMeta],
    outputs: Sequence[TensorMeta],
    *,
    in_place: Sequence[int] = (),
) -> None:
    """Call a C++ kernel once in a child process; the tensors stay as they are.

    Nothing is done for kernels of a GPU: a child would need seconds for its own context. A kernel that faults there spoils the
    context of the whole process; :class:`~fusion_advisor.errors.KernelFaulted` ends the run.

    Args:
        built: the kernel.
        program: its sizes.
        roots: a site's own tensors.
        inputs: their layouts.
        outputs: layouts of the outputs.
        in_place: positions of the outputs that are written in place.

    Raises:
        KernelCrashed: the kernel ended its process, or did not end.
    """
    if isinstance(built, CppKernel):
        fused_call(built.entry, built.bind_in_child(program), inputs, outputs, in_place=in_place)(*roots)
