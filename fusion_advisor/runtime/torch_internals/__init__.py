"""Every private torch API that the project uses: one function and one test for each.

When a torch release moves one of them, this file and its test are the only places to mend. Tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CodeType
from typing import Any, cast

import torch
import torch._dynamo.repro.after_dynamo  # the first torch.compile of a process loads it: 0.14 to 0.3 s, most of it networkx
from torch._guards import TracingContext
from torch._subclasses.fake_impls import fast_detach
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta, set_stack_trace
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode


def placeholder_values(graph_module: torch.fx.GraphModule) -> list[Any]:
    """Return the fake tensors that dynamo traced a graph's placeholders with (``example_value``), in order."""
    return [node.meta["example_value"] for node in graph_module.graph.nodes if node.op == "placeholder"]


def lazy_graph_module(root: torch.nn.Module, graph: torch.fx.Graph, *, class_name: str) -> torch.fx.GraphModule:
    """Return a graph module that generates its Python code when it is first called or asked for it.

    For 2,000 nodes that takes 40 ms, and a graph that is only read or interpreted never needs it.
    """
    from torch.fx._lazy_graph_module import _LazyGraphModule

    return _LazyGraphModule(root, graph, class_name=class_name)


def has_dynamic_shapes(graph_module: torch.fx.GraphModule) -> bool:
    """Whether a dynamo graph was traced with symbolic sizes: what is measured for one size then proves nothing for others."""
    for value in placeholder_values(graph_module):
        if isinstance(value, torch.SymInt | torch.SymFloat):
            return True
        if isinstance(value, torch.Tensor) and not all(isinstance(size, int) for size in (*value.shape, *value.stride())):
            return True
    return False


def fake_mode_of(values: list[Any]) -> contextlib.AbstractContextManager[Any]:
    """Return the fake mode that ``values`` belong to.

    It is not the tracing context's own mode: dynamo replaces that one before it calls a backend, and mixing both is an error.
    """
    for value in values:
        mode = getattr(value, "fake_mode", None)
        if mode is not None:
            return mode
    return contextlib.nullcontext()


def retrace_to_aten(function: Callable[..., Any], fake_inputs: list[Any]) -> torch.fx.GraphModule:
    """Trace ``function`` on fake tensors into ATen ops as the model calls them, before autograd and decomposition.

    Source lines and module stacks of the nodes that are being interpreted are kept (``preserve_node_meta``).
    """
    with preserve_node_meta(), fake_mode_of(fake_inputs), _outside_tracing_context():
        traced: torch.fx.GraphModule = make_fx(function, pre_dispatch=True)(*fake_inputs)
    return traced


@contextlib.contextmanager
def _outside_tracing_context() -> Iterator[None]:
    # make_fx looks for a fake mode in the tracing context first, and inside a dynamo backend that is a different one.
    context = TracingContext.try_get()
    if context is None:
        yield
        return
    before = context.fake_mode
    context.fake_mode = None
    try:
        yield
    finally:
        context.fake_mode = before


def fake_tensors(values: list[Any]) -> list[Any]:
    """Return fake copies of real tensors (all of one new mode); other values pass through."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode()
    return [mode.from_tensor(value) if isinstance(value, torch.Tensor) else value for value in values]


def is_fake(value: object) -> bool:
    """Whether a value is a tensor without numbers."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(value, FakeTensor)


def is_plain_fake(value: torch.Tensor) -> bool:
    """Whether its layout is all of a fake tensor: dense, of sizes that are numbers, with no known content, no subclass."""
    from torch._subclasses.fake_tensor import FakeTensor

    if type(value) is not FakeTensor or value.layout != torch.strided or value._has_symbolic_sizes_strides:
        return False
    return value.constant is None or value.numel() == 0


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
    with torch.no_grad(), mode:
        return node.target(*args, **kwargs)


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


def storage_key(value: torch.Tensor) -> int:
    """Return a key that two (fake or real) tensors share exactly when they share storage."""
    return int(value.untyped_storage()._cdata)


def is_wrapped(value: torch.Tensor) -> bool:
    """Whether a tensor is ``vmap``'s (or another transform's) view of one, and has no storage of its own."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(value))


SAYS_ONLY = torch._C._log_api_usage_once
"""Stands in dynamo's graphs, computes nothing and leaves no ATen op."""

ADD_MANY = torch.ops.aten._foreach_add.List
"""Adds two lists of tensors pairwise: on a GPU in one launch, where shapes, dtypes and strides are equal."""
ADD_MANY_IN_PLACE = torch.ops.aten._foreach_add_.Scalar
"""Adds one number to each tensor of a list, in place."""


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
    with torch.no_grad(), _Watch() as boolean:
        attention(query, key, value, mask, **options)
    made = next((result for name, result in boolean.seen if name == "aten.where.self"), None)
    if made is None or made.shape != mask.shape or made.dtype != query.dtype:
        return None
    with torch.no_grad(), _Watch() as additive:
        attention(query, key, value, made, **options)
    names, rest = [name for name, _ in boolean.seen], [name for name, _ in additive.seen]
    conversion = names[: len(names) - len(rest)]
    is_same = names[len(conversion) :] == rest and "aten.where.self" in conversion
    return made if is_same else None


class _Watch(TorchDispatchMode):
    """Notes each op that reaches a backend, and its result."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.seen.append((str(func), result))
        return result


def copy_all(destinations: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy tensors into tensors, in one launch per dtype and device where they are on a GPU.

    Args:
        destinations: may be expanded: elements in one place of memory are written once.
        sources: of the same shapes; the elements for one place of memory are equal.
    """
    if destinations:  # torch refuses empty lists
        pairs = [_written_once(*pair) for pair in zip(destinations, sources, strict=True)]
        torch._foreach_copy_([into for into, _ in pairs], [source for _, source in pairs])


def _written_once(into: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Leave out the elements that an expanded tensor has twice: torch refuses to write to it."""
    for dim, (size, stride) in enumerate(zip(into.shape, into.stride(), strict=True)):
        if stride == 0 and size > 1:
            into, source = into.detach().narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    return into, source


def break_reason(graph_module: torch.fx.GraphModule) -> tuple[str, str] | None:
    """Return why dynamo ended this graph early as (reason, ``file:line``), or None when it ended with the function."""
    compile_reason = getattr(graph_module, "compile_subgraph_reason", None)
    if compile_reason is None or not getattr(compile_reason, "graph_break", False):
        return None
    frames = list(getattr(compile_reason, "user_stack", None) or [])
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return str(compile_reason.reason).strip().splitlines()[0], where


def traced_code() -> tuple[CodeType, ...]:
    """Return the code of every function that dynamo has looked through for the graph that its backend has in hand, each once.

    Dynamo guards the functions that it finds by name in a module's globals. It does not guard those that it finds in a class.
    """
    return tuple(dict.fromkeys(TracingContext.get_traced_code() or ()))


def is_mode_active() -> bool:
    """Whether a mode of the caller's sees every op: a ``TorchFunctionMode`` or a ``TorchDispatchMode``.

    ``torch.device`` and ``set_default_device`` are function modes too. They change nothing but where new tensors go, and dynamo
    guards them.
    """
    if torch._C._len_torch_dispatch_stack() > 0:
        return True
    count = torch._C._len_torch_function_stack()
    return count > 0 and any(type(torch._C._get_function_stack_at(place)) is not DeviceContext for place in range(count))


def sees_its_ops(kind: type[torch.Tensor]) -> bool:
    """Whether a class of tensors handles the ops on it by itself (``__torch_function__`` or ``__torch_dispatch__``)."""
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return False
    return kind.__torch_function__ is not _NO_FUNCTION or getattr(kind, "__torch_dispatch__", _NO_DISPATCH) is not _NO_DISPATCH


_NO_FUNCTION = torch._C._disabled_torch_function_impl
_NO_DISPATCH = torch.Tensor.__torch_dispatch__


def fake_modes_of(graph_module: torch.fx.GraphModule) -> list[Any]:
    """Return the fake modes that dynamo traced a graph with; call it in the backend, for dynamo replaces one of them there."""
    context = TracingContext.try_get()
    modes = [getattr(value, "fake_mode", None) for value in placeholder_values(graph_module)]
    modes.append(None if context is None else context.fake_mode)
    return list({id(mode): mode for mode in modes if mode is not None}.values())


def forget_real_tensors(modes: Iterable[Any]) -> None:
    """Drop the weak references that fake modes keep to the tensors that were traced.

    They serve the trace alone. As long as there is one, ``torch.utils.swap_tensors`` refuses the tensor.
    """
    for mode in modes:
        converter = mode.fake_tensor_converter.meta_converter
        converter.describer.lookup_tensor.clear()
        converter.describer.lookup_storage.clear()


def set_compiled_call(module: torch.nn.Module, call: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """Make ``module(...)`` run ``call`` on this instance only, as ``nn.Module.compile`` does; None undoes it.

    Returns what was set before, so that an earlier ``module.compile()`` can be put back.
    """
    before = compiled_call_of(module)
    if call is None:
        module.__dict__.pop("_compiled_call_impl", None)
    else:
        module.__dict__["_compiled_call_impl"] = call
    return before


def compiled_call_of(module: torch.nn.Module) -> Callable[..., Any] | None:
    """Return what ``set_compiled_call`` or ``module.compile()`` has set."""
    set_now: Callable[..., Any] | None = module.__dict__.get("_compiled_call_impl")
    return set_now


def hook_tables(module: torch.nn.Module) -> list[dict[int, Any]]:
    """Return the tables that forward hooks are registered in: of every module inside, and torch's global ones.

    Dynamo does not guard them (``skip_nnmodule_hook_guards``), so a hook that is added after a capture would not run.
    """
    from torch.nn.modules import module as implementation

    tables = [implementation._global_forward_hooks, implementation._global_forward_pre_hooks]
    for part in module.modules():
        tables += [part._forward_hooks, part._forward_pre_hooks]
    return tables


def original_call(module: torch.nn.Module) -> Callable[..., Any]:
    """Return the call that runs the module's own forward with its hooks, whatever ``set_compiled_call`` has set."""
    return module._call_impl


def compiled_call(module: torch.nn.Module, backend: Callable[..., Any] | str, *, mode: str | None = None) -> Callable[..., Any]:
    """Return the module's own call as dynamo runs it with ``backend``, in a mode of torch.compile's where one is given.

    The graphs are isolated from all other compiled code (where torch can do that), so neither earlier captures nor other fused
    models of the same class count against their limit. A module whose forward is torch's own (``nn.Sequential``) gets a frame
    around it, because dynamo looks into no frame of torch's.
    """
    call = original_call(module)
    if torch._dynamo.trace_rules.check(module.forward):
        call = torch._dynamo.external_utils.wrap_inline(call)
    isolated: dict[str, Any] = (
        {"isolate_recompiles": True} if "isolate_recompiles" in inspect.signature(torch.compile).parameters else {}
    )
    compiled: Callable[..., Any] = torch.compile(call, backend=backend, mode=mode, dynamic=False, **isolated)
    return compiled


@contextlib.contextmanager
def without_source_lines() -> Iterator[None]:
    """Let dynamo trace without noting where in the source each op comes from: a tenth of its time goes into those texts.

    It formats the frames of every op, unless the node has a stack trace when it is made; here all get an empty one.
    """
    with preserve_node_meta():
        set_stack_trace([" "])
        yield


@contextlib.contextmanager
def linear_in_one_step() -> Iterator[None]:
    """Let dynamo compute the fake result of a linear layer as that of one op: 6 % less time for 32 layers of Llama.

    Above autograd a linear is decomposed into five ops, partly in Python, each of which the fake mode looks up. Below autograd
    the fake mode sees the linear itself, decomposes it once for each layout, and remembers the result. With gradients, and for
    tensors that see to their ops themselves, all stays as it is. What is registered here runs in traces alone, not in calls.
    """
    me = object()
    with _linear_lock:
        _linear_users.append(me)
        if len(_linear_users) == 1:
            _register_linear()
    try:
        yield
    finally:
        with _linear_lock:
            _linear_users.remove(me)
            if not _linear_users:
                _unregister_linear()


_linear_lock = threading.Lock()
_linear_users: list[object] = []
"""Traces that are under way: the first registers, the last one takes it away again."""
_linear_keys: list[Any] = []
"""The current registration."""


def _register_linear() -> None:
    linear = torch.ops.aten.linear.default

    def result(*args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        if torch.is_grad_enabled() or not all(map(is_plain_fake, tensors)):
            return linear.decompose(*args, **kwargs)
        with torch._C._AutoDispatchBelowAutograd():
            return linear(*args, **kwargs)

    for key in (torch._C.DispatchKey.AutogradCPU, torch._C.DispatchKey.AutogradCUDA):
        if key not in linear.py_kernels:
            linear.py_impl(key)(result)
            _linear_keys.append(key)


def _unregister_linear() -> None:
    linear = torch.ops.aten.linear.default
    while _linear_keys:
        del linear.py_kernels[_linear_keys.pop()]
    linear._dispatch_cache.clear()


def leave_new_guards_untried() -> None:
    """Let dynamo take the guards of the graph that its backend has in hand as they are; call it in the backend.

    It would evaluate them at once on the call that they were made for, and then time them with all caches emptied, for a line in
    its log: 256 MB are written for that, 0.08 s. Guards that do not hold for their own call compile the next call again.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    InstructionTranslator.current_tx().output.skip_guards_check = True


def empty_compile_caches() -> contextlib.AbstractContextManager[Any]:
    """Let torch.compile and Triton begin with empty caches on disk while the context lasts, as on a machine's first run."""
    from torch._inductor.utils import fresh_inductor_cache

    context: contextlib.AbstractContextManager[Any] = fresh_inductor_cache()
    return context


class Addresses:
    """Addresses of tensors' data: 425 are compared in 47 µs of Python, in a fraction of it where torch can in C++ (CUDA builds).

    Source: torch's CUDA graph trees ask this of their own static inputs.
    """

    __slots__ = ("_at_once", "_places", "_values")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._values = [tensor.data_ptr() for tensor in tensors]
        self._places = list(range(len(tensors)))
        self._at_once = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)

    def are_of(self, tensors: list[torch.Tensor]) -> bool:
        """Whether these, as many and in this order, lie there."""
        if len(tensors) != len(self._values):
            return False
        if self._at_once is None:
            return [tensor.data_ptr() for tensor in tensors] == self._values
        return bool(self._at_once(tensors, self._values, self._places))


def storage_reference(tensor: torch.Tensor, freed: Callable[[Any], object]) -> weakref.ref[torch.UntypedStorage]:
    """Return a weak reference to a tensor's memory; ``freed`` is called with it when nothing holds that memory any longer.

    A storage's Python object lives as long as the storage, whoever holds it: a tensor whose ``data`` was given other memory lets
    go of the old one although the tensor lives on.
    """
    return weakref.ref(tensor.untyped_storage(), freed)


def current_device_number() -> int:
    """Return the current device's number once CUDA is in use, without the questions whether it is."""
    return int(torch._C._cuda_getDevice())


def current_stream_number(device: int) -> int:
    """Return the driver's handle of a device's current stream, without an object around it."""
    return int(torch._C._cuda_getCurrentRawStream(device))


@contextlib.contextmanager
def own_gemm_workspace() -> Iterator[None]:
    """Give what is recorded inside a cuBLAS workspace in its own memory pool, which lives as long as its graph does.

    Torch keeps one workspace for each stream and hands it to every GEMM. torch.compile's reduce-overhead mode frees them all, and
    a graph that was recorded with one of those would write to memory that is another tensor's by then, or nobody's. So enter this
    around the capture alone: streams come from a pool of 32, and one that runs a step ahead of the capture, to warm it up, may be
    the one that captures.
    """
    clear = torch._C._cuda_clearCublasWorkspaces if torch.cuda.is_available() else _nothing
    clear()
    try:
        yield
    finally:
        clear()


def _nothing() -> None:
    pass


def inductor(graph_module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Compile a traced graph as torch.compile's default backend does, without dynamo."""
    from torch._inductor.compile_fx import compile_fx

    with torch.no_grad():
        return cast("Callable[..., Any]", compile_fx(graph_module, inputs))


def inductor_calls_as_it_is(op: torch._ops.OpOverload) -> None:
    """Tell Inductor that an op has no lowering, so that it calls it.

    It would find that out by itself, and torch 2.11 then writes the op's arguments out for a log line that nobody asked for:
    expressions in which each residual stands twice, so 2^24 of them for BERT's 12 layers and a compiler that never ends.
    """
    from torch._inductor.lowering import make_fallback

    make_fallback(op, warn=False)


def raise_recompile_limit(limit: int) -> contextlib.AbstractContextManager[Any]:
    """Let dynamo keep ``limit`` graphs per code object while the context lasts.

    Each capture is a backend of its own; with dynamo's default of 8, the ninth profile of one process would silently run eager.
    Entering it costs half a millisecond: use it around calls that compile, not around every call.
    """
    return torch._dynamo.config.patch(recompile_limit=limit, accumulated_recompile_limit=max(256, limit * 8))


def no_collection() -> contextlib.AbstractContextManager[Any]:
    """Let dynamo compile without looking for cycles after each frame: it takes 0.25 s with a model of 28 layers."""
    return torch._dynamo.config.patch(run_gc_after_compile=False)
