"""Sorts calls by all but the layouts of their tensors: calls of one form differ in sizes alone, which are soon compared.

A cache that grows makes a new signature at each step. To look through it takes 0.4 ms with 12 layers; to compare the layouts
of its tensors with those of a call of the same form takes a tenth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusion_advisor.capture.sizes.open_capture import Dims, base_of, call_tensors, dim_size
from fusion_advisor.runtime.call_tensors import is_object

Layout = tuple[torch.Size, torch.dtype, torch.device, tuple[int, ...], *tuple[object, ...]]
"""Sizes, dtype, device and strides of a tensor. Two marks follow where the op that reads it negates or conjugates it first,
and one where it has no strides."""


@dataclass(frozen=True, slots=True)
class CallParts:
    """A call's signature in two parts.

    Attributes:
        form: all but the layouts of tensors; hashable.
        layouts: of all tensors, those in objects last.
        tensors: returns these tensors; fewer where one of the objects is read anew at each call.
    """

    form: object
    layouts: tuple[Layout, ...]
    tensors: Callable[[], list[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Row:
    """What a tensor's layout must be.

    Attributes:
        names: of its dims, empty ones for dims of a fixed size; None where all of its layout is fixed.
        like: the layout in the example; None where any will do, because the tensor lies in something that is compared by itself.
    """

    names: tuple[str, ...] | None
    like: Layout | None

    def add_sizes(self, layout: Layout, sizes: dict[str, int]) -> bool:
        """Note the sizes that a layout gives its names; False where it does not fit, or fits no size noted before."""
        if self.like is None or self.names is None:
            return self.like is None or layout == self.like
        shape, dtype, device, stride, *marks = layout
        if marks or len(shape) != len(self.names) or dtype != self.like[1] or device != self.like[2]:
            return False
        for name, size, fixed in zip(self.names, shape, self.like[0], strict=True):
            base = base_of(name)
            if not name:
                if size != fixed:
                    return False
            elif sizes.setdefault(base, size - dim_size(name, {base: 0})) != size - dim_size(name, {base: 0}):
                return False
        return is_contiguous(shape, stride) == is_contiguous(self.like[0], self.like[3])


def sizes_in(rows: Sequence[Row], layouts: Sequence[Layout]) -> dict[str, int] | None:
    """Return the size of each named dim of a call; None where a layout does not fit.

    Args:
        rows: one for each tensor.
        layouts: of the call.
    """
    sizes: dict[str, int] = {}
    last: tuple[Row, Layout] | None = None
    for row, layout in zip(rows, layouts, strict=True):
        # Layers are alike: `is` spares nearly all of the work.
        if last is not None and last[0] is row and last[1] is layout:
            continue
        last = (row, layout)
        if not row.add_sizes(layout, sizes):
            return None
    return sizes


def is_contiguous(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a tensor of this layout is contiguous for ``Tensor.is_contiguous``: strides of dims of size 1 do not count."""
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size == 0:
            return True
        if size != 1 and step != expected:
            return 0 in shape
        expected *= size
    return True


def laid_out(value: Any) -> Any:
    """Return what a call passes with the strides that a new tensor has; the same value where all have them.

    ``ids[:, -1:]`` of one sequence is contiguous, with the length in a stride that nobody steps by. Dynamo guards that number,
    and would trace such a call for each length. Tensors in objects stay: the object is part of the call.

    Args:
        value: positional or keyword arguments, or what lies in them.
    """
    if type(value) is torch.Tensor:
        is_odd = value.layout is torch.strided and has_odd_strides(value.shape, value.stride())
        return value.as_strided(value.shape, _usual_strides(value.shape)) if is_odd else value
    if type(value) in (list, tuple):
        items = [laid_out(item) for item in value]
        return value if all(one is other for one, other in zip(items, value, strict=True)) else type(value)(items)
    if type(value) is dict:
        found = {name: laid_out(item) for name, item in value.items()}
        return value if all(found[name] is item for name, item in value.items()) else found
    return value


def has_odd_strides(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a contiguous tensor has other strides than a new one: of dims of size 1, which nobody steps by."""
    return tuple(stride) != _usual_strides(shape) and is_contiguous(shape, stride)


def odd_tensor(args: Sequence[Any], kwargs: Mapping[str, Any], dims: Dims) -> str:
    """Return the path of a tensor with open dims that has odd strides; empty where there is none."""
    tensors = call_tensors(args, kwargs)
    return next((path for path in dims if has_odd_strides(tensors[path].shape, tensors[path].stride())), "")


def _usual_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def pattern_of(args: Sequence[Any], kwargs: Mapping[str, Any], dims: Dims | None) -> Any:
    """Return what is equal for all calls that are served: everything but the open sizes.

    Args:
        args: of the call.
        kwargs: of the call.
        dims: names of its tensors' dims; None leaves out all layouts.
    """
    paths = {id(tensor): path for path, tensor in call_tensors(args, kwargs).items()}

    def key(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return (type(leaf), float.hex(leaf) if isinstance(leaf, float) else leaf)
        if dims is None:
            return torch.Tensor
        names = dims.get(paths.get(id(leaf), ""))
        marks = (leaf.is_neg(), leaf.is_conj())  # such a tensor is negated or conjugated only when an op reads it
        if names is None:
            return (leaf.shape, leaf.dtype, leaf.device, leaf.stride(), *marks)
        fixed = tuple(None if name else size for name, size in zip(names, leaf.shape, strict=False))
        return (fixed, leaf.dtype, leaf.device, leaf.is_contiguous(), *marks)

    def pattern(value: Any, depth: int = 0) -> Any:
        if depth > _DEEPEST:
            return object()  # equal to nothing
        if isinstance(value, torch.Tensor):
            return key(value)
        if isinstance(value, list | tuple):
            return (type(value), *(pattern(item, depth + 1) for item in value))
        contents = value if isinstance(value, dict) else vars(value) if is_object(value) else None
        if contents is None:
            return key(value)
        items = [(name, contents[name]) for name in sorted(contents, key=str)]
        if not isinstance(value, dict):  # dynamo guards the numbers and flags of an object that the graph depends on
            items = [(name, int if type(item) is int else item) for name, item in items if not _is_own_flag(name, item)]
        return (type(value), *((name, pattern(item, depth + 1)) for name, item in items))

    return pattern((tuple(args), dict(kwargs)))


_DEEPEST = 8
"""Objects inside one another that are looked into."""


def _is_own_flag(name: str, value: Any) -> bool:
    """Whether an attribute is a flag of the object's own: transformers notes in one who made a cache."""
    return name.startswith("_") and isinstance(value, bool)
