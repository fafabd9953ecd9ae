"""Words of memory change with each kind of change that they stand for, and with nothing else."""

from __future__ import annotations

import types

import pytest

from fusion_advisor.fuse.direct import words
from fusion_advisor.fuse.direct.words import Words, attribute_place, class_place, dict_place, table_of_class, watched

pytestmark = pytest.mark.skipif(not words.words_are_readable(), reason="another Python, or no C++ compiler")


class Thing:
    def __init__(self):
        self.number = 1


class Other(Thing):
    pass


def set_often(thing):
    for number in range(200):  # long enough for Python to specialise the write
        thing.number = number


def test_a_read_leaves_them_as_they_are():
    table, thing = {"a": 1}, Thing()
    held = watched([table], [set_often], [Thing], [thing])
    assert table["a"] == 1 and thing.number == 1 and isinstance(thing, Thing) and set_often.__code__
    assert held.are_same()


@pytest.mark.parametrize(
    "write",
    [
        lambda table: table.update(a=2), lambda table: table.__setitem__("b", 1), lambda table: table.pop("a"),
        lambda table: table.clear(), lambda table: table.setdefault("c", 1), lambda table: table.popitem(),
        lambda table: table.__ior__({"a": 5}),
    ],
    ids=["update", "new", "pop", "clear", "setdefault", "popitem", "or"],
)  # fmt: skip
def test_each_write_to_a_dict_is_seen(write):
    table = {"a": 1}
    held = watched([table])
    write(table)
    assert not held.are_same()
    held.read()
    assert held.are_same()


def test_attributes_classes_and_code_are_seen():
    def one(x=1):
        return x

    def two(x=2):
        return x + 1

    thing = Thing()
    changes = {
        "attribute": lambda: setattr(thing, "number", 5),
        "specialised write": lambda: set_often(thing),
        "own dict": lambda: setattr(thing, "__dict__", {"number": 5}),
        "class": lambda: setattr(thing, "__class__", Other),
        "attribute of the class": lambda: setattr(Other, "later", 1),
        "attribute of a base": lambda: setattr(Thing, "later", 1),
        "code": lambda: setattr(one, "__code__", two.__code__),
    }
    for name, change in changes.items():
        held = watched([], [one], [], [thing])
        assert held.are_same(), name
        change()
        assert not held.are_same(), name
    del Thing.later, Other.later


@pytest.mark.parametrize(
    ("name", "value"), [("__defaults__", (7,)), ("__defaults__", None), ("__kwdefaults__", {"y": 1}), ("__name__", "other")]
)
def test_what_a_function_holds_is_seen(name, value):
    def one(x=1, *, y=2):
        return x, y

    held = Words([attribute_place(one, name)], [one])
    assert held.are_same()
    setattr(one, name, value)
    assert not held.are_same()


def test_a_cell_is_seen():
    cell = types.CellType(1)
    held = Words([attribute_place(cell, "cell_contents")], [cell])
    cell.cell_contents = 2
    assert not held.are_same()


def test_what_code_makes_has_no_place():
    class Made:
        @property
        def number(self):
            return 1

    assert attribute_place(Made(), "number") is None
    assert attribute_place(Thing, "__name__") is None
    assert attribute_place(types.SimpleNamespace(a=1), "a") is None


def test_a_place_twice_is_one_word_and_none_is_none():
    table, thing = {}, Thing()
    assert len(Words([dict_place(table)] * 2, [table])) == 1
    assert Words([], []).are_same()
    assert class_place(thing) != dict_place(vars(thing))
    assert table_of_class(vars(Thing)) == dict(vars(Thing))


def test_classes_of_c_code_need_no_word():
    assert not words.can_change(dict) and words.can_change(Thing)
    assert len(watched([], classes=[dict, object])) == 0
