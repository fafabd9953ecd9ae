"""Names of values in the printed forward: made of the module that computes them, so that they read like the model."""

from __future__ import annotations

import builtins
import keyword
import operator
import re
from collections.abc import Mapping

import torch
from torch.fx import Node

from fusion_advisor.capture.graph.fx_nodes import module_path
from fusion_advisor.export.parameters import layer_of
from fusion_advisor.records.op_facts import LOOP_PREFIX

_RESERVED = frozenset(
    {*keyword.kwlist, *dir(builtins), "model", "ops", "torch", "aten", "F", "block", "following", "cached", "index"}
)
_SHOWN_BY_MODULE = ("linear", "addmm", "mm", "conv2d", "conv1d", "embedding", "layer_norm", "rms_norm", "gelu", "silu", "relu")
"""Ops that are what their module is: ``q_proj`` says enough."""
_SHORT = {"scaled_dot_product_attention": "attention", "getitem": "item"}


def identifier(text: str) -> str:
    """Return a text as an identifier that is no word of Python's and no name of the printed module."""
    name = re.sub(r"\W", "_", text, flags=re.ASCII).strip("_").lower()[:40]
    name = name if name and not name[0].isdigit() else f"value_{name}".rstrip("_")
    return f"{name}_value" if name in _RESERVED else name


class Names:
    """Names that are taken in one function."""

    def __init__(self, taken: Mapping[str, object] | None = None) -> None:
        self._taken = set(taken or ())

    def take(self, wanted: str) -> str:
        """Return a name that is still free, and take it.

        Args:
            wanted: what it should be.
        """
        base = identifier(wanted)
        number, name = 1, base
        while name in self._taken:
            number += 1
            name = f"{base}_{number}"
        self._taken.add(name)
        return name


def value_name(node: Node, origin: Node | None, prefix: str) -> str:
    """Return what a value should be called.

    Args:
        node: that computes it.
        origin: the model's own op whose result it is, where a kernel computes it; None where the node is that op.
        prefix: path of the layer that the name is used in; empty outside of all layers.
    """
    shown = origin or node
    source = shown.args[0] if shown.target is operator.getitem else shown
    shown = source if isinstance(source, Node) else shown
    path, op = module_path(shown), _op_name(shown)
    own, layer = path, layer_of(path)
    if prefix and (path == prefix or path.startswith(f"{prefix}.")):
        own = path[len(prefix) :]
    elif layer is not None:
        own = path[len(layer.path) :]
    parts = [part for part in own.split(".") if part and not part.isdigit()]
    if not parts:
        return op
    return parts[-1] if op in _SHOWN_BY_MODULE else f"{parts[-1]}_{op}"


def _op_name(node: Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        name = target._schema.name.rpartition("::")[2]
    else:
        name = re.sub(r"^fa_|_[0-9a-f]{6}$", "", getattr(target, "__name__", str(target)))
    return "scan" if name.startswith(LOOP_PREFIX) else _SHORT.get(name, name).strip("_")
