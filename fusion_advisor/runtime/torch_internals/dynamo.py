"""TorchDynamo: what it compiles a module's call with, and what its backend can ask about the graph in hand."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from types import CodeType, FunctionType, MethodType
from typing import Any, cast

import torch
import torch._dynamo
from torch._C._dynamo.eval_frame import get_eval_frame_callback, reset_code
from torch._dynamo.eval_frame import skip_code
from torch._guards import TracingContext
from torch.fx.traceback import preserve_node_meta, set_stack_trace

from fusion_advisor.runtime.torch_internals.module_call import original_call

OpRaised = torch._dynamo.exc.TorchRuntimeError
"""An op of a model raised while it was traced. The model itself raises what the op did."""


def placeholder_values(graph_module: torch.fx.GraphModule) -> list[Any]:
    """Return the fake tensors that dynamo traced a graph's placeholders with (``example_value``), in order."""
    return [node.meta["example_value"] for node in graph_module.graph.nodes if node.op == "placeholder"]


def has_dynamic_shapes(graph_module: torch.fx.GraphModule) -> bool:
    """Whether a dynamo graph was traced with symbolic sizes: what is measured for one size then proves nothing for others."""
    for value in placeholder_values(graph_module):
        if isinstance(value, torch.SymInt | torch.SymFloat):
            return True
        if isinstance(value, torch.Tensor) and not all(isinstance(size, int) for size in (*value.shape, *value.stride())):
            return True
    return False


def gives_gradients(graph_module: torch.fx.GraphModule) -> bool:
    """Whether autograd is to follow a result of a dynamo graph: the model turned gradients on by itself.

    A tensor that the graph is given, and hands out again as it is or as a view, is no such result.
    """
    given = [value for value in placeholder_values(graph_module) if isinstance(value, torch.Tensor)]
    output = next(node for node in reversed(graph_module.graph.nodes) if node.op == "output")
    values = [node.meta.get("example_value") for node in output.all_input_nodes]
    wanted = [value for value in values if isinstance(value, torch.Tensor) and value.requires_grad]
    return not all(any(value is one or value._base is one for one in given) for value in wanted)


def reads_sizes(graph_module: torch.fx.GraphModule) -> bool:
    """Whether a graph of fixed sizes takes a whole number out of a tensor: ``int()`` of a NumPy number, say."""
    values = [node.meta.get("example_value") for node in graph_module.graph.nodes if node.op != "placeholder"]
    return any(isinstance(value, torch.SymInt) for value in values) and not has_dynamic_shapes(graph_module)


@contextlib.contextmanager
def without_logged_guard_errors() -> Iterator[None]:
    """Let dynamo raise what it has to say of guards, and not write it to the terminal too, forty lines of it."""
    logger = logging.getLogger("torch._guards")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def why_untraceable(error: Exception) -> str | None:
    """Return why a graph with open sizes cannot be traced again, where it is because a tensor's number decides."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException | GuardOnDataDependentSymNode):
        return f"a number in a tensor decides its shapes ({type(error).__name__})"
    return None


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


def untagged(value: Any) -> Any:
    """Return the function that dynamo wrapped when the process first compiled something; any other value as it is.

    So it does with ``torch.nn.Module.__init__`` and ``__setstate__``, to tell modules that are made inside of a ``forward``.

    Args:
        value: of a class's attribute.
    """
    if not isinstance(value, FunctionType) or value.__module__ != "torch._dynamo.mutation_guard":
        return value
    wrapped = (cell.cell_contents for cell in value.__closure__ or ())
    return next((one for one in wrapped if isinstance(one, FunctionType)), value)


def begins_with(module: torch.nn.Module, code: CodeType) -> bool:
    """Whether a frame is the module's whole call: dynamo leaves out what it cannot trace, and begins after it or in a callee.

    Args:
        module: whose call was compiled.
        code: the first of :func:`traced_code`.
    """
    own = getattr(module.forward, "__code__", None)
    return code is own or code.co_filename == torch._dynamo.external_utils.__file__


def name_self(graph_module: torch.fx.GraphModule) -> None:
    """Name the module whose ``forward`` dynamo has in hand ``self`` in its graph's module paths, whatever its author calls it.

    Args:
        graph_module: dynamo's; only what its nodes remember of modules is changed.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    code = InstructionTranslator.current_tx().output.root_tx.f_code
    if code.co_name != "forward" or not code.co_argcount or code.co_varnames[0] == "self":
        return
    own, plain = f"L['{code.co_varnames[0]}']", "L['self']"
    graphs = [one.graph for one in graph_module.modules() if isinstance(one, torch.fx.GraphModule)]
    for node in (node for graph in graphs for node in graph.nodes):
        stack = node.meta.get("nn_module_stack")
        if stack:
            node.meta["nn_module_stack"] = {
                key: (plain + path.removeprefix(own) if path.startswith(own) else path, kind)
                for key, (path, kind) in stack.items()
            }


def lasting_effects() -> tuple[tuple[str, int], ...]:
    """Return what the call that the backend has in hand changes in Python and what outlives it, in words.

    Each with the ``id`` of the object whose attributes it sets, 0 for all else. Its result and its tensors do not count.
    Dynamo runs the graph and then makes what the call did to lists, dicts and attributes good. What a call sets to what it was
    leaves nothing behind, nor does what it puts into its own ``**kwargs``.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    tx = InstructionTranslator.current_tx()
    effects = tx.output.side_effects
    found = [("random numbers of Python's own", 0)] if getattr(tx.output, "random_calls", None) else []
    found += [("hooks of tensors", 0)] if effects.tensor_hooks or effects.save_for_backward else []
    code = tx.output.root_tx.f_code
    names = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
    own = code.co_varnames[names : names + bool(code.co_flags & inspect.CO_VARKEYWORDS)]
    for var in effects.id_to_variable.values():
        kind = type(var.mutation_type).__name__
        if kind in ("AttributeMutationNew", "ValueMutationNew") or not effects.is_modified(var):
            continue
        name = getattr(var.source, "local_name", None)
        is_call_own = name is not None and kind == "ValueMutationExisting" and name in own
        if not is_call_own and not _sets_what_is_there(var, effects.store_attr_mutations.get(var, {})):
            found.append((f"a {_kind_of(var)}", id(_value_of(var)) if kind == "AttributeMutationExisting" else 0))
    return tuple(found)


def _kind_of(var: Any) -> str:
    """Return the name of the class that dynamo follows a value of."""
    value = _value_of(var)
    if value is not None:
        return type(value).__name__
    try:
        return str(var.python_type().__name__)
    except NotImplementedError:  # what torch raises for a value whose class dynamo does not know
        return type(var).__name__


def _value_of(var: Any) -> Any:
    """Return the value that dynamo follows; None where it has none."""
    try:
        return getattr(var, "value", None)
    except NotImplementedError:  # what torch raises for a list that holds a tensor
        return None


def _sets_what_is_there(var: Any, changes: dict[str, Any]) -> bool:
    """Whether each attribute that is set has that value already."""
    if not changes or (owner := _value_of(var)) is None:
        return False
    for name, new in changes.items():
        if not new.is_python_constant():
            return False
        value, there = new.as_python_constant(), getattr(owner, name, var)
        if type(value) is not type(there) or value != there:
            return False
    return True


def fake_modes_of(graph_module: torch.fx.GraphModule) -> list[Any]:
    """Return the fake modes that dynamo traced a graph with; call it in the backend, for dynamo replaces one of them there."""
    context = TracingContext.try_get()
    modes = [getattr(value, "fake_mode", None) for value in placeholder_values(graph_module)]
    modes.append(None if context is None else context.fake_mode)
    return list({id(mode): mode for mode in modes if mode is not None}.values())


def known_tensors() -> MutableMapping[Any, Any]:
    """Return what the trace that the backend has in hand notes of real tensors, by the tensor, whose weak references it holds.

    It serves the trace alone, and lives as long as AOTAutograd's graphs. ``torch.utils.swap_tensors`` refuses such a tensor.
    """
    context = TracingContext.try_get()
    return {} if context is None else context.tensor_to_context


def compiled_call(
    module: torch.nn.Module, backend: Callable[..., Any] | str, *, mode: str | None = None, fullgraph: bool = False
) -> Callable[..., Any]:
    """Return the module's own call as dynamo runs it with ``backend``, in a mode of torch.compile's where one is given.

    The graphs are isolated from all other compiled code (where torch can do that), so neither earlier captures nor other fused
    models of the same class count against their limit. A module whose forward is torch's own (``nn.Sequential``), or no function
    of Python's (a ``functools.partial``, as accelerate's hooks put in), gets a frame around it: dynamo looks into no frame of
    torch's, and a call of an object has none.

    Dynamo keeps each backend until it is reset. So it gets one that the returned call alone keeps alive: a backend may hold the
    model, and its weights would outlive the last who uses it.
    """
    call = original_call(module)
    if not isinstance(module.forward, MethodType | FunctionType) or torch._dynamo.trace_rules.check(module.forward):
        call = torch._dynamo.external_utils.wrap_inline(call)
    isolated: dict[str, Any] = {"isolate_recompiles": True} if isolates() else {}
    given = backend if isinstance(backend, str) else _weakly(backend)
    compiled: Any = torch.compile(call, backend=given, mode=mode, fullgraph=fullgraph, dynamic=False, **isolated)
    compiled.fusion_advisor_backend = backend
    return cast(Callable[..., Any], compiled)


def _weakly(backend: Callable[..., Any]) -> Callable[..., Any]:
    """Return a backend that calls another one while that one is alive."""
    kept = weakref.WeakMethod(backend) if isinstance(backend, MethodType) else weakref.ref(backend)

    def compile_graph(graph_module: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        found = kept()
        return graph_module.forward if found is None else found(graph_module, example_inputs)

    return compile_graph


@functools.cache
def isolates() -> bool:
    """Whether dynamo can count the graphs of one compiled call apart from all others of the same code: from torch 2.12 on."""
    return "isolate_recompiles" in inspect.signature(torch.compile).parameters


def failed_guard() -> str:
    """Return which of dynamo's guards failed, so that its backend gets a graph anew; call it in the backend.

    Returns:
        Such as ``self.head.weight requires_grad mismatch. expected requires_grad=1``; empty where no graph was there, or where
        the guard may be one of another model of the same class.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._dynamo.utils import guard_failures

    found = guard_failures.get(InstructionTranslator.current_tx().output.root_tx.f_code)
    if not found or not isolates():
        return ""
    text = found[-1].partition(": ")[2].partition("\n")[0].partition("  #")[0].partition(". Guard failed on")[0]
    return _OWN_TABLE.sub(r".\1", text).strip()


_OWN_TABLE = re.compile(r"\._(?:modules|parameters|buffers)\['(\w+)'\]")
"""How a guard reaches a part of a module."""


def forget_graphs(module: torch.nn.Module) -> None:
    """Let dynamo forget what it compiled for a module's class: past its limit of graphs it looks at no call of it any more.

    Args:
        module: the graphs of all modules of its class go; they are compiled anew when they are called.
    """
    around = torch._dynamo.external_utils.wrap_inline.__code__.co_consts
    codes = [getattr(inspect.unwrap(module.forward), "__code__", None), *around]
    for code in codes:
        if isinstance(code, CodeType):
            reset_code(code)


def room_for_graphs() -> contextlib.AbstractContextManager[Any]:
    """Let a call compile a graph anew, however many other models of its class were captured.

    Where dynamo counts them together, a call beyond its limit of 8 marks the class's code: no later capture would see its ops.
    """
    return contextlib.nullcontext() if isolates() else raise_recompile_limit(1024)


@contextlib.contextmanager
def without_source_lines() -> Iterator[None]:
    """Let dynamo trace without noting where in the source each op comes from: a tenth of its time goes into those texts.

    It formats the frames of every op, unless the node has a stack trace when it is made; here all get an empty one.
    """
    with preserve_node_meta():
        set_stack_trace([" "])
        yield


def stopping_traces(call: Callable[..., Any], reason: str) -> Callable[..., Any]:
    """Return a call that dynamo does not look into: a trace ends in front of it, and what it calls is not compiled.

    ``torch.compiler.disable`` switches dynamo off and on around each call, which takes 1 µs. Where it is off already, the call
    goes straight on.

    Args:
        call: what to call.
        reason: said where a trace ends.
    """
    switching = torch.compiler.disable(call, reason=reason)

    def straight(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs) if get_eval_frame_callback() is None else switching(*args, **kwargs)

    skip_code(straight.__code__)  # dynamo would compile this frame
    return functools.update_wrapper(straight, switching)


def leave_new_guards_untried() -> None:
    """Let dynamo take the guards of the graph that its backend has in hand as they are; call it in the backend.

    It would evaluate them at once on the call that they were made for, and then time them with all caches emptied, for a line in
    its log: 256 MB are written for that, 0.08 s. Guards that do not hold for their own call compile the next call again.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    InstructionTranslator.current_tx().output.skip_guards_check = True


def raise_recompile_limit(limit: int) -> contextlib.AbstractContextManager[Any]:
    """Let dynamo keep ``limit`` graphs per code object while the context lasts.

    Each capture is a backend of its own; with dynamo's default of 8, the ninth profile of one process would silently run eager.
    Entering it costs 30 µs: use it around calls that compile, not around every call.
    """
    return torch._dynamo.config.patch(recompile_limit=limit, accumulated_recompile_limit=max(256, limit * 8))


class _Ignored(dict[Any, Any]):
    """Functions, for a value of dynamo's configuration that is asked for its members; written as JSON it is ``{}``.

    Torch 2.11 writes its configuration as JSON after each graph. A set of functions fails there: no metrics of the compilation
    are kept, and forty lines of a traceback go to the terminal.

    Args:
        functions: the members.
    """

    def __init__(self, functions: Iterable[Callable[..., Any]]) -> None:
        super().__init__()
        self._functions = tuple(functions)

    def __contains__(self, one: object) -> bool:
        return one in self._functions

    def __iter__(self) -> Iterator[Any]:
        return iter(self._functions)


def without_repeated_warnings() -> contextlib.AbstractContextManager[Any]:
    """Let dynamo trace past ``logger.warning_once``, which transformers gives to every logger; it would end the graph there.

    GPT-2's loss calls it in every step: without this its loss would be a graph of its own.
    """
    once = getattr(logging.Logger, "warning_once", None)
    return torch._dynamo.config.patch(ignore_logger_methods=_Ignored([] if once is None else [once]))


def recurrent_layers_in_graphs(*, is_on: bool = True) -> contextlib.AbstractContextManager[Any]:
    """Let dynamo take ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` into graphs, each as one op.

    By default it runs the whole function that calls one op by op, with all that stands around the call.

    Args:
        is_on: False keeps the default.
    """
    return torch._dynamo.config.patch(allow_rnn=True) if is_on else contextlib.nullcontext()


def no_collection() -> contextlib.AbstractContextManager[Any]:
    """Let dynamo compile without looking for cycles after each frame: it takes 0.25 s with a model of 28 layers."""
    return torch._dynamo.config.patch(run_gc_after_compile=False)
