"""The dispatcher: modes, tensor classes and hooks that see ops and what they save, and how ops are dispatched in a trace."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree
from torch.utils import checkpoint
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

from fusion_advisor.runtime.torch_internals.fake_mode import is_plain_fake


def is_mode_active() -> bool:
    """Whether a mode of the caller's sees every op: a ``TorchFunctionMode`` or a ``TorchDispatchMode``.

    ``torch.device`` and ``set_default_device`` are function modes too. They change nothing but where new tensors go, and dynamo
    guards them.
    """
    if torch._C._len_torch_dispatch_stack() > 0:
        return True
    count = torch._C._len_torch_function_stack()
    return count > 0 and any(type(torch._C._get_function_stack_at(place)) is not DeviceContext for place in range(count))


def is_function_mode_on() -> bool:
    """Whether any ``TorchFunctionMode`` is active, ``torch.device`` among them."""
    return torch._C._len_torch_function_stack() > 0


def is_transformed() -> bool:
    """Whether ops are under a transform of ``torch.func`` (vmap, grad, jvp) or carry forward-mode derivatives.

    Tensors then stand for batches or have tangents, of which a kernel knows nothing. A frame that dynamo meets there for the
    first time is never compiled again.
    """
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands for a batch under a vmap: that of ``torch.func``, or autograd's own (``is_grads_batched``).

    The latter leaves no mark but its tensors.
    """
    of = torch._C._functorch
    return bool(of.is_batchedtensor(tensor) or of.is_legacy_batchedtensor(tensor))


def is_autocast_on() -> bool:
    """Whether autocast is on for CUDA or for the CPU; asking for each takes longer than asking for any."""
    return torch._C._is_any_autocast_enabled() and (torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"))


def sees_its_ops(kind: type[torch.Tensor]) -> bool:
    """Whether a class of tensors handles the ops on it by itself (``__torch_function__`` or ``__torch_dispatch__``)."""
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return False
    return kind.__torch_function__ is not _NO_FUNCTION or getattr(kind, "__torch_dispatch__", _NO_DISPATCH) is not _NO_DISPATCH


_NO_FUNCTION = torch._C._disabled_torch_function_impl
_NO_DISPATCH = torch.Tensor.__torch_dispatch__


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


def saves_through_hooks() -> bool:
    """Whether ``saved_tensors_hooks`` are active in this thread: what is kept for a backward pass then is what they return."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


@contextlib.contextmanager
def without_saved_hooks() -> Iterator[None]:
    """Take the ``saved_tensors_hooks`` of this thread away while the context lasts.

    A checkpoint counts what is saved inside of it, and what else runs there is none of it.
    """
    taken = []
    while saves_through_hooks():
        taken.append(torch._C._autograd._top_saved_tensors_default_hooks(True))
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(taken):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


@contextlib.contextmanager
def whole_second_pass() -> Iterator[None]:
    """Let the second forward pass of a checkpoint go on until the context ends.

    The checkpoint ends it by an error from the hook that is given the last tensor that it needs.
    """
    if not saves_through_hooks():
        yield
        return
    pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(True)
    ends: list[Exception] = []

    def late(tensor: torch.Tensor) -> Any:
        if not ends:
            try:
                return pack(tensor)
            except checkpoint._StopRecomputationError as end:
                ends.append(end)
        return None

    torch._C._autograd._push_saved_tensors_default_hooks(late, unpack)
    try:
        yield
    finally:
        torch._C._autograd._pop_saved_tensors_default_hooks()
    if ends:
        raise ends.pop()


def call_hooks_with_tensors_alone(nodes: Iterable[Any]) -> None:
    """Let hooks on gradients of leaves be called where there is a gradient, as they are where eager leads nothing to a leaf.

    Autograd calls them with None too, where a node with several inputs returns None for one. Torch's own hooks (that of
    ``register_multi_grad_hook``) count such calls.

    Args:
        nodes: of autograd's; those that add a gradient to a leaf count.
    """
    for node in nodes:
        hooks: dict[int, Any] = getattr(getattr(node, "variable", None), "_backward_hooks", None) or {}
        for key, hook in list(hooks.items()):
            if not isinstance(hook, _WithTensor) and not str(getattr(hook, "__module__", "")).startswith("torch."):
                hooks[key] = _WithTensor(hook)


@contextlib.contextmanager
def hooks_on_leaves_paused(leaves: Iterable[torch.Tensor]) -> Iterator[None]:
    """Call no hook on the gradients of leaves while the context lasts: such a hook may step an optimizer.

    Args:
        leaves: parameters, say.
    """
    tables = [table for one in leaves for table in (one._backward_hooks, one._post_accumulate_grad_hooks) if table]
    kept = [dict(table) for table in tables]
    for table in tables:
        table.clear()  # autograd holds the very table
    try:
        yield
    finally:
        for table, hooks in zip(tables, kept, strict=True):
            table.update(hooks)


class _WithTensor:
    """Calls a hook with a gradient that is there.

    Args:
        hook: somebody's.
    """

    def __init__(self, hook: Callable[[torch.Tensor], Any]) -> None:
        self._hook = hook

    def __call__(self, gradient: torch.Tensor | None) -> Any:
        return None if gradient is None else self._hook(gradient)


class _Uncompiled(TorchDispatchMode):
    """A mode under which nothing is compiled.

    Under a mode dynamo compiles no function that is called, and never looks at its code again. Flex attention, which compiles a
    function of its own in eager, raises from then on.
    """

    def __enter__(self) -> Self:
        """Begin."""
        self._stance = contextlib.ExitStack()
        self._stance.enter_context(torch.compiler.set_stance("force_eager"))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """End."""
        super().__exit__(*error)
        self._stance.close()


class OpLog(_Uncompiled):
    """Notes each op that reaches a backend, and its result."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.seen.append((str(func), result))
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """A call of an op that may draw random numbers.

    Attributes:
        op: the op.
        dtypes: of the tensors that it was given, and those that it was given by name, in their order.
        has_drawn: whether a generator moved: attention with a dropout of 0 draws nothing.
    """

    op: Any
    dtypes: tuple[torch.dtype, ...]
    has_drawn: bool


class DrawLog(_Uncompiled):
    """Notes the calls of random ops, so that a copy in another dtype can draw the same numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Draw] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        named = kwargs or {}
        if not _is_random(func):
            return func(*args, **named)
        leaves = pytree.arg_tree_leaves(*args, **named)
        generators = [one for one in leaves if isinstance(one, torch.Generator)]
        before = _random_states(generators)
        typed = [one for one in leaves if isinstance(one, torch.Tensor | torch.dtype)]
        dtypes = tuple(one.dtype if isinstance(one, torch.Tensor) else one for one in typed)
        result = func(*args, **named)
        has_drawn = not all(map(torch.equal, before, _random_states(generators)))
        self.seen.append(Draw(op=func, dtypes=dtypes, has_drawn=has_drawn))
        return result


class DrawsAgain(_Uncompiled):
    """Lets a wider copy of a model draw the numbers that the model draws: those of another dtype are others.

    A random op is given tensors of the model's dtypes, and its results are widened.
    """

    def __init__(self, wide: torch.dtype, drawn: Sequence[Draw] = ()) -> None:
        """Take the dtype of the copy, float32 or float64, and the draws of a call of the model."""
        super().__init__()
        self._wide = wide
        self._narrow = {torch.float16, torch.bfloat16, *({torch.float32} if wide == torch.float64 else ())}
        self._left = deque(drawn)
        self._is_noted = bool(drawn)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        named = kwargs or {}
        if self._is_noted and _is_random(func):
            draw = self._left.popleft() if self._left else None
            if draw is None or draw.op is not func:
                raise RuntimeError(f"the wider copy calls {func} where the model calls {draw.op if draw else 'no random op'}")
            if draw.has_drawn:
                return self._draw_again(draw, args, named)
        return self._run(func, args, named)

    def _run(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return func(*args, **named)

    def _draw_again(self, draw: Draw, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        dtypes = iter(draw.dtypes)
        narrowed: dict[int, torch.Tensor] = {}

        def narrow(one: Any) -> Any:
            if isinstance(one, torch.Tensor):
                return narrowed.setdefault(id(one), one.to(next(dtypes)))
            return next(dtypes)

        fewer, fewer_named = pytree.tree_map_only((torch.Tensor, torch.dtype), narrow, (args, named))
        result = draw.op(*fewer, **fewer_named)
        if draw.op is torch.ops.aten.native_dropout.default:  # what it keeps is as exact as it was
            value, p, mask = args[0], float(args[1]), result[1]
            return value * mask * (0.0 if p == 1 else 1 / (1 - p)), mask
        arguments = draw.op._schema.arguments
        given = [*zip((one.name for one in arguments), args, strict=False), *named.items()]
        written = {one.name for one in arguments if one.alias_info is not None and one.alias_info.is_write}
        own = {}
        for _, value in (pair for pair in given if pair[0] in written):
            own[id(narrowed[id(value)])] = value.copy_(narrowed[id(value)])
        return pytree.tree_map_only(torch.Tensor, lambda one: own[id(one)] if id(one) in own else self._widened(one), result)

    def _widened(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._wide) if tensor.dtype in self._narrow else tensor


class StaysWide(DrawsAgain):
    """Runs a copy of a model in a wider dtype than its code names: casts of floats to a narrower one give the wide one.

    So do autocast's casts, and tensors that are made in a narrower dtype. Without it a weight in fp64 meets an activation in
    fp32, which no matrix multiplication takes, or a result is no more precise than eager's.
    """

    def _run(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        is_of_tensors = any(isinstance(one, torch.Tensor) for one in pytree.arg_tree_leaves(*args, **named))
        if is_of_tensors and named.get("dtype") in self._narrow:
            named = {**named, "dtype": self._wide}
        result = func(*args, **named)
        if not is_of_tensors and isinstance(result, torch.Tensor):
            return self._widened(result)  # made as eager makes it: random numbers are others in another dtype
        return result


def _is_random(op: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())


def _random_states(generators: Sequence[torch.Generator]) -> list[torch.Tensor]:
    """Return the states of some generators, and of torch's own on each device in use."""
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *devices, *(one.get_state() for one in generators)]


def forget_ops(library: torch.library.Library) -> None:
    """Unregister the ops that a library defines, so that another one can take its namespace.

    A library does so by itself when it is collected; graphs that call its ops keep it for as long as they live.

    Args:
        library: made with kind ``DEF``.
    """
    library._destroy()
