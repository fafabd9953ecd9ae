"""Symbolic sizes as plain data, and from it: expressions without text that is run, symbols in an environment of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
from torch.utils._sympy import functions

from fusion_advisor.runtime.torch_internals.symbolic_sizes import Expression, at_sizes, expression_of

_PARTS = {
    f"{one.__module__.partition('.')[0]}.{one.__name__}": one
    for one in (
        sympy.Add, sympy.Mul, sympy.Min, sympy.Max, sympy.Eq, sympy.Ne, sympy.Lt, sympy.Le, sympy.Gt, sympy.Ge,
        sympy.And, sympy.Or, sympy.Not, functions.FloorDiv, functions.CleanDiv, functions.Mod, functions.PythonMod,
        functions.ModularIndexing, functions.Min, functions.Max,
    )
}  # fmt: skip
_POWER = "power"
_MOST_POWER = 8
"""A larger one is no size of a tensor, and may take for ever to compute."""


def plain(expression: Expression, symbols: Sequence[Any]) -> Any:
    """Return an expression as plain data: a number, or a name with its parts.

    Args:
        expression: of sizes.
        symbols: a symbol is written as its place among them.

    Raises:
        ValueError: it holds a symbol that is not among them, or a function that is not known here.
    """
    if isinstance(expression, bool | int):
        return expression
    if isinstance(expression, sympy.Integer):
        return int(expression)
    if expression in (sympy.true, sympy.false):
        return bool(expression)
    if expression in symbols:
        return ["", symbols.index(expression)]
    if isinstance(expression, sympy.Pow) and expression.exp in range(2, _MOST_POWER + 1):
        return [_POWER, plain(expression.base, symbols), int(expression.exp)]
    kind = type(expression)
    name = f"{kind.__module__.partition('.')[0]}.{kind.__name__}"
    if _PARTS.get(name) is not kind:
        raise ValueError(f"a size like {expression}")
    return [name, *(plain(part, symbols) for part in expression.args)]


def expression_from(data: Any, symbols: Sequence[Any]) -> Expression:
    """Return the expression that :func:`plain` wrote; no text is evaluated.

    Args:
        data: from whoever wrote a file.
        symbols: by place.

    Raises:
        LookupError, TypeError, ValueError: it is no such data.
    """
    if isinstance(data, bool):
        return sympy.true if data else sympy.false
    if isinstance(data, int):
        return sympy.Integer(data)
    name, *parts = data
    if name == "":
        (place,) = parts
        return symbols[range(len(symbols)).index(place)]
    if name == _POWER:
        base, exponent = parts
        if exponent not in range(2, _MOST_POWER + 1):
            raise ValueError(f"a power of {exponent!r:.20}")
        return expression_from(base, symbols) ** exponent
    return _PARTS[name](*(expression_from(part, symbols) for part in parts))


@dataclass(frozen=True, slots=True)
class OpenSizes:
    """Symbols in an environment of their own.

    Attributes:
        environment: where they live.
        symbols: in order.
        now: the size that each has in one call.
    """

    environment: Any
    symbols: tuple[Any, ...]
    now: tuple[int, ...]

    def expression(self, data: Any) -> Expression:
        """Return an expression from plain data."""
        return expression_from(data, self.symbols)

    def size(self, data: Any) -> Any:
        """Return a size from plain data, open where it is no number.

        Raises:
            LookupError, TypeError, ValueError: it is none.
        """
        if type(data) is int:
            return data
        expression = self.expression(data)
        if _is_truth(expression):
            raise ValueError(f"a truth value for a size, {expression}")
        return self.environment.create_symintnode(expression, hint=self.number(data))

    def truth(self, data: Any) -> Any:
        """Return a truth value from plain data, open where it follows from sizes.

        Raises:
            LookupError, TypeError, ValueError: it is none.
        """
        expression = self.expression(data)
        if not _is_truth(expression):
            raise ValueError(f"a number for a truth value, {expression}")
        return self.environment.create_symboolnode(expression) if expression.free_symbols else bool(expression)

    def number(self, data: Any) -> int:
        """Return what a size is in the one call.

        Raises:
            LookupError, TypeError, ValueError: it is none.
        """
        if type(data) is int:
            return data
        found = at_sizes(self.expression(data), dict(zip(self.symbols, self.now, strict=True)))
        if type(found) is not int:
            raise ValueError(f"a size of {found}")
        return found

    def number_of(self, size: Any) -> Any:
        """Return what an open size is in the one call; another size as it is."""
        return at_sizes(expression_of(size), dict(zip(self.symbols, self.now, strict=True)))

    def unguarded(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which no question about a size becomes a guard: the layouts are those of a trace."""
        suppressed: contextlib.AbstractContextManager[None] = self.environment.suppress_guards()
        return suppressed


def _is_truth(expression: Expression) -> bool:
    """Whether an expression is a truth value; a symbol of sympy's may be one, and none of dynamo's is."""
    return isinstance(expression, sympy.logic.boolalg.Boolean) and not expression.is_symbol


def open_sizes(now: Sequence[int], bounds: Sequence[tuple[int, int]], guards: Sequence[Any]) -> OpenSizes:
    """Make symbols for sizes, of which as much is known as was of others.

    Args:
        now: the size of each in one call.
        bounds: the least and the most of each, -1 where it is not known: see :func:`range_of`.
        guards: what was taken for granted of them, in plain data.

    Raises:
        LookupError, TypeError, ValueError: what was taken for granted is not true of that call.
    """
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    environment = ShapeEnv()
    symbols = tuple(
        environment.create_symbol(
            size, ConstantSource(f"size{place}"), dynamic_dim=DimDynamic.DYNAMIC, do_not_specialize_zero_one=True
        )
        for place, size in enumerate(now)
    )
    known = [symbol >= least for symbol, (least, _) in zip(symbols, bounds, strict=True) if least > 0]
    known += [symbol <= most for symbol, (_, most) in zip(symbols, bounds, strict=True) if most >= 0]
    for one in (*known, *(expression_from(guard, symbols) for guard in guards)):
        if not environment.evaluate_expr(one):
            raise ValueError(f"{one} is not true of {now}")
    return OpenSizes(environment, symbols, tuple(now))
