"""Compares before each call what dynamo does not guard of a captured module: hooks, submodules, dropouts, code, layouts."""

from __future__ import annotations

from collections.abc import Iterable
from types import CodeType
from typing import Any

import torch

from fusion_advisor.errors import AutocastAround, ModelInTraining
from fusion_advisor.fuse.direct import words
from fusion_advisor.fuse.direct.code_guard import WatchedCode
from fusion_advisor.fuse.direct.tensor_guard import WatchedTensors
from fusion_advisor.fuse.direct.words import Words
from fusion_advisor.runtime.output_hooks import collectors_of, is_collecting
from fusion_advisor.runtime.torch_internals import dispatcher, module_call

TRAINING = "the model is in train() mode"
_HOOK = "a hook was added or removed after the model was verified"


class ModuleGuard:
    """A module as it was when its graphs were verified.

    Args:
        model: the module.
        is_trained: whether what was verified is a training step, in which dropouts drop.
    """

    def __init__(self, model: torch.nn.Module, *, is_trained: bool = False) -> None:
        self._model, self._is_trained = model, is_trained
        self._hooks = [(table, dict(table)) for table in self._hook_tables() if table]
        self._code: set[CodeType] = set()
        self._watched: list[WatchedCode] = []
        self._words: Words | None = None
        """Hold what they held when every check last came out as unchanged."""
        self._may_read = True
        self._tensors = WatchedTensors(model)
        self._collectors: list[Any] = []
        """Say whether hooks of transformers, which came after the verification, do anything."""
        self._look_at_parts()

    def _look_at_parts(self) -> None:
        """Note which modules the model is made of, and where their hooks would be registered."""
        parts = [module._modules for module in self._model.modules()]
        self._parts, self._no_parts = [part for part in parts if part], [part for part in parts if not part]
        self._parts_then: list[dict[str, torch.nn.Module | None]] = [dict(parts) for parts in self._parts]
        self._live_dropouts = [] if self._is_trained else _dropouts(self._model)
        known = {id(table) for table, _ in self._hooks}
        self._no_hooks = [table for table in self._hook_tables() if id(table) not in known]

    def _hook_tables(self) -> list[dict[int, Any]]:
        return module_call.hook_tables(self._model, of_backward=self._is_trained)

    def watch(self, code: Iterable[CodeType]) -> None:
        """Compare further code from now on: what dynamo looked through for the verified graphs."""
        new = set(code) - self._code
        if new or not self._watched:
            self._code |= new
            self._watched.append(WatchedCode(self._model, new))
            self._words = None

    def include(self, other: ModuleGuard) -> None:
        """Compare the code too that another guard of this module compares."""
        self._watched += other._watched
        self._words = None

    def change(self) -> str | None:
        """Name what changed since the graphs were verified, or None."""
        return self._change_of_parts() or self._tensors.change()

    def _change_of_parts(self) -> str | None:
        if self._words is not None:
            if self._words.are_same():
                return _HOOK if self._collectors and is_collecting(self._collectors) else None
            self._words.read()
        elif self._may_read:
            self._words = self._all_words()
            self._may_read = self._words is not None
        # The words were read ahead of the checks, so that what another thread changes meanwhile is found by the next call.
        change = self.change_in_python()
        if change is not None:
            self._words = None
        return change

    def _all_words(self) -> Words | None:
        """Return words that stay as they are while every check comes out as it did; None where Python must check."""
        tables: list[dict[Any, Any]] = [*self._parts, *self._no_parts, *(table for table, _ in self._hooks), *self._no_hooks]
        functions = (one for watched in self._watched for one in watched.functions)
        classes = (one for watched in self._watched for one in watched.classes)
        return words.watched(tables, functions, classes, self._live_dropouts)

    def change_in_python(self) -> str | None:
        """Name what changed, or None, without the words."""
        # Dynamo compares neither: a module in another's place may have hooks of its own, a class other methods.
        # Qwen2.5-7B's 371 modules of 11 classes take 7 µs.
        if any(self._no_parts) or self._parts != self._parts_then:
            self._look_at_parts()
            self._tensors.look_at_parts()
            tables = set(map(id, self._hook_tables()))
            self._words = None  # they are of the parts that were there
            if any(id(table) not in tables for table, _ in self._hooks):
                self._parts_then = []  # looked at again by every call
                return _HOOK
        for watched in self._watched:
            replaced = watched.change()
            if replaced is not None:
                return f"the code of `{replaced}` was replaced after the model was verified"
        if any(module.training for module in self._live_dropouts):
            return TRAINING
        # `any` over 740 empty tables takes 5 µs; asking each module would take 100.
        self._collectors = []
        others = [hook for table in self._no_hooks for hook in table.values()] if any(self._no_hooks) else []
        for table, then in self._hooks:
            if table != then:
                others += _in_one_alone(table, then)
        if others:
            collectors = collectors_of(others)
            if collectors is None or is_collecting(collectors):
                return _HOOK
            self._collectors = collectors
        return None


def _in_one_alone(table: dict[int, Any], then: dict[int, Any]) -> list[Any]:
    """Return the hooks that came or went; all of them where the others have another order."""
    stayed = [key for key, hook in table.items() if then.get(key) is hook]
    if stayed != [key for key, hook in then.items() if table.get(key) is hook]:
        return [*table.values(), *then.values()]
    return [hook for one in (table, then) for key, hook in one.items() if key not in stayed]


def refuse_in_vain(model: torch.nn.Module, model_id: str) -> None:
    """Refuse to fuse a model for inference where each of its calls would run the original ops.

    Args:
        model: as it is called.
        model_id: for the error's message.

    Raises:
        ModelInTraining: the model, or a dropout in it, is in train() mode.
        AutocastAround: autocast is on.
    """
    if model.training or any(module.training for module in _dropouts(model)):
        has_own = "eval" in vars(model)  # of torch.export: it raises
        switch = "set model.training = False (an exported module has no eval())" if has_own else "call model.eval()"
        raise ModelInTraining(model_id=model_id, switch=switch)
    if dispatcher.is_autocast_on():
        raise AutocastAround(model_id=model_id)


def _dropouts(model: torch.nn.Module) -> list[torch.nn.Dropout]:
    return [module for module in model.modules() if isinstance(module, torch.nn.Dropout) and module.p > 0]
