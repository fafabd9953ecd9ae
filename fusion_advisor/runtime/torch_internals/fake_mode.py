"""Fake tensors: tensors that have a layout and no numbers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_impls import fast_detach
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils import _pytree as pytree

from fusion_advisor.runtime.torch_internals import symbolic_sizes
from fusion_advisor.runtime.torch_internals.stored_sizes import OpenSizes


def fake_mode_of(values: list[Any]) -> contextlib.AbstractContextManager[Any]:
    """Return the fake mode that ``values`` belong to.

    It is not the tracing context's own mode: dynamo replaces that one before it calls a backend, and mixing both is an error.
    """
    for value in values:
        mode = getattr(value, "fake_mode", None)
        if mode is not None:
            return mode
    return contextlib.nullcontext()


def fake_tensors(values: list[Any]) -> list[Any]:
    """Return fake copies of real tensors (all of one new mode); other values pass through."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode()
    return [mode.from_tensor(value) if isinstance(value, torch.Tensor) else value for value in values]


def lying_at(values: Sequence[torch.Tensor], symbols: symbolic_sizes.Symbols) -> list[torch.Tensor]:
    """Return fake tensors, all of one new mode, that lie as tensors of open sizes do at some sizes.

    Args:
        values: fake ones.
        symbols: the size of each.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    def number(size: Any) -> int:
        return int(symbolic_sizes.at_sizes(symbolic_sizes.expression_of(size), symbols))

    with FakeTensorMode():
        return [
            torch.empty_strided([*map(number, one.shape)], [*map(number, one.stride())], dtype=one.dtype, device=one.device)
            for one in values
        ]


def written_arguments(call: Callable[..., Any], args: Sequence[Any]) -> frozenset[int]:
    """Return the places of the tensors that a call writes to.

    Args:
        call: run on fake tensors.
        args: real ones.

    Returns:
        Nothing where the call cannot be run so.
    """
    fakes = fake_tensors(list(args))
    tensors = {place: one for place, one in enumerate(fakes) if isinstance(one, torch.Tensor)}
    before = {place: one._version for place, one in tensors.items()}
    with torch.no_grad(), contextlib.suppress(Exception):
        call(*fakes)
    return frozenset(place for place, one in tensors.items() if one._version != before[place])


def is_fake(value: object) -> bool:
    """Whether a value is a tensor without numbers."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(value, FakeTensor)


def has_no_numbers(value: object) -> bool:
    """Whether a value is a tensor without numbers, or what a transform (``vmap``, ``grad``) put around a tensor while it ran."""
    return is_fake(value) or (isinstance(value, torch.Tensor) and bool(torch._C._functorch.is_functorch_wrapped_tensor(value)))


def is_plain_fake(value: torch.Tensor, *, may_be_open: bool = False) -> bool:
    """Whether its layout is all of a fake tensor: dense, with no known content, no subclass.

    Args:
        value: any tensor.
        may_be_open: its sizes may be open; without it they are numbers.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    if type(value) is not FakeTensor or value.layout != torch.strided:
        return False
    if value._has_symbolic_sizes_strides and not may_be_open:
        return False
    return value.constant is None or value.numel() == 0


def real_ones(value: torch.Tensor) -> torch.Tensor:
    """Return a real tensor of ones of a tensor's shape, dtype and device, with its strides unless elements share memory."""
    with unset_fake_temporarily():
        if 0 in value.stride():
            return torch.ones(value.shape, dtype=value.dtype, device=value.device)
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).fill_(1)


def detached_fake(value: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor's ``detach()`` without the way through all modes: a quarter of the time, for one that is plain."""
    if not is_plain_fake(value):
        return value.detach()
    detached: torch.Tensor = fast_detach(value.fake_mode, value)  # type: ignore[attr-defined,arg-type]
    return detached


def fake_result(graph_module: torch.fx.GraphModule, node: torch.fx.Node) -> Any:
    """Return what a node of a traced graph returns on its inputs' fake tensors (``meta["val"]``); nothing is computed."""
    mode = fake_mode_of([source.meta.get("val") for source in node.all_input_nodes])
    is_changed = torch.Tag.inplace_view in getattr(node.target, "tags", ())

    def value_of(source: torch.fx.Node) -> Any:
        if "val" in source.meta or source.op != "get_attr":
            value = source.meta["val"]
            return value.detach() if is_changed and isinstance(value, torch.Tensor) else value  # the op gives it another layout
        return mode.from_tensor(getattr(graph_module, str(source.target)))  # type: ignore[attr-defined]

    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), value_of)
    assert callable(node.target)
    # In C++ some ops ask for the number of an open size: products (torch 2.11), attention on a GPU to choose its kernel, resizing
    # and padding of an image in channels last. Their forms in Python do not, and traces use these too.
    is_open = any(isinstance(one, torch.Tensor) and symbolic_sizes.is_symbolic(one) for one in pytree.tree_leaves((args, kwargs)))
    in_python = enable_python_dispatcher() if is_open else contextlib.nullcontext()
    with torch.no_grad(), mode, in_python:
        result = node.target(*args, **kwargs)
        return result if is_open else laid_as_in_eager(node, result, args, kwargs)  # which asks whether it is of one image


_RESHAPES = frozenset(
    [
        torch.ops.aten.reshape.default, torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default,
        torch.ops.aten.unflatten.int, torch.ops.aten.flatten.using_ints, torch.ops.aten.view_as.default,
        torch.ops.aten.reshape_as.default,
    ]
)  # fmt: skip


CONTIGUOUS = frozenset([torch.ops.aten.native_layer_norm_backward.default, torch.ops.aten._log_softmax_backward_data.default])
"""Ops whose first result is contiguous, whatever they are given."""


def laid_as_in_eager(node: torch.fx.Node, value: Any, args: Any, kwargs: Any) -> Any:
    """Return the fake result of a reshape, a pointwise op or the gradient of rows with eager's strides.

    The input's gradient of a layer norm and of a log-softmax is contiguous, and torch's fake tensors lay it out like the gradient
    that the op is given (torch 2.13). Swin gives its last norm one whose rows were turned to be averaged.

    A dim of one image may have any stride, and torch's fake tensors give it another one than eager does. Convolutions and norms
    look at it: they take such an image for channels last in one case and not in the other, and so does all that follows.

    Args:
        node: any op of a traced graph.
        value: its fake result.
        args: what it is given, as fake tensors and numbers.
        kwargs: the same, by name.
    """
    if node.target in CONTIGUOUS:
        return _contiguous(value[0], value) if isinstance(value, tuple | list) else _contiguous(value, value)
    if not isinstance(value, torch.Tensor) or value.dim() not in (4, 5) or value.shape[0] != 1 or not is_plain_fake(value):
        return value
    is_pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    channels_last = torch.channels_last if value.dim() == 4 else torch.channels_last_3d
    is_image = not value.is_contiguous() and value.is_contiguous(memory_format=channels_last)
    if not is_image or not (is_pointwise or node.target in _RESHAPES):
        return value
    with unset_fake_temporarily():  # meta tensors are laid as in eager, but for numbers that stand for tensors
        given, named = pytree.tree_map_only(torch.Tensor, _meta, (args, kwargs))
        assert isinstance(node.target, torch._ops.OpOverload)
        wants = [str(argument.type) for argument in node.target._schema.arguments]
        numbers = (isinstance(one, bool | int | float) and want == "Tensor" for one, want in zip(given, wants, strict=False))
        given = [_meta(torch.tensor(one)) if is_number else one for one, is_number in zip(given, numbers, strict=True)]
        strides = node.target(*given, **named).stride()
    return value if strides == value.stride() else value.as_strided(value.shape, strides, value.storage_offset())


def _contiguous(first: Any, value: Any) -> Any:
    """Return a result with its first tensor contiguous; itself where it is."""
    if not isinstance(first, torch.Tensor) or first.is_contiguous() or not is_plain_fake(first):
        return value
    laid = first.new_empty(first.shape)
    return laid if value is first else (laid, *value[1:])


def _meta(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def propagate(graph_module: torch.fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Give each node of a graph the fake tensors that it returns on inputs of these layouts (``meta["val"]``).

    A call of ours (weights that are viewed as one) looks at the memory of real tensors: it returns what it returned before, whose
    layout depends on no input's.

    Args:
        graph_module: of ATen ops.
        inputs: real tensors and numbers.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    class Propagation(FakeTensorProp):
        def run_node(self, n: torch.fx.Node) -> Any:
            value = n.meta.get("val")
            is_ours = str(getattr(n.target, "__module__", "")).startswith("fusion_advisor.fuse.")
            if not is_ours or not isinstance(value, torch.Tensor):
                result = super().run_node(n)
                if n.op != "call_function":
                    return result
                given = torch.fx.node.map_arg((n.args, n.kwargs), lambda source: source.meta.get("val"))
                if (corrected := laid_as_in_eager(n, result, *given)) is not result:
                    n.meta["val"] = corrected
                return corrected
            n.meta["val"] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
            return n.meta["val"]

    with torch.no_grad():
        Propagation(graph_module, FakeTensorMode()).propagate(*inputs)


def forget_real_tensors(modes: Iterable[Any]) -> None:
    """Drop the weak references that fake modes keep to the tensors that were traced.

    They serve the trace alone. As long as there is one, ``torch.utils.swap_tensors`` refuses the tensor.
    """
    for mode in modes:
        converter = mode.fake_tensor_converter.meta_converter
        converter.describer.lookup_tensor.clear()
        converter.describer.lookup_storage.clear()


def laid_out(
    layouts: Sequence[Sequence[Any]], storages: Sequence[Any], device: torch.device, dtype_of: Callable[[str], torch.dtype],
    sizes: OpenSizes | None = None,
) -> list[torch.Tensor]:  # fmt: skip
    """Return fake tensors of given layouts, all of one new mode; those of one storage share it.

    Args:
        layouts: of each its storage's place, offset, sizes, strides, dtype's name and kind of device.
        storages: bytes of each.
        device: of the model; its kind's number is that of the tensors.
        dtype_of: returns a dtype by its name.
        sizes: reads what is no number among offsets, sizes, strides and bytes; None: all are numbers.

    Raises:
        ValueError, LookupError, TypeError, RuntimeError: a layout that no tensor has, or that lies outside of its storage.
    """
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    mode = FakeTensorMode() if sizes is None else FakeTensorMode(shape_env=sizes.environment)
    size_of: Callable[[Any], Any] = _number if sizes is None else functools.lru_cache(maxsize=None)(sizes.size)
    number_of = _number if sizes is None else functools.lru_cache(maxsize=None)(sizes.number)
    found: list[torch.Tensor] = []
    with torch.no_grad(), contextlib.nullcontext() if sizes is None else sizes.unguarded():
        bytes_in = [_hashable(nbytes) for nbytes in storages]
        memory = [_memory(size_of(nbytes)) for nbytes in bytes_in]
        for place, *where, name, kind in layouts:
            offset, shape, stride = map(_hashable, where)
            if kind not in ("cpu", device.type) or place < 0:
                raise ValueError(f"a tensor on {kind}")
            dtype = dtype_of(name)
            at, counts, steps = number_of(offset), list(map(number_of, shape)), list(map(number_of, stride))
            reach = at + sum((size - 1) * step for size, step in zip(counts, steps, strict=True)) + 1 if all(counts) else 0
            if min((at, *counts, *steps), default=0) < 0 or reach * dtype.itemsize > number_of(bytes_in[place]):
                raise ValueError("a layout outside of its storage")
            elem = torch.empty(0, dtype=dtype, device="meta")
            elem.set_(memory[place], size_of(offset), list(map(size_of, shape)), list(map(size_of, stride)))
            found.append(FakeTensor(mode, elem, device if kind == device.type else torch.device("cpu")))
    return found


def _hashable(data: Any) -> Any:
    return tuple(map(_hashable, data)) if isinstance(data, list) else data


def _number(data: Any) -> int:
    if type(data) is not int:
        raise ValueError(f"a size like {data!r:.40}")
    return data


def _memory(nbytes: Any) -> torch.UntypedStorage:
    if isinstance(nbytes, int):
        return torch.UntypedStorage(nbytes, device="meta")
    return torch.empty(nbytes, dtype=torch.uint8, device="meta").untyped_storage()
