"""Follows a ``__getattribute__`` or a property written in Python by its source, as far as it looks into nothing but dicts.

The configurations of transformers have two ``__getattribute__``: one translates old names, one asks whether layers differ.
A guard that reads ``config.use_cache`` runs both, which takes 1.5 µs. What they answer is decided by their code and by the dicts
that they look into. While all of these are as they were, the answer is the same.

Only what is reached for the given name is followed: constants, local names, ``super().__getattribute__``, attributes of the
object itself, items of dicts, ``is``, ``in``, ``==`` between texts, ``if`` and ``return``. Anything else is :class:`Unreadable`.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

_OF_CODE = ("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_exceptiontable", "co_argcount", "co_consts")


class Unreadable(Exception):
    """It is not known what a function looks at."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a function of an object's class can reach.

    Attributes:
        owner: the object.
        attribute: what reading an attribute of the object gives, by its name. What it raises is passed on.
        later: what ``super().__getattribute__`` gives. Likewise.
        tables: gets the dicts that are looked into.
    """

    owner: Any
    attribute: Callable[[str], Any]
    later: Callable[[str], Any]
    tables: list[dict[Any, Any]]


def followed(function: Any, kind: type, around: Surroundings, *names: str) -> Any:
    """Return what ``function(owner, *names)`` returns.

    Args:
        function: of a class.
        kind: the class in which the function was found.
        around: the object and what can be reached from it.
        *names: further arguments.

    Raises:
        Unreadable: it does something else than to look into dicts.
    """
    if type(function) is not FunctionType or "super" in function.__globals__ or _class_of(function) not in (kind, None):
        raise Unreadable
    definition = _definition(function.__code__)
    if definition is None or len(definition.args.args) != 1 + len(names):
        raise Unreadable
    arguments = dict(zip((one.arg for one in definition.args.args), (around.owner, *names), strict=True))
    return _Evaluation(arguments, around).run(definition.body)[1]


def _class_of(function: FunctionType) -> Any:
    """Return the class that ``super()`` begins at; None where there is no closure."""
    if not function.__closure__:
        return None
    return function.__closure__[0].cell_contents if function.__code__.co_freevars == ("__class__",) else function


@functools.lru_cache(maxsize=64)
def _definition(code: CodeType) -> ast.FunctionDef | None:
    """Return a function's syntax tree; None where there is no source, or the file has been changed since."""
    try:
        source = inspect.getsource(code)
        tree = ast.parse("class _:\n" + source if source[:1].isspace() else source)
    except (OSError, TypeError, SyntaxError):
        return None
    definition = next((node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)), None)
    if definition is None:
        return None
    definition.decorator_list.clear()  # `property`, whose function this is
    whole = compile(tree, code.co_filename, "exec", dont_inherit=True)
    again = next((one for one in _codes_in(_codes_in([whole])) if one.co_name == code.co_name), None)
    return definition if again is not None and all(getattr(again, part) == getattr(code, part) for part in _OF_CODE) else None


def _codes_in(codes: Sequence[CodeType]) -> list[CodeType]:
    return [one for code in codes for one in code.co_consts if isinstance(one, CodeType)]


class _Evaluation:
    """One run of a function body."""

    def __init__(self, names: dict[str, Any], around: Surroundings) -> None:
        self._names, self._around = names, around

    def run(self, body: Sequence[ast.stmt]) -> tuple[bool, Any]:
        """Run statements; return whether one of them returned, and what."""
        for statement in body:
            match statement:
                case ast.Return(value=ast.expr() as value):
                    return True, self._value(value)
                case ast.If(test=test, body=then, orelse=otherwise):
                    returned, result = self.run(then if self._decision(test) else otherwise)
                    if returned:
                        return True, result
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self._names[name] = self._value(value)
                case ast.Expr(value=ast.Constant()) | ast.Pass():
                    pass
                case _:
                    raise Unreadable
        return False, None

    def _decision(self, node: ast.expr) -> bool:
        value = self._value(node)
        if type(value) is not bool:
            raise Unreadable
        return value

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name) if name in self._names:
                return self._names[name]
            case ast.BoolOp(op=ast.And(), values=values):
                return all(map(self._decision, values))
            case ast.BoolOp(op=ast.Or(), values=values):
                return any(map(self._decision, values))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return not self._decision(operand)
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return self._compared(op, self._value(left), self._value(right))
            case ast.Subscript(value=table, slice=name):
                return self._item(self._value(table), self._value(name), is_needed=True)
            case ast.Call(func=ast.Attribute(value=of, attr="get"), args=[name], keywords=[]):
                return self._item(self._value(of), self._value(name), is_needed=False)
            case ast.Call(
                func=ast.Attribute(value=ast.Call(func=ast.Name(id="super"), args=[], keywords=[]), attr="__getattribute__"),
                args=[name],
                keywords=[],
            ):
                return self._around.later(_text(self._value(name)))
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if self._names.get(name) is self._around.owner:
                return self._around.attribute(attribute)
        raise Unreadable

    def _item(self, table: Any, name: Any, *, is_needed: bool) -> Any:
        found = self._looked_into(table)
        if is_needed and _text(name) not in found:
            raise Unreadable
        return found.get(_text(name))

    def _looked_into(self, table: Any) -> dict[Any, Any]:
        if type(table) is not dict:
            raise Unreadable
        self._around.tables.append(table)
        return table

    def _compared(self, op: ast.cmpop, left: Any, right: Any) -> bool:
        match op:
            case ast.Is():
                return left is right
            case ast.IsNot():
                return left is not right
            case ast.Eq():
                return _text(left) == _text(right)
            case ast.NotEq():
                return _text(left) != _text(right)
            case ast.In():
                return _text(left) in self._looked_into(right)
            case ast.NotIn():
                return _text(left) not in self._looked_into(right)
        raise Unreadable


def _text(value: Any) -> str:
    if type(value) is not str:
        raise Unreadable
    return value
