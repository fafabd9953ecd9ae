"""Notes what dynamo guards inside an object that calls pass again and again, to compare it in bulk: a KV cache of fixed size.

Dynamo asks 30 questions of each layer of a cache. While the call passes the same object, most of them are answered by versions of
dicts and by the items of lists, as for the model (:mod:`fusion_advisor.fuse.direct.unchanged`). Two cannot be answered so:

- Sizes, strides, dtype and device of a tensor can be changed in place (``resize_``, ``.data``). They are compared at each call,
  with the check that dynamo itself makes, of all tensors at once.
- Two inputs of a call may be one tensor. Those inside the object stay the same and different, as long as their holders do. The
  tensors that the call passes as such are compared with them.

A cache that is given new tensors at each step is never noted. Nothing here may run after the launch of a step that writes to its
cache: a launch in vain would have written a token's keys and values that the user never asked for.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fusion_advisor.fuse.direct.attribute_lookup import Lookup
from fusion_advisor.fuse.direct.guard_nodes import Unknown, asks_identity_below, items_of_call
from fusion_advisor.fuse.direct.unchanged import OF_TENSORS, Unchanged
from fusion_advisor.fuse.direct.words import attribute_place, words_are_readable
from fusion_advisor.runtime.torch_internals.compiled_code import CompiledCode, same_tensors

_CALLS_FIRST = 8
"""Calls with the same object before it is looked through: that takes as long as 50 calls save."""
_CALLS_LATER = 1000
"""Calls before it is looked through again, where something in it was replaced."""


class _Inside(Unchanged):
    """What guards inside a passed object look at, its tensors among it."""

    def __init__(self, value: Any) -> None:
        """Begin with nothing.

        Args:
            value: the object. It is not held: whoever holds this must let go of it when the object is freed.
        """
        super().__init__()
        self._not_held = value
        self.of_call: dict[int, torch.Tensor] = {}
        """Tensors whose layouts are compared at each call, by identity."""

    def read(self, owner: Any, name: str) -> Any:
        """Note an attribute; of the object itself only where that takes no reference to it.

        Raises:
            Unknown: it is another object each time, or code of the object's class makes it.
        """
        if owner is self._not_held and attribute_place(owner, name) is None:
            raise Unknown
        return super().read(owner, name)

    def finish(self) -> None:
        """Remember everything as it is now."""
        super().finish()
        self._objects.clear()
        self._attributes.clear()
        self._not_held = None

    def _is_known(self, node: Any, value: Any) -> bool:
        if not isinstance(value, torch.Tensor):
            return super()._is_known(node, value)
        asked = self._asked(node)
        if type(value) is not torch.Tensor or node.get_accessors() or not asked <= OF_TENSORS | {"NO_TENSOR_ALIASING"}:
            return False
        # What it is marked with (``mark_dynamic``) are attributes: its own dict and its class decide which it has and lacks.
        if not self._watch_lookup(value, Lookup(False, None, [value.__dict__])):
            return False
        self.of_call[id(value)] = value
        return True

    def _global(self, space: dict[Any, Any], name: Any) -> Any:
        if space is self._not_held:  # to note an item of it would hold it
            raise Unknown
        return super()._global(space, name)

    def _may_leave(self, holder: Any, value: Any) -> bool:
        return isinstance(value, torch.Tensor) or super()._may_leave(holder, value)  # all layouts are compared


class PassedObject:
    """An object that a call passes, as it was when all guards held."""

    def __init__(
        self, inside: _Inside, holder: Callable[[Mapping[str, Any]], Any], check: Callable[[dict[str, Any]], bool]
    ) -> None:
        self._inside, self._holder = inside, holder
        self._ids = frozenset(inside.of_call)
        self._tensors = tuple(inside.of_call.values())
        self._are_same = same_tensors(self._tensors)
        self.check = check
        """Whether the guards hold that are not of the object."""

    def holds(self, value: Any, variables: Mapping[str, Any], leaves: Sequence[torch.Tensor]) -> bool:
        """Whether every guard of the object holds for a call.

        Args:
            value: the object.
            variables: of the call, by name.
            leaves: tensors that the call passes as such.
        """
        return (
            _is_at(self._holder, variables, value)
            and self._ids.isdisjoint(map(id, leaves))
            and self._inside.holds()
            and self._are_same(*self._tensors)
        )


class PassedObjects:
    """Which of the objects that calls pass are compared in bulk.

    Args:
        compiled: what dynamo made for the calls.
        unchanged: what was noted of the model.
        in_words: compare words of memory, where they can be read; False compares in Python.
    """

    def __init__(self, compiled: CompiledCode, unchanged: Unchanged, *, in_words: bool) -> None:
        self._compiled, self._unchanged = compiled, unchanged
        self._in_words = in_words and words_are_readable()
        self._token = object()

    def check(
        self,
        variables: dict[str, Any],
        leaves: Sequence[torch.Tensor],
        objects: Sequence[Any],
        check: Callable[[dict[str, Any]], bool],
    ) -> bool:
        """Return whether all guards of a call hold that are not of the model.

        Args:
            variables: of the call, by name.
            leaves: tensors that it passes as such.
            objects: what is remembered of the others that it passes. ``value()`` gives each, or None; its ``followed`` keeps what
                is noted here and is freed with the object.
            check: asks dynamo for all of it.
        """
        only = objects[0] if len(objects) == 1 else None
        if only is None or self._unchanged.may_share:
            return check(variables)
        found = only.followed.get(self._token, _CALLS_FIRST)
        if type(found) is PassedObject:
            if found.holds(only.value(), variables, leaves):
                return found.check(variables)
            found = _CALLS_LATER
        holds = check(variables)
        if holds:
            found -= 1
            only.followed[self._token] = (self._try(only, variables, leaves) if found == 0 else None) or found
        return holds

    def _try(self, seen: Any, variables: dict[str, Any], leaves: Sequence[torch.Tensor]) -> PassedObject | None:
        try:
            return self._follow(seen, variables, leaves)
        except (AttributeError, TypeError, RuntimeError, Unknown):  # a torch whose guards are built another way
            return None

    def _follow(self, seen: Any, variables: dict[str, Any], leaves: Sequence[torch.Tensor]) -> PassedObject | None:
        """Note an object for which all guards hold; None where dynamo compares it with something that may change."""
        value = seen.value()
        if value is None or not self._in_words:
            return None
        inside = _Inside(value)
        holder: Callable[[Mapping[str, Any]], Any] | None = None
        for node, get, passed in self._of_call(variables):
            if passed is value and get is not None and holder is None:
                inside.begin_at(node, value)
                holder = get
            elif asks_identity_below(node) and not any(passed is leaf for leaf in leaves):
                return None
        if holder is None or inside.may_share:
            return None
        implied = self._unchanged.implied.keys() | inside.implied.keys()
        rest = self._compiled.only(lambda node: id(node) not in implied)
        inside.finish()
        made = PassedObject(inside, holder, rest)
        # Once more, so that all of it held after it was noted.
        return made if self._compiled.root.check(variables) and made.holds(value, variables, leaves) else None

    def _of_call(self, variables: dict[str, Any]) -> Iterator[tuple[Any, Callable[[Mapping[str, Any]], Any] | None, Any]]:
        """Yield the nodes of what a call passes, how each is got from its variables where that is known, and the value."""
        for node in self._compiled.root.get_child_managers():
            name, known = node.get_source()[3:-2], self._unchanged
            if id(node) in known.implied or id(node) in known.roots or node.get_source() == "G":
                continue
            holder: Any = variables.get(name)
            if type(holder) not in (tuple, dict):
                yield node, operator.itemgetter(name), holder
                continue
            for key, below, value in items_of_call(node, holder):
                if id(below) not in known.roots:
                    yield below, None if key is None else _item_of(name, key), value


def _is_at(holder: Callable[[Mapping[str, Any]], Any], variables: Mapping[str, Any], value: Any) -> bool:
    try:
        return holder(variables) is value
    except LookupError:
        return False


def _item_of(name: str, key: Any) -> Callable[[Mapping[str, Any]], Any]:
    return lambda variables: variables[name][key]
