"""Generated comparisons and bindings say what a loop over the same attributes and Python's own calls say."""

from __future__ import annotations

import types

import pytest

from fusion_advisor.fuse.direct.straight_code import Constants, are_same, variables_of


class Thing:
    def __init__(self, **attributes):
        vars(self).update(attributes)


@pytest.mark.parametrize("count", [0, 1, 7, 600])
def test_each_attribute_is_compared(count):
    things = [Thing(kept=object()) for _ in range(count)]
    same = are_same([(one, "kept", one.kept) for one in things])
    assert same()
    for one in things[:: max(1, count // 5)]:
        before, one.kept = one.kept, object()
        assert not same()
        one.kept = before
        assert same()


def test_a_name_that_no_source_can_have_is_compared_too():
    thing = Thing(**{"class": [], "a-b": []})
    same = are_same([(thing, name, vars(thing)[name]) for name in ("class", "a-b")])
    assert same()
    vars(thing)["a-b"] = []
    assert not same()


def test_an_attribute_that_is_gone_raises():
    thing = Thing(kept=1)
    same = are_same([(thing, "kept", thing.kept)])
    del thing.kept
    with pytest.raises(AttributeError):
        same()


def plain(a, b=2):
    return locals()


def scattered(a, /, b, *rest, c, d=4, **others):
    return locals()


def named(a, *, b=1, c):
    return locals()


CALLS = [
    (plain, (1,), {}), (plain, (1, 3), {}), (plain, (), {"b": 0, "a": 1}), (scattered, (1, 2, 3, 4), {"c": 5, "e": 6}),
    (scattered, (1,), {"b": 2, "c": 3, "d": 0, "a": 9}), (named, (1,), {"c": 3}),
]  # fmt: skip


@pytest.mark.parametrize(("function", "args", "kwargs"), CALLS)
def test_variables_are_what_the_function_has(function, args, kwargs):
    bind = variables_of(function, {"cell": 7})
    assert bind(*args, **kwargs) == {**function(*args, **kwargs), "cell": 7}


@pytest.mark.parametrize("function", [plain, scattered, named])
def test_a_call_that_the_function_refuses_is_refused(function):
    with pytest.raises(TypeError):
        variables_of(function, {})()


def test_a_parameter_without_a_name_in_source_has_no_binding():
    code = plain.__code__.replace(co_varnames=(".0", *plain.__code__.co_varnames[1:]))
    assert variables_of(types.FunctionType(code, {}), {}) is None


def test_written_code_reads_and_sets_attributes_of_any_name():
    one, other, constants = Thing(**{"kept": 1, "a-b": 2}), Thing(), Constants()
    lines = [
        constants.setting("other", "class", constants.reading("one", "a-b")),
        constants.setting("other", "twice", f"{constants.reading('one', 'kept')} * {constants.name_of(2)}"),
        f"return {constants.name_of(other)}",
    ]
    assert constants.function(["one", "other"], lines)(one, other) is other
    assert vars(other) == {"class": 2, "twice": 2}


def test_no_name_of_an_attribute_is_run():
    constants = Constants()
    made = constants.function(["it"], [f"return {constants.reading('it', 'x or open(1)')}"])
    with pytest.raises(AttributeError):
        made(Thing())
