"""The step with liger-kernel's patches, on an instance of its own.

Liger patches the instance that it is given, and with it names of the model's Python module (``apply_rotary_pos_emb``, norm
classes) and of torch. So it gets a copy of the model that shares all weights, and what it changed outside that copy is put back
at once and is in place only while the copy runs.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from fusion_advisor.workload.load import LoadedWorkload

_LEFT_OUT = ("rope",)
"""A run over sequence lengths with it in ended in an illegal memory access (liger-kernel 0.8.5, H200), which would end ours."""
_ABSENT = object()


class NotAvailable(Exception):
    """A way to run the step that this machine or this model has none of; the text says why."""


@dataclass(frozen=True, slots=True)
class _Change:
    """One name of a module or a class that was patched."""

    owner: Any
    name: str
    before: Any
    after: Any


def with_liger(loaded: LoadedWorkload) -> Callable[[], Any]:
    """Return a call of the step with Liger's kernels.

    Args:
        loaded: the model, left as it is, and its inputs.

    Raises:
        NotAvailable: liger-kernel is not installed, or has nothing for this model.
    """
    call = liger_model(loaded.model)
    return lambda: call(*loaded.args, **loaded.kwargs)


def liger_model(model: torch.nn.Module) -> Callable[..., Any]:
    """Return a model's call with Liger's kernels; gradients reach the model's own parameters.

    Args:
        model: left as it is.

    Raises:
        NotAvailable: liger-kernel is not installed, or has nothing for this model.
    """
    try:
        transformers = importlib.import_module("liger_kernel.transformers")
    except ImportError as error:
        raise NotAvailable("liger-kernel is not installed: pip install liger-kernel") from error
    kind = str(getattr(getattr(model, "config", None), "model_type", "")) or type(model).__name__
    patch = getattr(transformers, f"apply_liger_kernel_to_{kind}", None)
    if patch is None:
        raise NotAvailable(f"Liger has no kernels for {kind}")
    # deepcopy takes what its memo holds for copied: weights and buffers stay the model's own.
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    twin = copy.deepcopy(model, shared)
    off = {name: False for name in _LEFT_OUT if name in inspect.signature(patch).parameters}
    changes = _changes_of(lambda: patch(model=twin, **off), _owners(model))

    def call(*args: Any, **kwargs: Any) -> Any:
        with _in_place(changes):
            return twin(*args, **kwargs)

    return call


def _owners(model: torch.nn.Module) -> list[Any]:
    """The modules that a model's classes come from, those classes, and torch's functional ones: what a patch may rename."""
    names = sorted({type(part).__module__ for part in model.modules()})
    modules = [sys.modules[name] for name in names if name in sys.modules and not name.startswith("torch.")]
    classes = [
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__
    ]
    return [*modules, *classes, torch.nn.functional]


def _changes_of(patch: Callable[[], object], owners: Sequence[Any]) -> tuple[_Change, ...]:
    """Run a patch, find what it changed and put that back."""
    before = [dict(vars(owner)) for owner in owners]
    try:
        patch()
    finally:
        changes = tuple(
            _Change(owner, name, earlier.get(name, _ABSENT), vars(owner).get(name, _ABSENT))
            for owner, earlier in zip(owners, before, strict=True)
            for name in {**earlier, **vars(owner)}
            if earlier.get(name, _ABSENT) is not vars(owner).get(name, _ABSENT)
        )
        _set(changes, is_after=False)
    return changes


@contextmanager
def _in_place(changes: Sequence[_Change]) -> Iterator[None]:
    _set(changes, is_after=True)
    try:
        yield
    finally:
        _set(changes, is_after=False)


def _set(changes: Sequence[_Change], *, is_after: bool) -> None:
    for change in changes:
        value = change.after if is_after else change.before
        if value is _ABSENT:
            delattr(change.owner, change.name)
        else:
            setattr(change.owner, change.name, value)
