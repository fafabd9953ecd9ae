"""The code that dynamo made for a function, with its guards as a tree: read, cut down to a part, and checked."""

from __future__ import annotations

import dataclasses
import dis
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, TypeAlias

import torch
from torch._C._dynamo import guards as dynamo_guards
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo import bytecode_transformation

Instruction: TypeAlias = bytecode_transformation.Instruction
"""One operation of Python's code: its name, argument and place."""
_GRAPH = "__compiled_fn"
_RESUME = "__resume_at"


@dataclass(frozen=True, slots=True)
class CompiledCode:
    """What dynamo runs for one function while its guards hold.

    Attributes:
        code: it runs in place of the function's own.
        root: of the tree of guards.
        graph: the only graph that it calls, as the backend returned it.
        guards: dynamo's wrapper around the tree.
    """

    code: CodeType
    root: Any
    graph: Any
    guards: Any

    def is_alive(self) -> bool:
        """Whether dynamo still has it: not after ``reset``, nor once an object that is guarded by its identity was freed."""
        return self.guards.cache_entry is not None

    def only(self, is_kept: Callable[[Any], bool]) -> Callable[[dict[str, Any]], bool]:
        """Return a check of a part of the guards.

        Args:
            is_kept: whether a node stays; where it does not, nothing below it does.

        Returns:
            The check, of a frame's variables by name.
        """
        check: Callable[[dict[str, Any]], bool] = self.root.clone_manager(is_kept).check
        return check


def compiled_codes(function: FunctionType) -> Iterator[CompiledCode]:
    """Yield what dynamo compiled for all functions with a function's code, where it is one graph for the whole function."""
    for entry in _debug_get_cache_entry_list(function.__code__):
        code: Any = entry.code
        if code is None:  # a class that it guards was freed; torch's stub does not say so
            continue
        graphs = [name for name in code.co_names if name.startswith(_GRAPH)]
        if len(graphs) != 1 or _goes_on_elsewhere(code):
            continue
        called = function.__globals__.get(graphs[0])
        yield CompiledCode(code, entry.guard_manager.root, innermost(called), entry.guard_manager)


def _goes_on_elsewhere(code: CodeType) -> bool:
    """Whether code calls what dynamo made of the rest of the function: by a global name; as a constant where it has a closure."""
    return any(name.startswith(_RESUME) for name in code.co_names) or any(type(one) is CodeType for one in code.co_consts)


def rewritten(code: CodeType, change: Callable[[list[Instruction]], bool]) -> CodeType | None:
    """Return code with other instructions.

    Args:
        code: stays as it is.
        change: edits its instructions in place; what it leaves undone where it returns False is thrown away.
    """
    is_changed: list[bool] = []

    def edit(instructions: list[Instruction], _options: dict[str, Any]) -> None:
        is_changed.append(change(instructions))

    made, _ = bytecode_transformation.transform_code_object(code, edit)
    return made if all(is_changed) else None


def like(instruction: Instruction, name: str, value: Any = None) -> Instruction:
    """Return another instruction for the same line of source.

    Args:
        instruction: whose line it has.
        name: of the operation.
        value: the constant or the attribute's name, if it has one.
    """
    return dataclasses.replace(
        instruction, opcode=dis.opmap[name], opname=name, arg=0 if name == "LOAD_ATTR" else None, argval=value,
        is_jump_target=False, target=None,
    )  # fmt: skip


def names_of_dynamos_functions(space: Mapping[str, Any]) -> frozenset[str]:
    """Return the global names under which code reaches ``torch._dynamo.utils``."""
    return frozenset(name for name, value in space.items() if value is torch._dynamo.utils)


def innermost(call: Any) -> Any:
    """Return what dynamo's own wrappers stand around."""
    while hasattr(call, "_torchdynamo_orig_callable"):
        call = call._torchdynamo_orig_callable
    return call


def dict_versions(tables: Sequence[dict[Any, Any]]) -> list[int]:
    """Return a number for each dict that no dict had before: it is another one as soon as an item is set or taken away."""
    return list(map(dynamo_guards.dict_version, tables))


def same_tensors(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Return dynamo's own check of tensors, of all at once: class, keys of dispatch, dtype, device, sizes, strides, gradient.

    Args:
        tensors: as many as are checked later.

    Returns:
        The check, of as many tensors. It is false where two of them are one. A tensor takes 0.3 µs.
    """
    guards: Any = dynamo_guards.TensorGuards  # its stub knows one tensor only
    sizes, strides = [list(one.shape) for one in tensors], [list(one.stride()) for one in tensors]
    check: Callable[..., bool] = guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return check


def trusts_tensors_in_dicts() -> bool:
    """Whether dynamo asks nothing of a tensor that is still in the same unchanged dict."""
    return bool(torch._dynamo.config.skip_tensor_guards_with_matching_dict_tags)


def is_stance_default() -> bool:
    """Whether nobody told dynamo to run eager for a while (``torch.compiler.set_stance``), and nothing is being traced."""
    return torch._dynamo.eval_frame._stance.stance == "default" and torch._C._get_tracing_state() is None


def global_state() -> dict[str, Any]:
    """Return what dynamo guards of torch's global state, but for the gradient mode and the number of threads."""
    state: Any = dynamo_guards.GlobalStateGuard()
    found: dict[str, Any] = json.loads(state.__getstate__())
    return {name: value for name, value in found.items() if name not in ("grad_mode", "num_threads")}


def global_state_check() -> Callable[[], bool]:
    """Return a check that torch's global state, the gradient mode included, is as it is now."""
    check: Callable[[], bool] = dynamo_guards.GlobalStateGuard().check
    return check


def has_plain_call(module: torch.nn.Module) -> bool:
    """Whether calling a module does nothing but run its forward: no hook of any kind, and torch's own way to call it."""
    from torch.nn.modules import module as implementation

    return (
        type(module)._call_impl is torch.nn.Module._call_impl
        and not implementation._has_any_global_hook()
        and not (module._backward_hooks or module._backward_pre_hooks or module._forward_hooks or module._forward_pre_hooks)
    )
