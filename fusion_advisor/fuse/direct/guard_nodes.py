"""Reads dynamo's tree of guards: which item or attribute a node guards, and what is asked of it and below it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

OF_PAIRS = {"OBJECT_ALIASING", "NO_TENSOR_ALIASING"}
"""Guards that compare a value with another one's identity."""


class Unknown(Exception):
    """It is not known what a guard looks at."""


MISSING = (Unknown, AttributeError, KeyError, IndexError, ValueError, SyntaxError, TypeError)


def asks_identity_below(node: Any) -> bool:
    """Whether a node of dynamo's tree, or one below it, asks that tensors are different objects, or the same."""
    if any(type(guard).__name__ in OF_PAIRS for guard in node.get_leaf_guards()):
        return True
    return any(map(asks_identity_below, chain(node.get_child_managers(), of_items(node))))


def of_items(node: Any) -> Iterator[Any]:
    """Yield the nodes of a dict's keys and values by place."""
    managers: Mapping[int, Any] = getattr(node, "get_key_value_managers", dict)()
    return (one for pair in managers.values() for one in pair if one is not None)


def items_of_call(node: Any, holder: tuple[Any, ...] | dict[Any, Any]) -> Iterator[tuple[Any, Any, Any]]:
    """Yield what guards look at in a tuple or dict of a call: key, node, value; the key is None where it is not known."""
    for accessor, below in zip(node.get_accessors(), node.get_child_managers(), strict=True):
        try:
            key = ast.literal_eval(inside_of(accessor.repr()))
            yield key, below, holder[key]
        except MISSING:
            yield None, below, None
    yield from ((None, one, None) for one in of_items(node))


def inside_of(text: str) -> str:
    """Return the argument in an accessor's description."""
    return text[text.index("(") + 1 : -1]


def index_of(accessor: Any) -> int:
    """Return which item of a list an accessor reaches.

    Raises:
        Unknown: it reaches no item.
    """
    if type(accessor).__name__ not in ("ListGetItemGuardAccessor", "GetItemGuardAccessor"):
        raise Unknown
    return int(inside_of(accessor.repr()))
