"""Describes Python values in plain data that mean the same in another process: constants, classes, functions by their code.

Nothing is made from a description. It is compared with the description of what the other process has.
"""

from __future__ import annotations

import enum
import functools
import hashlib
from types import (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    CodeType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import torch

_C_CALLABLES = (
    BuiltinFunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType, ClassMethodDescriptorType,
)  # fmt: skip
_TORCH_VALUES = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_DEEPEST = 6


class CannotDescribe(Exception):
    """A value means something in its own process alone; the message says which."""


def described(value: Any, depth: int = 0) -> Any:
    """Describe a value; equal descriptions are equal values, as far as a trace can tell.

    Args:
        value: a constant, a container of constants, a class, a function, a module.
        depth: of containers around it.

    Raises:
        CannotDescribe: it is another object, or lies too deep.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, enum.Enum):
        return {"enum": name_of(type(value)), "member": value.name}
    if type(value) is float:
        return {"float": value.hex()}
    if type(value) in (complex, bytes, slice, range, type(...)):
        return {type(value).__name__: repr(value)}
    if isinstance(value, _TORCH_VALUES):
        return {"torch": str(value)}
    if isinstance(value, torch.Tensor):
        return {"tensor": layout(value)}
    if depth > _DEEPEST:
        raise CannotDescribe("a container of containers")
    if type(value) in (tuple, list, torch.Size):
        return {type(value).__name__: [described(item, depth + 1) for item in value]}
    if type(value) in (set, frozenset):
        return {type(value).__name__: sorted(repr(described(item, depth + 1)) for item in value)}
    if type(value) is dict:
        return {"dict": [[described(key, depth + 1), described(item, depth + 1)] for key, item in value.items()]}
    return _named(value)


def _named(value: Any) -> Any:
    """Describe what has a name.

    Raises:
        CannotDescribe: it has none.
    """
    if isinstance(value, type):
        return {"class": name_of(value)}
    if isinstance(value, ModuleType):
        return {"module": value.__name__}
    if isinstance(value, FunctionType):
        return {"function": f"{value.__module__}.{value.__qualname__}", "code": code_digest(value.__code__)}
    if isinstance(value, MethodType):
        return {"method": described(value.__func__), "of": name_of(type(value.__self__))}
    if isinstance(value, CodeType):
        return {"code": code_digest(value)}
    if isinstance(value, _C_CALLABLES):
        return {"built in": f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', repr(value))}"}
    if isinstance(value, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return {"op": str(value)}
    raise CannotDescribe(f"a {name_of(type(value))}")


def name_of(kind: type) -> str:
    """Return a class's full name."""
    return f"{kind.__module__}.{kind.__qualname__}"


def layout(value: torch.Tensor, open_at: Any = "") -> list[Any]:
    """Return what a trace knows of a tensor, without its device's number.

    Args:
        value: the tensor.
        open_at: dims whose sizes, and dims whose strides, the trace left open: their numbers are left out. Empty: none is.
    """
    if value.layout != torch.strided:
        raise CannotDescribe(f"a tensor of layout {value.layout}")
    kind = "parameter" if isinstance(value, torch.nn.Parameter) else name_of(type(value))
    shape, stride = (
        [None if dim in hidden else number for dim, number in enumerate(numbers)]
        for numbers, hidden in zip((value.shape, value.stride()), open_at or ((), ()), strict=True)
    )
    return [kind, str(value.dtype), value.device.type, shape, stride, value.requires_grad]


@functools.lru_cache(maxsize=4096)
def code_digest(code: CodeType) -> str:
    """Return a digest of what code does: neither of where it stands, nor of its comments; of one version of Python."""
    digest = hashlib.sha256()
    _put_code(code, digest.update)
    return digest.hexdigest()[:24]


def _put_code(code: CodeType, put: Any) -> None:
    named = (
        code.co_name, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_flags, code.co_argcount,
        code.co_posonlyargcount, code.co_kwonlyargcount, code.co_code, code.co_exceptiontable,
    )  # fmt: skip
    put(repr(named).encode())
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _put_code(constant, put)
        elif isinstance(constant, frozenset):  # its order is another in each process
            put(repr(sorted(map(repr, constant))).encode())
        else:
            put(f"{type(constant).__name__} {constant!r}".encode())
