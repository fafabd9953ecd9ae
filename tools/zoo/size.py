"""How large a workload is built, what its factory returns, and how an optional package is imported."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn

TINY_BATCH, TINY_LENGTH = 2, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large a workload is built.

    Attributes:
        is_tiny: widths for a CPU.
        layers: at most so many; 0: all of them.
        dtype: of weights and floating inputs.
    """

    is_tiny: bool
    layers: int
    dtype: torch.dtype

    @classmethod
    def of_environment(cls) -> Size:
        """Return the size that the environment asks for."""
        return cls(
            is_tiny=os.environ.get("ZOO_TINY") == "1",
            layers=int(os.environ.get("ZOO_LAYERS", "0")),
            dtype=getattr(torch, os.environ.get("ZOO_DTYPE", "float32")),
        )

    def cut(self, layers: int) -> int:
        """Return how many of a model's layers are built."""
        most = 2 if self.is_tiny else self.layers or layers
        return min(layers, most)

    def batch(self, batch: int) -> int:
        """Return the batch of a workload whose real one is this."""
        return TINY_BATCH if self.is_tiny else batch


Made = tuple[nn.Module, dict[str, Any] | tuple[Any, ...]]


class MissingPackage(ImportError):
    """A workload needs a package that is not installed."""


def optional_package(name: str) -> ModuleType:
    """Import a package of the ``zoo`` extra.

    Raises:
        MissingPackage: it, or a package that it imports, is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        needs = name if error.name == name else f"{name}, which imports {error.name}"
        raise MissingPackage(f"this workload needs {needs}: pip install 'fusion-advisor[zoo]'") from error
