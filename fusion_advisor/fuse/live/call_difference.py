"""Names what makes a call differ from the calls that were verified: an input, or the way in which a model is served."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from fusion_advisor.fuse.live.call_signature import ObjectKey, Opaque, has_no_strides

_WIDEST = 60
"""Characters of a plain value that are shown."""
_PAGED = ("cache", "read_index", "write_index")
CONTINUOUS_BATCHING = "it is a step of continuous batching: its paged KV cache has other tables and another mask at each step"


def is_continuous_batching(kwargs: Mapping[str, Any]) -> bool:
    """Whether a call is a step of ``generate_batch``: transformers passes its paged cache, and which pages to read and write."""
    return "read_index" in kwargs and all(name in kwargs for name in _PAGED)


def why_never(key: Any) -> str:
    """Name the first part of a call that no two calls can be compared by, so that none of them is verified; empty without one.

    Args:
        key: the call's signature.
    """
    for name, part in _parts(key, ""):
        if isinstance(part, Opaque):
            kind = f"{part.kind.__module__}.{part.kind.__qualname__}".removeprefix("builtins.")
            return f"{name} is a {kind}, and calls are told apart by tensors and plain values alone"
        if _is_tensor(part) and has_no_strides(part):
            return f"{name} is a nested or compressed sparse tensor. It has no strides, and two calls are compared by strides"
    return ""


def describe_difference(key: Any, verified: Iterable[Any]) -> str:
    """Describe the first part of a call that no verified call has in that form.

    Args:
        key: the call's signature.
        verified: the signatures of the calls that were verified.

    Returns:
        Such as ``input_ids is [8, 64] int64, and [8, 512] was verified``, ``scale is 2.0, and 1.0 was verified`` or ``mask is not
        passed, and was when the call was verified``; empty where none was, or where the calls differ in nothing that has a name.
    """
    mine = dict(_parts(key, ""))
    known = [dict(_parts(other, "")) for other in verified]
    if not known:
        return ""
    nearest = min(known, key=lambda other: sum(other.get(name) != mine.get(name) for name in {**mine, **other}))
    name = next((name for name in {**mine, **nearest} if nearest.get(name) != mine.get(name)), None)
    if name is None:
        return ""
    if name not in nearest:
        return f"{name} is passed, and was not when the call was verified"
    if name not in mine:
        return f"{name} is not passed, and was when the call was verified"
    mine_text, other_text = _form(mine[name]), _form(nearest[name])
    if mine_text == other_text and _is_tensor(mine[name]) and _is_tensor(nearest[name]):
        mine_text, other_text = (f"{_form(form)} with strides {list(form[3])}" for form in (mine[name], nearest[name]))
    if mine_text == other_text:
        return f"{name} holds other contents than when the call was verified"
    return f"{name} is {mine_text}, and {other_text} was verified"


def _parts(key: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The tensors, plain values and objects of a signature with their names."""
    if isinstance(key, ObjectKey):
        yield name or "the input", key
        if isinstance(key.form.parts, tuple | Opaque):
            yield from ((part, one) for part, one in _parts(key.form.parts, name) if isinstance(one, Opaque))
        return
    if not isinstance(key, tuple):
        yield name or "the input", key
        return
    if _is_tensor(key) or _is_plain(key):
        yield name or "the input", key
        return
    for number, part in enumerate(key):
        if name and number == 0:
            yield f"the class of {name}", part
        elif isinstance(part, tuple) and len(part) == 2 and isinstance(part[0], str):
            yield from _parts(part[1], f"{name}.{part[0]}" if name else part[0])
        elif isinstance(part, tuple) and len(part) == 2 and isinstance(part[0], tuple):  # a dict's key that is no text
            yield from _parts(part[1], f"{name}[{_form(part[0])}]")
        else:
            yield from _parts(part, f"{name}[{number - 1}]" if name else f"input {number}")


def _is_tensor(key: Any) -> bool:
    return isinstance(key, tuple) and len(key) >= 4 and isinstance(key[0], torch.Size)


def _is_plain(key: tuple[Any, ...]) -> bool:
    """Whether it stands for one value, as ``(float, '0x1.0p+0')`` does; ``(list, …)`` and an object's stand for several."""
    if len(key) != 2 or not isinstance(key[0], type) or key[0] in (tuple, list, dict):
        return False
    return key[0] is complex or not isinstance(key[1], tuple)


def _form(part: Any) -> str:
    if _is_tensor(part):
        shape, dtype, device, *_ = part
        place = "" if device.type == "cpu" else f" on {device}"
        return f"{list(shape)} {str(dtype).removeprefix('torch.')}{place}"
    if not isinstance(part, tuple):
        return part.__name__ if isinstance(part, type) else "another object"
    kind, value = part
    if kind is float:
        value = float.fromhex(value)
    if kind is complex:
        value = complex(*map(float.fromhex, value))
    return str(value) if isinstance(value, torch.dtype) else textwrap.shorten(repr(value), _WIDEST, placeholder="…")
