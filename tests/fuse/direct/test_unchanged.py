"""What is noted of a registry: the items that were read, whatever else is set in it."""

from __future__ import annotations

import gc
import weakref

import pytest

from fusion_advisor.fuse.direct.passed_object import _Inside
from fusion_advisor.fuse.direct.unchanged import Unchanged
from fusion_advisor.fuse.start.guard_tree import Node


class Registry(dict):
    """A dict with a way of its own to read an item, which dynamo's guards do not take."""

    def __getitem__(self, name):
        return [super().__getitem__(name)]


class Other(Registry):
    pass


class Kind:
    pass


class Sort:
    pass


def asked(*guards):
    """Dynamo's guards of a registry of which one item was read."""
    return Node("registry", guards, below=[("DictGetItemGuardAccessor", "'a'", Node("registry['a']", ("ID_MATCH",)))])


@pytest.mark.parametrize("in_words", [True, False])
@pytest.mark.parametrize(
    "change",
    [
        lambda table: table.update(a=Kind()), lambda table: table.pop("a"), lambda table: table.clear(),
        lambda table: setattr(table, "__class__", Other), lambda table: setattr(dict.__getitem__(table, "a"), "__class__", Sort),
    ],
    ids=["another item", "no item", "empty", "class", "class of the item"],
)  # fmt: skip
def test_items_that_were_read_of_a_registry_are_compared_and_no_others(change, in_words):
    table, node = Registry(a=Kind(), b=1), asked("TYPE_MATCH")
    kept = dict.__getitem__(table, "a")
    held = Unchanged(in_words=in_words)
    held.begin_at(node, table)
    held.finish()
    assert held.implied.keys() == {id(node), id(node.below[0][2])} and held.holds()
    for other in ({"c": 3}, {"b": 2}, {"a": kept}):
        table.update(other)
        assert held.holds() and held.holds()
    change(table)
    assert not held.holds() and not held.holds()


def test_what_a_registrys_own_code_may_answer_stays_with_dynamo():
    table, node = Registry(a=Kind()), asked("DICT_CONTAINS")
    held = Unchanged()
    held.begin_at(node, table)
    assert id(node) not in held.implied and id(node.below[0][2]) in held.implied


def test_a_registry_that_a_call_passes_is_not_held():
    table, node = Registry(a=Kind()), asked("TYPE_MATCH")
    held, gone = _Inside(table), weakref.ref(table)
    held.begin_at(node, table)
    held.finish()
    assert id(node) not in held.implied
    del table
    gc.collect()
    assert gone() is None
