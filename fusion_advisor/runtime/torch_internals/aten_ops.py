"""ATen: ops without a public name, and what an op does in the release of torch that is installed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusion_advisor.runtime.torch_internals.dispatcher import OpLog
from fusion_advisor.runtime.torch_internals.fake_mode import fake_mode_of, real_ones

SAYS_ONLY = torch._C._log_api_usage_once
"""Stands in dynamo's graphs, computes nothing and leaves no ATen op."""
ADD_MANY = torch.ops.aten._foreach_add.List
"""Adds two lists of tensors pairwise: on a GPU in one launch, where shapes, dtypes and strides are equal."""
ADD_MANY_IN_PLACE = torch.ops.aten._foreach_add_.Scalar
"""Adds one number to each tensor of a list, in place."""


def copy_all(destinations: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy tensors into tensors, in one launch per dtype and device where they are on a GPU.

    Args:
        destinations: may be expanded: elements in one place of memory are written once.
        sources: of the same shapes; the elements for one place of memory are equal.
    """
    if destinations:  # torch refuses empty lists
        pairs = [_written_once(*pair) for pair in zip(destinations, sources, strict=True)]
        with torch.no_grad():  # a parameter may be among them
            torch._foreach_copy_([into for into, _ in pairs], [source for _, source in pairs])


def _written_once(into: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Leave out the elements that an expanded tensor has twice: torch refuses to write to it."""
    for dim, (size, stride) in enumerate(zip(into.shape, into.stride(), strict=True)):
        if stride == 0 and size > 1:
            into, source = into.detach().narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    return into, source


def adds_bias_after_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    groups: int = 1,
) -> bool:
    """Whether ATen computes this convolution without its bias and then adds it in a kernel of its own, as it does around cuDNN.

    The arguments are those of ``aten.conv1d``, ``conv2d`` and ``conv3d``, the tensors real or fake.
    """
    if x.device.type != "cuda" or x.dim() != weight.dim() or not x.dtype == weight.dtype == bias.dtype:
        return False
    spatial = x.dim() - 2
    sizes = [list(value) * (spatial // len(value)) for value in (stride, padding, dilation)]
    with fake_mode_of([x, weight]):
        backend = torch._C._select_conv_backend(
            x, weight, bias=bias, stride=sizes[0], padding=sizes[1], dilation=sizes[2], transposed=False,
            output_padding=[0] * spatial, groups=groups,
        )  # fmt: skip
    return bool(backend.name == "Cudnn")


def mask_in_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, **options: Any) -> Any:
    """Return the additive mask that ``scaled_dot_product_attention`` makes of a boolean one before it computes.

    Which number stands for "not allowed" differs between its backends and between releases of torch, so it is read off: attention
    runs once and the ops that it consists of are watched.

    Args:
        query: [..., queries, width], on the device where attention will run, in its layout.
        key: [..., keys, width].
        value: [..., keys, width].
        mask: bool, with both values in it.
        options: further keyword arguments of attention.

    Returns:
        The mask in the query's dtype; None where attention does something else when it is given that one.
    """
    attention = torch.ops.aten.scaled_dot_product_attention.default
    with torch.no_grad(), OpLog() as boolean:
        attention(query, key, value, mask, **options)
    made = next((result for name, result in boolean.seen if name == "aten.where.self"), None)
    if made is None or made.shape != mask.shape or made.dtype != query.dtype:
        return None
    with torch.no_grad(), OpLog() as additive:
        attention(query, key, value, made, **options)
    names, rest = [name for name, _ in boolean.seen], [name for name, _ in additive.seen]
    conversion = names[: len(names) - len(rest)]
    is_same = names[len(conversion) :] == rest and "aten.where.self" in conversion
    return made if is_same else None


_ATTENTION_KERNELS = ("aten._scaled_dot_product_", "aten._flash_attention", "aten._efficient_attention", "aten._cudnn_attention")


def has_attention_kernel(query: torch.Tensor, *arguments: Any, **options: Any) -> bool:
    """Whether one kernel serves an attention call in this release of torch; otherwise torch computes the formula op by op.

    Args:
        query: first argument of ``scaled_dot_product_attention``, real or fake.
        arguments: the next ones.
        options: arguments by name.
    """
    return bool(attention_kernel(query, *arguments, **options))


def attention_kernel(query: torch.Tensor, *arguments: Any, **options: Any) -> str:
    """Return the op of the one kernel that serves an attention call; empty where torch computes the formula op by op.

    The arguments are those of :func:`has_attention_kernel`.
    """
    with torch.no_grad(), fake_mode_of([query]), OpLog() as log:
        torch.ops.aten.scaled_dot_product_attention.default(query, *arguments, **options)
    kernels = [name for name, _ in log.seen if name.startswith(_ATTENTION_KERNELS) and "attention_math" not in name]
    return next(iter(kernels), "")


def is_finite_where_all_is_hidden(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    *arguments: Any,
    attention: Callable[..., torch.Tensor] = torch.ops.aten.scaled_dot_product_attention.default,
    **options: Any,
) -> bool:
    """Whether attention gives numbers for a query that may see no key, as the formula in PyTorch does.

    A kernel that subtracts one infinity from another gives NaN there. It runs once for each value that hides a key: ``-inf``, and
    the dtype's least number, on real tensors of these layouts and of one image of the batch.

    Args:
        query: [batch, heads, queries, width], real or fake.
        key: [batch, heads, keys, width].
        value: [batch, heads, keys, width].
        mask: bool or of the query's dtype.
        arguments: the next ones.
        attention: what runs.
        options: arguments by name.
    """
    given = [real_ones(one[:1] if one.dim() == 4 else one) for one in (query, key, value, mask)]
    hidden = (False,) if mask.dtype == torch.bool else (-math.inf, torch.finfo(mask.dtype).min)
    with torch.no_grad():
        return all(
            bool(attention(*given[:3], torch.full_like(given[3], one), *arguments, **options).isfinite().all()) for one in hidden
        )
