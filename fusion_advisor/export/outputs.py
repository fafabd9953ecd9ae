"""What a call returns, as an expression of the values that its graph returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from fusion_advisor.errors import CannotExport


class OutputPrinter:
    """Prints the output of a call.

    Attributes:
        imports: statements that the expression needs.
    """

    def __init__(self, values: Sequence[tuple[Node, Any]], result: Callable[[Node], str], inputs: dict[int, str]) -> None:
        """Note where the tensors come from.

        Args:
            values: of the graph's results.
            result: returns the name of a result.
            inputs: names of the call's own tensors and objects by ``id``, for outputs that are inputs.
        """
        self.imports: set[str] = set()
        self._known = inputs | {id(value): result(node) for node, value in values if isinstance(value, torch.Tensor)}

    def expression(self, value: Any) -> str:
        """Return the expression of an output.

        Args:
            value: what the call returned.

        Raises:
            CannotExport: it holds an object that cannot be made from tensors and plain values.
        """
        if id(value) in self._known:
            return self._known[id(value)]
        if isinstance(value, torch.Tensor):
            raise CannotExport(detail="a tensor of its output is made outside of the graph")
        if value is None or isinstance(value, bool | int | float | str):
            return repr(value)
        if type(value) in (list, tuple):
            items = [self.expression(item) for item in value]
            text = ", ".join(items)
            return f"[{text}]" if type(value) is list else f"({text}{',' * (len(items) == 1)})"
        if type(value) is dict and all(isinstance(name, str) for name in value):
            return f"{{{', '.join(f'{name!r}: {self.expression(item)}' for name, item in value.items())}}}"
        fields = _fields(value)
        if fields is not None:
            given = [f"{name}={self.expression(item)}" for name, item in fields if item is not None]
            return f"{self._class(type(value))}({', '.join(given)})"
        kind = type(value).__name__
        raise CannotExport(detail=f"its output holds a {kind}; a call without it (use_cache=False, say) can be exported")

    def _class(self, kind: type) -> str:
        if "." in kind.__qualname__ or kind.__module__ in ("__main__", "builtins"):
            raise CannotExport(detail=f"its output is a {kind.__qualname__}, which no module holds by that name")
        self.imports.add(f"from {kind.__module__} import {kind.__name__}")
        return kind.__name__


def _fields(value: Any) -> list[tuple[str, Any]] | None:
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(name, getattr(value, name)) for name in value._fields]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(item.name, getattr(value, item.name)) for item in dataclasses.fields(value) if item.init]
    return None
