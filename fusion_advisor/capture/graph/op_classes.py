"""Classifies ATen ops (pointwise, reduction, GEMM …) by torch's own tags and the op's name, never by a kernel's name.

The same table classifies graph nodes and the CPU ops of a profiler trace, so categories mean one thing on both sides.
"""

from __future__ import annotations

import functools
import re

import torch

from fusion_advisor.records import OpClass
from fusion_advisor.records.op_facts import overload_free

_REDUCTIONS = frozenset(
    [
        "sum",
        "mean",
        "amax",
        "amin",
        "var",
        "std",
        "var_mean",
        "norm",
        "linalg_vector_norm",
        "_weight_norm",
        "logsumexp",
        "softmax",
        "_softmax",
        "log_softmax",
        "_log_softmax",
        "_safe_softmax",
        "layer_norm",
        "native_layer_norm",
        "rms_norm",
        "_fused_rms_norm",
        "group_norm",
        "native_group_norm",
        "instance_norm",
        "batch_norm",
        "native_batch_norm",
        "_batch_norm_impl_index",
        "cudnn_batch_norm",
        "max",
        "min",
        "argmax",
        "argmin",
        "any",
        "all",
        "prod",
        "cumsum",
        "nll_loss",
        "nll_loss_nd",
        "cross_entropy_loss",
        "nll_loss_forward",
        "cosine_similarity",
        "adaptive_avg_pool2d",
        "_adaptive_avg_pool2d",
        "avg_pool2d",
        "max_pool2d",
        "max_pool2d_with_indices",
    ]
)
_GEMMS = frozenset(
    [
        "linear",
        "matmul",
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "addmv",
        "mv",
        "dot",
        "einsum",
        "_grouped_mm",
        "_scaled_mm",
        "_addmm_activation",
    ]
)
_CONVOLUTIONS = frozenset(
    [
        "conv1d",
        "conv2d",
        "conv3d",
        "convolution",
        "_convolution",
        "cudnn_convolution",
        "mkldnn_convolution",
        "conv_depthwise2d",
        "_conv_depthwise2d",
        "thnn_conv2d",
        "_slow_conv2d_forward",
        "slow_conv_dilated2d",
        "conv_transpose1d",
        "conv_transpose2d",
    ]
)
_MEMORY = frozenset(
    [
        "clone",
        "contiguous",
        "copy",
        "copy_",
        "cat",
        "stack",
        "_pack",
        "embedding",
        "index",
        "index_select",
        "gather",
        "index_copy",
        "index_copy_",
        "index_put",
        "index_put_",
        "scatter",
        "scatter_",
        "scatter_add",
        "scatter_add_",
        "repeat",
        "repeat_interleave",
        "fill",
        "fill_",
        "zero_",
        "zeros",
        "ones",
        "full",
        "empty_like",
        "zeros_like",
        "ones_like",
        "full_like",
        "new_zeros",
        "new_ones",
        "new_full",
        "arange",
        "linspace",
        "roll",
        "flip",
        "constant_pad_nd",
        "pad",
        "tril",
        "triu",
        "masked_select",
        "nonzero",
        "one_hot",
        "slice_scatter",
        "select_scatter",
        "expand_copy",
        "view_copy",
        "_reshape_copy",
        "_index_put_impl_",
        "upsample_bicubic2d",
        "upsample_bilinear2d",
        "upsample_linear1d",
        "upsample_nearest1d",
        "upsample_nearest2d",
        "upsample_nearest3d",
        "im2col",
    ]
)
_POINTWISE_UNTAGGED = frozenset(
    [
        "to",
        "_to_copy",
        "type_as",
        "float",
        "half",
        "bfloat16",
        "double",
        "__and__",
        "__or__",
        "__xor__",
        "and",
        "or",
        "xor",
        "dropout",
        "native_dropout",
        "seeded_dropout",
        "bernoulli",
        "softplus",
        "glu",
        "hardswish",
        "log_sigmoid",
        "prelu",
    ]
)
_VIEWS = frozenset(
    [
        "view",
        "reshape",
        "_reshape_alias",
        "_unsafe_view",
        "transpose",
        "permute",
        "t",
        "unsqueeze",
        "squeeze",
        "expand",
        "expand_as",
        "slice",
        "select",
        "split",
        "split_with_sizes",
        "chunk",
        "unbind",
        "flatten",
        "unflatten",
        "narrow",
        "alias",
        "detach",
        "as_strided",
        "movedim",
        "swapaxes",
        "view_as",
        "lift_fresh",
        "getitem",
        "numpy_T",
        "mT",
        "unsafe_split",
        "unsafe_chunk",
        "tensor_split",
        "view_as_real",
        "view_as_complex",
        "real",
        "imag",
        "diagonal",
        "unfold",
    ]
)
_COLLECTIVE_SPACES = ("_c10d_functional", "_c10d_functional_autograd", "c10d", "_dtensor")
"""Namespaces of ops between processes. Their names stay whole: ``c10d::send`` and ``c10d::barrier`` are no ATen ops."""
_COLLECTIVE_RANGES = ("gloo:", "nccl:")
"""How process groups name the ranges of their work in a trace."""
_BACKWARD = re.compile(r"(_dense)?_backward(_data)?$")
COMPOSITE = frozenset(
    ["contiguous", "reshape", "to", "dropout", "flatten", "type_as", "float", "half", "scaled_dot_product_attention"]
)
"""Ops whose class depends on what they had to do; in a CPU trace their children tell."""


def base_name(target: str) -> str:
    """Return ``mul`` for ``aten.mul.Tensor``, ``aten::mul_`` and ``mul``; our own ops lose their namespace likewise.

    Collectives keep their namespace: ``_c10d_functional.all_reduce``.
    """
    if is_collective(target):
        return _without_overload(target.replace("::", "."))
    name = overload_free(target.replace("aten::", "").replace("fusion_advisor::", ""))
    return name if name.startswith("__") or not name.endswith("_") or name in _MEMORY else name.rstrip("_")


def is_collective(target: str) -> bool:
    """Whether an op moves data between processes, or waits for one that does; ``target`` as for :func:`base_name`."""
    return target.startswith(_COLLECTIVE_RANGES) or target.replace("::", ".").partition(".")[0] in _COLLECTIVE_SPACES


def _without_overload(name: str) -> str:
    return ".".join(name.split(".")[:2])


@functools.cache
def class_of(name: str) -> OpClass:
    """Return the class of the ATen op with this base name (``mul``, ``layer_norm``)."""
    if is_collective(name):
        return OpClass.COLLECTIVE
    if "scaled_dot_product" in name or "flash_attention" in name or "efficient_attention" in name or "cudnn_attention" in name:
        return OpClass.ATTENTION
    for names, op_class in (
        (_GEMMS, OpClass.GEMM),
        (_CONVOLUTIONS, OpClass.CONVOLUTION),
        (_REDUCTIONS, OpClass.REDUCTION),
        (_MEMORY, OpClass.MEMORY),
        (_VIEWS, OpClass.VIEW),
        (_POINTWISE_UNTAGGED, OpClass.POINTWISE),
    ):
        if name in names:
            return op_class
    packet = getattr(torch.ops.aten, name, None)
    overloads = [getattr(packet, overload) for overload in packet.overloads()] if packet is not None else []
    if any(torch.Tag.pointwise in overload.tags for overload in overloads):
        return OpClass.POINTWISE
    forward = _BACKWARD.sub("", name)
    if forward == name:
        return OpClass.OTHER
    # The gradient of a view is a copy into zeros, and the one of an embedding a scatter.
    found = class_of(forward)
    return OpClass.MEMORY if found is OpClass.VIEW else found


MATH_ATTENTION = "aten::_scaled_dot_product_attention_math"
"""Prefix of the op that runs attention as GEMMs and a softmax: its kernels are attention's, whatever their own ops are."""


def attention_backend(kernel_name: str) -> str:
    """Return which backend of ``scaled_dot_product_attention`` a launch of category ``attention`` belongs to.

    This is the one place that reads kernel names: torch tells nowhere else which backend it chose. What is none of the fused
    kernels is the math path, attention in separate ops.

    Args:
        kernel_name: of the kernel; on a CPU the ATen op's name.
    """
    name = kernel_name.lower()
    if "cudnn" in name:  # first: cuDNN's own kernels have "flash" in their names
        return "cudnn"
    if "flash" in name:
        return "flash"
    if "fmha" in name or "memeffattention" in name or "efficient_attention" in name:
        return "efficient"
    return "math"
