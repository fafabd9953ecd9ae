"""``nn.Module``: the slot of a module's compiled call, and the tables of its hooks."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch


def original_call(module: torch.nn.Module) -> Callable[..., Any]:
    """Return the call that runs the module's own forward with its hooks, whatever ``set_compiled_call`` has set."""
    return module._call_impl


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


def show_compiled_call(module: torch.nn.Module) -> None:
    """Let dynamo see that a module has a compiled call, where it traces somebody else's function that calls the module.

    It takes a short way to ``forward`` while the module's ``__call__`` is torch's own, and then asks for no compiled call. With
    a method of the instance it traces the call as Python makes it, which never asks the instance for ``__call__``. A copy of the
    module has a method of its own, and a pickle torch's.
    """
    if "__call__" not in module.__dict__:
        module.__dict__["__call__"] = MethodType(_called, module)


def hide_compiled_call(module: torch.nn.Module) -> None:
    """Undo :func:`show_compiled_call`."""
    if getattr(module.__dict__.get("__call__"), "__func__", None) is _called:
        del module.__dict__["__call__"]


def call_slots(module: torch.nn.Module) -> dict[str, Any]:
    """Return what :func:`set_compiled_call` and :func:`show_compiled_call` have put into a module, by attribute."""
    return {name: module.__dict__[name] for name in _SLOTS if name in module.__dict__}


def fill_call_slots(module: torch.nn.Module, slots: dict[str, Any]) -> None:
    """Put into a module what :func:`call_slots` returned, and nothing else into these places."""
    for name in _SLOTS:
        module.__dict__.pop(name, None)
    module.__dict__.update(slots)


_SLOTS = ("_compiled_call_impl", "__call__")


def _called(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(self).__call__(self, *args, **kwargs)


_called.__name__ = "__call__"  # by which pickle finds a method again


def hook_tables(module: torch.nn.Module, *, of_backward: bool = False) -> list[dict[int, Any]]:
    """Return the tables that hooks on modules are registered in: of every module inside, and torch's global ones.

    Dynamo does not guard them (``skip_nnmodule_hook_guards``), so a hook that is added after a capture would not run.

    Args:
        module: with its parts.
        of_backward: hooks on the backward pass too, which only a call with gradients runs.
    """
    from torch.nn.modules import module as implementation

    tables = [implementation._global_forward_hooks, implementation._global_forward_pre_hooks]
    if of_backward:
        tables += [implementation._global_backward_hooks, implementation._global_backward_pre_hooks]
    for part in module.modules():
        tables += [part._forward_hooks, part._forward_pre_hooks]
        if of_backward:
            tables += [part._backward_hooks, part._backward_pre_hooks]
    return tables
