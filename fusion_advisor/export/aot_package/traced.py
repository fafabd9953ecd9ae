"""The fused model traced by torch.export: the Python package is written to a folder, put into the model, and taken out again."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fusion_advisor.errors import CannotExport
from fusion_advisor.runtime.torch_internals.dispatcher import forget_ops


class NamedCall(nn.Module):
    """A model whose call takes tensors by name and returns tensors by name.

    Attributes:
        model: the fused model.
        values: arguments that are no tensors.
    """

    def __init__(self, model: nn.Module, values: Mapping[str, object]) -> None:
        super().__init__()
        self.model = model
        self.values = dict(values)

    def forward(self, **tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        """Call the model."""
        return named_tensors(self.model(**tensors, **self.values))


def named_tensors(output: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a model's output by name, or by number where they have none: ``logits``, ``hidden_states.0``.

    Args:
        output: a tensor, a tuple, a dict, a dataclass or one of transformers' outputs, with any of these inside.
    """
    return dict(_named("", [output] if isinstance(output, torch.Tensor) else output))


def _named(place: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield place, value
        return
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    elif dataclasses.is_dataclass(value):
        items = [(one.name, getattr(value, one.name)) for one in dataclasses.fields(value)]
    for name, item in items:
        yield from _named(f"{place}.{name}" if place else str(name), item)


@contextlib.contextmanager
def imported(folder: Path, name: str) -> Iterator[Any]:
    """Import a package from a folder for a while; its ops are unregistered at the end.

    Args:
        folder: that holds the package.
        name: of the package.
    """
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))
        launch = sys.modules.get(f"{name}._launch")
        if launch is not None:
            forget_ops(launch.LIBRARY)
        for module in [one for one in sys.modules if one == name or one.startswith(f"{name}.")]:
            del sys.modules[module]


def traced(package: Any, model: nn.Module, tensors: Mapping[str, torch.Tensor], values: Mapping[str, object]) -> Any:
    """Return the exported program of a model with a package's kernels in it, and what it returns.

    Args:
        package: of the kept kernels, imported.
        model: that it is for.
        tensors: of the call.
        values: its other arguments.

    Returns:
        the program, and the fused model's own outputs.

    Raises:
        CannotExport: torch.export refuses the forward, or does not see the kernels.
    """
    package.apply(model)
    try:
        call = NamedCall(model, values)
        with torch.no_grad():
            outputs = call(**tensors)
            program = torch.export.export(call, (), dict(tensors), strict=False)
    except (RuntimeError, TypeError, ValueError) as error:
        raise CannotExport(detail=f"torch.export refuses its forward: {_first_line(error)}") from error
    finally:
        package.revert(model)
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    if not any(target.startswith(f"{package.__name__}.") for target in targets):
        raise CannotExport(detail="torch.export traced the model's own forward, without the kernels")
    return program, outputs


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]
