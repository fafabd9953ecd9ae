"""The statements of a function that compute a site: which they are, what they read, and what they leave behind."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fusion_advisor.export.patch.frames import NotExpressed

_SIMPLE = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Expr)
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, kw_only=True)
class Statements:
    """Statements in a row.

    Attributes:
        function: that they stand in.
        body: the statements.
        owner: the function's name for its module (``self``); empty where it is no method.
        reads: local names that they read before they assign them, without the owner; in order.
        leaves: names that they assign and other statements of the function read; in order.
    """

    function: _Function
    body: tuple[ast.stmt, ...]
    owner: str
    reads: tuple[str, ...]
    leaves: tuple[str, ...]

    @property
    def first_line(self) -> int:
        """Of the first statement, counted from 1."""
        return self.body[0].lineno

    @property
    def last_line(self) -> int:
        """Of the last statement."""
        return _end(self.body[-1])

    @property
    def indent(self) -> str:
        """Blanks before each statement."""
        return " " * self.body[0].col_offset

    @property
    def is_return(self) -> bool:
        """Whether the function ends with them."""
        return isinstance(self.body[-1], ast.Return)


def find_statements(tree: ast.Module, name: str, lines: frozenset[int], *, from_start: bool = False) -> Statements:
    """Return the fewest statements in a row of one block that some lines of a function belong to.

    Args:
        tree: of the file.
        name: of the function.
        lines: in the function.
        from_start: begin with the first statement of the block, so that a whole forward can be one place.

    Raises:
        NotExpressed: the lines belong to statements that a branch cannot stand around.
    """
    function = _function(tree, name, min(lines), max(lines))
    block = _block(function, lines)
    places = [place for place, one in enumerate(block) if any(one.lineno <= line <= _end(one) for line in lines)]
    if not places or not all(any(one.lineno <= line <= _end(one) for one in block) for line in lines):
        raise NotExpressed(f"a default or a decorator of {name} computes its ops")
    first, last = places[0], places[-1]
    if from_start:
        first = int(block is function.body and ast.get_docstring(function) is not None)
    while not from_start and first > 0 and _serves_only(block[first - 1], block[first : last + 1], function):
        first -= 1
    body = tuple(block[first : last + 1])
    for one in body:
        if not isinstance(one, _SIMPLE):
            kind = type(one).__name__.lower()
            raise NotExpressed(f"its ops lie on both sides of a branch or a loop (`{kind}` at line {one.lineno})")
        if isinstance(one, ast.AnnAssign) and one.value is None:
            raise NotExpressed(f"line {one.lineno} declares a name and computes nothing")
    _refuse_odd(body)
    return _described(function, body)


def _end(statement: ast.stmt) -> int:
    return statement.end_lineno or statement.lineno


def _function(tree: ast.Module, name: str, first: int, last: int) -> _Function:
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, _Function) and node.name == name and node.lineno <= first and last <= _end(node)
    ]
    if not found:
        raise NotExpressed(f"{name} is no function of its file")
    return max(found, key=lambda node: node.lineno)


def _block(function: _Function, lines: Iterable[int]) -> Sequence[ast.stmt]:
    """Return the innermost list of statements that holds all lines."""
    wanted = tuple(lines)
    block: Sequence[ast.stmt] = function.body
    while True:
        inner = [
            nested
            for one in block
            for nested in _blocks(one)
            if nested and all(nested[0].lineno <= line <= _end(nested[-1]) for line in wanted)
        ]
        if not inner:
            return block
        block = inner[0]


def _blocks(statement: ast.stmt) -> list[list[ast.stmt]]:
    if isinstance(statement, _Function | ast.ClassDef):
        return []
    found = [getattr(statement, field, []) for field in ("body", "orelse", "finalbody")]
    return [one for one in found if isinstance(one, list) and one and isinstance(one[0], ast.stmt)]


def _serves_only(before: ast.stmt, body: Sequence[ast.stmt], function: _Function) -> bool:
    """Whether a statement sets names for the following ones alone, without a call."""
    if not isinstance(before, ast.Assign) or any(isinstance(node, ast.Call) for node in ast.walk(before)):
        return False
    names = _stored([before])
    if not all(isinstance(target, ast.Name) for target in before.targets):
        return False
    return bool(names) and names <= _loaded(body) and not names & _used_elsewhere(function, [before, *body])


def _refuse_odd(body: Sequence[ast.stmt]) -> None:
    for one in body:
        for node in ast.walk(one):
            if isinstance(node, ast.Yield | ast.YieldFrom | ast.Await | ast.NamedExpr | ast.Global | ast.Nonlocal):
                raise NotExpressed(f"line {one.lineno} holds a `{type(node).__name__.lower()}`")
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.lineno != node.end_lineno:
                raise NotExpressed(f"line {one.lineno} holds a text of several lines, which cannot be indented")
        targets = one.targets if isinstance(one, ast.Assign) else [getattr(one, "target", None)]
        for target in targets:
            if target is not None and any(isinstance(part, ast.Attribute | ast.Subscript) for part in ast.walk(target)):
                raise NotExpressed(f"line {one.lineno} writes into an object")


def _described(function: _Function, body: tuple[ast.stmt, ...]) -> Statements:
    arguments = function.args
    parameters = [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    parameters += [one.arg for one in (arguments.vararg, arguments.kwarg) if one is not None]
    local = set(parameters) | _stored(function.body)
    owner = "self" if parameters[:1] == ["self"] else ""
    assigned: set[str] = set()
    reads: dict[str, None] = {}
    for one in body:
        reads |= dict.fromkeys(name for name in _in_order(one) if name in local and name not in assigned and name != owner)
        assigned |= _stored([one])
    used = _used_elsewhere(function, body)
    leaves = dict.fromkeys(name for one in body for name in _in_order(one, ast.Store) if name in used)
    return Statements(function=function, body=body, owner=owner, reads=tuple(reads), leaves=tuple(leaves))


def _in_order(statement: ast.stmt, kind: type[ast.expr_context] = ast.Load) -> list[str]:
    names = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
    found = [node for node in names if isinstance(node.ctx, kind)]
    if kind is ast.Load and isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
        found.append(statement.target)
    return [node.id for node in sorted(found, key=lambda node: (node.lineno, node.col_offset))]


def _stored(statements: Sequence[ast.stmt]) -> set[str]:
    nodes = (node for one in statements for node in ast.walk(one) if isinstance(node, ast.Name))
    return {node.id for node in nodes if isinstance(node.ctx, ast.Store)}


def _loaded(statements: Sequence[ast.stmt]) -> set[str]:
    return {name for one in statements for name in _in_order(one)}


def _used_elsewhere(function: _Function, body: Sequence[ast.stmt]) -> set[str]:
    """Return names that the function reads after some statements; in a loop all other statements come after them."""
    inside = {id(node) for one in body for node in ast.walk(one)}
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store)]
    loops = (node for node in ast.walk(function) if isinstance(node, ast.For | ast.AsyncFor | ast.While))
    is_repeated = any(id(node) in inside for loop in loops for node in ast.walk(loop))
    return {node.id for node in names if id(node) not in inside and (is_repeated or node.lineno > _end(body[-1]))}
