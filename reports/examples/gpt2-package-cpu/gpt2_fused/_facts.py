"""What a model is: its class, code, configuration, modules and tensors, and in what two models differ.

An exported package has a copy of this file: both sides must describe a model in the same way.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

_PLAIN = (bool, int, float, str, type(None))
_OF_THE_FILE = ("transformers_version", "name_or_path", "dtype", "torch_dtype")
"""Keys of a configuration that say where it comes from; dtypes are compared tensor by tensor."""


def facts(model: torch.nn.Module, known: Mapping[str, list[str]] | None = None) -> dict[str, Any]:
    """Describe a model in plain values, the same for two models that compute the same with other weights.

    Args:
        model: on its device.
        known: by class, digests of its file and of its own source, as an earlier call returned them. A class whose file is
            still the same is not looked for in it: parsing a file of transformers takes 40 ms, reading it 1 ms.
    """
    tensors = {**dict(model.named_buffers(remove_duplicate=False)), **dict(model.named_parameters(remove_duplicate=False))}
    kinds = {type(module) for module in model.modules() if not type(module).__module__.startswith("torch.")}
    config: Any = getattr(model, "config", None)
    return {
        "class": _name(type(model)),
        "config": _plain(config.to_dict()) if hasattr(config, "to_dict") else {},
        "modules": {path: _module(module, is_inner=bool(path)) for path, module in model.named_modules()},
        "tensors": {name: [list(tensor.shape), str(tensor.dtype)] for name, tensor in tensors.items()},
        "device": next((tensor.device.type for tensor in tensors.values()), "cpu"),
        "code": _digests(sorted(kinds, key=_name), known or {}),
    }


def differences(expected: dict[str, Any], found: dict[str, Any], made: str = "exported") -> list[str]:
    """Return in what a model differs from the exported one, one sentence for each.

    Args:
        expected: facts of the exported model.
        found: facts of a model.
        made: what was done with the first one.
    """
    lines = []
    for title, key in (("class", "class"), ("device", "device")):
        if expected[key] != found[key]:
            lines.append(f"{title}: {found[key]}, {made} from {expected[key]}")
    words = {"config": "config.", "modules": "module ", "tensors": "", "code": "source of "}
    for key, word in words.items():
        for name in sorted({*expected[key], *found[key]}):
            there, here = (_compared(key, one[key].get(name, "absent")) for one in (expected, found))
            if there != here:
                lines.append(_difference(f"{word}{name or 'model'}", here, there, made))
    return lines


def _compared(key: str, fact: Any) -> Any:
    return fact[-1] if key == "code" and fact != "absent" else fact  # its file may have changed elsewhere


def _difference(title: str, here: Any, there: Any, made: str) -> str:
    if isinstance(here, dict) and isinstance(there, dict):
        names = [name for name in sorted({*here, *there}) if here.get(name) != there.get(name)]
        here, there = ({name: one.get(name) for name in names} for one in (here, there))
    if title.startswith("source of "):
        return f"{title} is another than when it was {made}"
    return f"{title}: {here}, {made} with {there}"


def _module(module: torch.nn.Module, *, is_inner: bool) -> dict[str, Any]:
    own = {
        name: _plain(value)
        for name, value in vars(module).items()
        if type(value) in _PLAIN and not name.startswith("_") and name not in ("training", *_OF_THE_FILE)
    }
    return {"class": _name(type(module)), **dict(sorted(own.items())), **(_replaced(module) if is_inner else {})}


def _replaced(module: torch.nn.Module) -> dict[str, Any]:
    """Name what runs in place of a submodule's forward or around it; the model's own hooks are called all the same."""
    found: dict[str, Any] = {"a forward of its own": _function(vars(module)["forward"])} if "forward" in vars(module) else {}
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    names = [_function(one) for one in hooks if getattr(one, "__module__", "") != _NOTING]
    return {**found, "a hook": names} if names else found


_NOTING = "transformers.utils.output_capturing"
"""Its hooks stay after the first call that returns hidden states; they note what goes by and change nothing."""


def _function(called: Any) -> str:
    return str(getattr(called, "__qualname__", type(called).__qualname__))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {str(name): _plain(item) for name, item in value.items() if name not in _OF_THE_FILE}
        return {name: item for name, item in sorted(kept.items()) if not name.startswith("_")}
    if isinstance(value, (list, tuple, set)):
        return [_plain(item) for item in value]
    if type(value) is float and not math.isfinite(value):  # JSON has no such number, and NaN would differ from itself
        return f"float {value}"
    return value if type(value) in _PLAIN else str(value)


def _name(kind: type) -> str:
    return kind.__qualname__  # a module's name depends on how it was imported; the digest of the source does not


def _digests(kinds: list[type], known: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Return two digests by class: of the file that it stands in, and of its own source."""
    read = functools.cache(_text)
    parsed = functools.cache(lambda path: _classes(read(path)))
    found = {}
    for kind in kinds:
        name, path = _name(kind), _file(kind)
        whole = _digest(read(path))
        if name in known and whole != _UNKNOWN and known[name][0] == whole:
            found[name] = known[name]
        else:
            found[name] = [whole, _digest(parsed(path).get(name, ""))]
    return found


_UNKNOWN = "unknown"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16] if text else _UNKNOWN


def _file(kind: type) -> str:
    try:
        return inspect.getsourcefile(kind) or ""
    except (OSError, TypeError):
        return ""


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8") if path else ""
    except (OSError, UnicodeDecodeError):
        return ""


def _classes(text: str) -> dict[str, str]:
    """Return the source of each class of a file by its qualified name; several of one name are joined."""
    lines, found = text.splitlines(), dict[str, str]()

    def walk(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = prefix
            if isinstance(child, ast.ClassDef):
                first = min([child.lineno, *(one.lineno for one in child.decorator_list)])
                own = "\n".join(lines[first - 1 : child.end_lineno])
                found[prefix + child.name] = "\n".join(filter(None, [found.get(prefix + child.name), own]))
                inner = f"{prefix}{child.name}."
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                inner = f"{prefix}{child.name}.<locals>."
            if not isinstance(child, ast.expr):
                walk(child, inner)

    try:
        walk(ast.parse(text), "")
    except (SyntaxError, ValueError):  # the file changed since it was imported
        return {}
    return found
