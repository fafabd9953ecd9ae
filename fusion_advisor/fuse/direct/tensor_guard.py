"""Compares the dtypes of a module's own tensors, and the shapes of its parameters, with what they were when it was verified.

``model.half()`` gives each parameter other memory and leaves the parameter itself in its place; so does ``weight.data = rows``.
The code of a model may read the dtype (``x.to(self.weight.dtype)``) or the shape, so that the graph is another one. Dynamo of
torch 2.11 asks nothing of a parameter that is still in the same dict; neither does :mod:`fusion_advisor.fuse.direct.unchanged`.
"""

from __future__ import annotations

from typing import Any

import torch

from fusion_advisor.fuse.direct.words import Words, dict_place, words_are_readable
from fusion_advisor.runtime.torch_internals.tensor_memory import layout_places

_Layout = tuple[torch.dtype, torch.Size | None]


class WatchedTensors:
    """A module's parameters and buffers as they were.

    Args:
        model: the module.
        in_words: compare words of memory, where they can be read; False compares in Python.
    """

    def __init__(self, model: torch.nn.Module, *, in_words: bool = True) -> None:
        self._model, self._in_words = model, in_words and words_are_readable()
        self._then: list[tuple[dict[str, Any], dict[str, _Layout]]] = []
        self._tables: Words | None = None
        self._layouts: Words | None = None
        """Of tensors that nothing here holds: they live as long as the tables are the same."""
        self.look_at_parts()

    def look_at_parts(self) -> None:
        """Note the tensors of modules that are new, and forget those of modules that the model has no more."""
        known = {id(table): then for table, then in self._then}
        both = [table for module in self._model.modules() for table in (module._parameters, module._buffers)]
        tables = [table for table in both if isinstance(table, dict) and table]  # a scripted module has no dict
        self._then = [(table, known.get(id(table)) or _layouts_of(table)) for table in tables]
        self._all = [layout for _, then in self._then for layout in then.values()]
        self._tables = self._layouts = None

    def change(self) -> str | None:
        """Name a tensor that is in another layout than it was, or None: 340 take 2 µs, in Python 100."""
        if self._tables is not None and self._layouts is not None and self._tables.are_same() and self._layouts.are_same():
            return None
        self._read()
        if [_layout(one) for table, _ in self._then for one in table.values() if one is not None] == self._all:
            return None
        for table, then in self._then:
            for name, layout in _layouts_of(table).items():
                if layout != then.get(name, layout):
                    self._tables = None
                    return f"`{name}` is {_shown(layout)}, and was {_shown(then[name])} when the model was verified"
        return None

    def _read(self) -> None:
        """Read the words ahead of the checks: what another thread changes meanwhile is found by the next call."""
        if self._in_words:
            tables = [table for table, _ in self._then]
            self._tables = Words(map(dict_place, tables), tables)
            places = [layout_places(one) for table in tables for one in table.values() if one is not None]
            self._layouts = Words((place for found in places for place in found), ()) if all(places) else None


def _layouts_of(table: dict[str, Any]) -> dict[str, _Layout]:
    return {name: _layout(tensor) for name, tensor in table.items() if tensor is not None}


def _layout(tensor: torch.Tensor) -> _Layout:
    """Return what is compared: a buffer may grow from call to call without anything that reads it."""
    return tensor.dtype, tensor.shape if isinstance(tensor, torch.nn.Parameter) else None


def _shown(layout: _Layout) -> str:
    dtype, shape = layout
    return str(dtype).removeprefix("torch.") + ("" if shape is None else f"{list(shape)}")
