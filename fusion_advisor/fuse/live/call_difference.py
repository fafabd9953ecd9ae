"""Names what makes a call differ from the calls that were verified: an input, or the way in which a model is served."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

_PAGED = ("cache", "read_index", "write_index")
CONTINUOUS_BATCHING = "it is a step of continuous batching: its paged KV cache has other tables and another mask at each step"


def is_continuous_batching(kwargs: Mapping[str, Any]) -> bool:
    """Whether a call is a step of ``generate_batch``: transformers passes its paged cache, and which pages to read and write."""
    return "read_index" in kwargs and all(name in kwargs for name in _PAGED)


def describe_difference(key: Any, verified: Iterable[Any]) -> str:
    """Describe the first tensor of a call that no verified call has in that form.

    Args:
        key: the call's signature.
        verified: the signatures of the calls that were verified.

    Returns:
        Such as ``input_ids is [8, 64] int64, and [8, 512] was verified``; empty where the calls differ in something else.
    """
    mine = dict(_tensors(key, ""))
    known = [dict(_tensors(other, "")) for other in verified]
    same_names = [other for other in known if other.keys() == mine.keys()]
    if not same_names:
        return ""
    nearest = min(same_names, key=lambda other: sum(other[name] != mine[name] for name in mine))
    name = next((name for name in mine if nearest[name] != mine[name]), None)
    if name is None:
        return ""
    mine_text, other_text = _form(mine[name]), _form(nearest[name])
    if mine_text == other_text:
        mine_text, other_text = (f"{_form(form)} with strides {list(form[3])}" for form in (mine[name], nearest[name]))
    return f"{name} is {mine_text}, and {other_text} was verified"


def _tensors(key: Any, name: str) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """The tensors of a signature: their names, and shape, dtype, device and strides."""
    if not isinstance(key, tuple):
        return
    if len(key) == 4 and isinstance(key[0], torch.Size):
        yield name or "the input", key
        return
    for number, part in enumerate(key):
        if isinstance(part, tuple) and len(part) == 2 and isinstance(part[0], str):
            yield from _tensors(part[1], f"{name}.{part[0]}" if name else part[0])
        else:
            yield from _tensors(part, f"{name}[{number - 1}]" if name else f"input {number}")


def _form(tensor: tuple[Any, ...]) -> str:
    shape, dtype, device, _ = tensor
    place = "" if device.type == "cpu" else f" on {device}"
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}{place}"
