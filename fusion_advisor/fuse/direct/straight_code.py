"""Writes Python for what one call of a model does at each call: comparisons in a row, and how arguments become variables.

A loop over lists takes 0.25 µs for each attribute that it compares, an expression that names each of them 0.03 µs. Of a file only
names of attributes get into such code, where they are identifiers: all else becomes a value that the code reads.
"""

from __future__ import annotations

import keyword
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import CodeType, FunctionType
from typing import Any

_VARARGS, _VARKEYWORDS = 0x04, 0x08
_GIVEN = "_fa_given_"
_MOST = 256
"""Attributes in one expression."""


class Constants:
    """Values that generated code reads.

    Attributes:
        values: by the names that they have there.
    """

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def name_of(self, value: Any) -> str:
        """Return the name of a value, which it gets here."""
        name = f"{_GIVEN}{len(self.values)}"
        self.values[name] = value
        return name

    def reading(self, owner: str, name: str) -> str:
        """Return the expression that reads an attribute.

        Args:
            owner: what reads its owner.
            name: of the attribute.
        """
        return f"{owner}.{name}" if _is_name(name) else f"getattr({owner}, {self.name_of(name)})"

    def setting(self, owner: str, name: str, value: str) -> str:
        """Return the statement that sets an attribute.

        Args:
            owner: what reads its owner.
            name: of the attribute.
            value: what makes the value.
        """
        return f"{owner}.{name} = {value}" if _is_name(name) else f"setattr({owner}, {self.name_of(name)}, {value})"

    def function(self, parameters: Iterable[str], lines: Iterable[str]) -> Callable[..., Any]:
        """Return a function.

        Args:
            parameters: their names.
            lines: of its code, each with its indentation inside the function.
        """
        text = "\n    ".join([f"def _fa_made({', '.join(parameters)}):", *lines])
        space = dict(self.values)
        eval(compile(text, "<fusion-advisor>", "exec"), space)
        made: Callable[..., Any] = space.pop("_fa_made")
        return made


def are_same(rows: Sequence[tuple[Any, str, Any]]) -> Callable[[], bool]:
    """Return a function that says whether attributes are the objects that they were.

    Args:
        rows: owner, name of its attribute, and the attribute then.

    Returns:
        The function. It raises what reading an attribute raises.
    """
    if len(rows) > _MOST:
        first, rest = are_same(rows[:_MOST]), are_same(rows[_MOST:])
        return lambda: first() and rest()
    places = range(len(rows))
    compared = " and ".join(
        f"o{place}.{name} is v{place}" if _is_name(name) else f"getattr(o{place}, {name!r}) is v{place}"
        for place, (_, name, _) in zip(places, rows, strict=True)
    )
    parameters = ", ".join(f"o{place}, v{place}" for place in places)
    make = eval(f"lambda {parameters}: lambda: {compared or True}", {"getattr": getattr})
    made: Callable[[], bool] = make(*(value for owner, _, then in rows for value in (owner, then)))
    return made


def variables_of(function: FunctionType, closure: Mapping[str, Any]) -> Callable[..., dict[str, Any]] | None:
    """Return a function that takes what another one takes, and returns its variables by name.

    Args:
        function: whose parameters and defaults it has.
        closure: further variables, the same in each call.

    Returns:
        None where a parameter has a name that no source can have.
    """
    parameters, names = _parameters(function.__code__)
    if not all(map(_is_name, names)) or any(name.startswith(_GIVEN) for name in names):
        return None
    given = {f"{_GIVEN}{place}": value for place, value in enumerate(closure.values())}
    inside = [f"{name!r}: {name}" for name in names] + [f"{name!r}: {one}" for name, one in zip(closure, given, strict=True)]
    made = eval(f"lambda {parameters}: {{{', '.join(inside)}}}", given)
    made.__defaults__, made.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    found: Callable[..., dict[str, Any]] = made
    return found


def _parameters(code: CodeType) -> tuple[str, list[str]]:
    """Return a function's parameters as they are written, without defaults, and their names."""
    last = code.co_argcount + code.co_kwonlyargcount
    names = list(code.co_varnames[:last])
    written = names[: code.co_argcount]
    if code.co_posonlyargcount:
        written.insert(code.co_posonlyargcount, "/")
    if code.co_flags & _VARARGS:
        names.append(code.co_varnames[last])
        written.append(f"*{names[-1]}")
    elif code.co_kwonlyargcount:
        written.append("*")
    written += code.co_varnames[code.co_argcount : last]
    if code.co_flags & _VARKEYWORDS:
        names.append(code.co_varnames[last + bool(code.co_flags & _VARARGS)])
        written.append(f"**{names[-1]}")
    return ", ".join(written), names


def _is_name(name: str) -> bool:
    return name.isidentifier() and not keyword.iskeyword(name)
