"""Compares the dtypes of a module's own tensors with what they were when its graphs were verified.

``model.half()`` gives each parameter other memory and leaves the parameter itself in its place. The code of a model may read the
dtype (``x.to(self.weight.dtype)``), so that the graph is another one. Dynamo of torch 2.11 asks nothing of a parameter that is
still in the same dict, and neither does :mod:`fusion_advisor.fuse.direct.unchanged`.
"""

from __future__ import annotations

from typing import Any

import torch

from fusion_advisor.fuse.direct.words import Words, dict_place, words_are_readable
from fusion_advisor.runtime.torch_internals.tensor_memory import dtype_place

_Dtypes = dict[str, torch.dtype]


class WatchedDtypes:
    """The dtypes of a module's parameters and buffers as they were.

    Args:
        model: the module.
        in_words: compare words of memory, where they can be read; False compares in Python.
    """

    def __init__(self, model: torch.nn.Module, *, in_words: bool = True) -> None:
        self._model, self._in_words = model, in_words and words_are_readable()
        self._then: list[tuple[dict[str, Any], _Dtypes]] = []
        self._tables: Words | None = None
        self._dtypes: Words | None = None
        """Of tensors that nothing here holds: they live as long as the tables are the same."""
        self.look_at_parts()

    def look_at_parts(self) -> None:
        """Note the tensors of modules that are new, and forget those of modules that the model has no more."""
        known = {id(table): then for table, then in self._then}
        both = [table for module in self._model.modules() for table in (module._parameters, module._buffers)]
        tables = [table for table in both if isinstance(table, dict) and table]  # a scripted module has no dict
        self._then = [(table, known.get(id(table)) or _dtypes_of(table)) for table in tables]
        self._all = [dtype for _, then in self._then for dtype in then.values()]
        self._tables = self._dtypes = None

    def change(self) -> str | None:
        """Name a tensor that has another dtype than it had, or None: 340 take 2 µs, in Python 50."""
        if self._tables is not None and self._dtypes is not None and self._tables.are_same() and self._dtypes.are_same():
            return None
        self._read()
        if [one.dtype for table, _ in self._then for one in table.values() if one is not None] == self._all:
            return None
        for table, then in self._then:
            for name, tensor in table.items():
                if tensor is not None and tensor.dtype is not then.get(name, tensor.dtype):
                    self._tables = None
                    return f"`{name}` is in {_name(tensor.dtype)}, and was in {_name(then[name])} when the model was verified"
        return None

    def _read(self) -> None:
        """Read the words ahead of the checks: what another thread changes meanwhile is found by the next call."""
        if self._in_words:
            tables = [table for table, _ in self._then]
            self._tables = Words(map(dict_place, tables), tables)
            places = [dtype_place(one) for table in tables for one in table.values() if one is not None]
            self._dtypes = None if None in places else Words((place for place in places if place is not None), ())


def _dtypes_of(table: dict[str, Any]) -> _Dtypes:
    return {name: tensor.dtype for name, tensor in table.items() if tensor is not None}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
