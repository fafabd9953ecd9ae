"""What some statements take from their module: attributes, submodules and tensors, as Python source of the conditions on them."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fusion_advisor.export.patch.frames import NotExpressed

PLAIN = (bool, int, float, str, type(None), torch.dtype)


@dataclass(slots=True)
class OwnerFacts:
    """What is read of a module.

    Attributes:
        attributes: source of the value that each attribute had, by its path below the module.
        modules: class and plain attributes of each submodule that is called, as source, by its path.
        tensors: paths of parameters and buffers.
    """

    attributes: dict[str, str] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)
    tensors: set[str] = field(default_factory=set)


def owner_facts(body: Sequence[ast.stmt], name: str, owner: nn.Module) -> OwnerFacts:
    """Return what statements, and methods of the same module that they call, read of their module.

    Args:
        body: the statements.
        name: by which they call the module; empty where they do not.
        owner: the module.

    Raises:
        NotExpressed: they read an object that no condition can be written for.
    """
    facts = OwnerFacts()
    if name:
        _collect(body, name, owner, facts, set())
    return facts


def plain_source(value: Any) -> str | None:
    """Return a plain value, or a function of torch's, as source; None for any other object.

    Args:
        value: of an attribute or a local name.
    """
    if type(value) in PLAIN:
        return f'float("{value}")' if isinstance(value, float) and value * 0 != 0 else repr(value)
    name = getattr(value, "__name__", "")
    for home, module in (("torch.nn.functional", torch.nn.functional), ("torch", torch)):
        if callable(value) and name.isidentifier() and getattr(module, name, None) is value:
            return f"{home}.{name}"
    return None


def _collect(body: Sequence[ast.stmt], name: str, owner: nn.Module, facts: OwnerFacts, seen: set[str]) -> None:
    inner = set()
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Attribute):
                inner.add(id(node.value))
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and node.id == name and id(node) not in inner:
                raise NotExpressed(f"line {node.lineno} passes the whole module on")
            if isinstance(node, ast.Attribute) and id(node) not in inner:
                path = _path(node, name)
                if path:
                    _read(path, owner, facts, seen)


def _path(node: ast.Attribute, name: str) -> tuple[str, ...]:
    parts: list[str] = []
    at: ast.expr = node
    while isinstance(at, ast.Attribute):
        parts.append(at.attr)
        at = at.value
    return tuple(reversed(parts)) if isinstance(at, ast.Name) and at.id == name else ()


def _read(path: tuple[str, ...], owner: nn.Module, facts: OwnerFacts, seen: set[str]) -> None:
    value: Any = owner
    for place, part in enumerate(path):
        here = ".".join(path[: place + 1])
        method = getattr(type(value), part, None)
        if value is owner and inspect.isfunction(method):
            _read_method(method, owner, facts, seen)
            return
        value = getattr(value, part)
        if isinstance(value, torch.Tensor):
            facts.tensors.add(here)
            return
        source = plain_source(value)
        if source is not None:
            facts.attributes[here] = source
            return
    dotted = ".".join(path)
    if not isinstance(value, nn.Module):
        raise NotExpressed(f"its statements read `{dotted}`, which is a {type(value).__name__}")
    for inner, module in value.named_modules():
        facts.modules[f"{dotted}.{inner}".rstrip(".")] = _module_source(module)
        facts.tensors |= {
            ".".join(filter(None, (dotted, inner, leaf)))
            for leaf, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        }


def _read_method(method: Any, owner: nn.Module, facts: OwnerFacts, seen: set[str]) -> None:
    if method.__qualname__ in seen:
        return
    seen.add(method.__qualname__)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    except (OSError, TypeError, SyntaxError) as error:
        raise NotExpressed(f"the source of `{method.__qualname__}`, which it calls, is unknown") from error
    function = tree.body[0]
    if isinstance(function, ast.FunctionDef) and function.args.args:
        _collect(function.body, function.args.args[0].arg, owner, facts, seen)


def _module_source(module: nn.Module) -> str:
    own = {
        name: source
        for name, value in sorted(vars(module).items())
        if not name.startswith("_") and (source := plain_source(value)) is not None
    }
    own |= {
        name: repr(value)  # the sizes that a norm is over
        for name, value in sorted(vars(module).items())
        if type(value) is tuple and all(type(item) is int for item in value)
    }
    plain = ", ".join(f"{name!r}: {source}" for name, source in own.items())
    return f"({type(module).__qualname__!r}, {{{plain}}})"
