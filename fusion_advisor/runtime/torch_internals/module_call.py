"""``nn.Module``: the slot of a module's compiled call, and the tables of its hooks."""

from __future__ import annotations

from collections.abc import Callable
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
