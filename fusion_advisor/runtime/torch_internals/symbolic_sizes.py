"""Symbolic sizes: tensors whose dims dynamo keeps open, and what their expressions and guards say."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]  # torch needs it
import torch
from torch.utils._sympy import functions

Expression = Any
"""A sympy expression; equal ones compare equal and hash alike."""
Symbols = Mapping[Any, int]
"""The size that each of dynamo's symbols stands for."""


@contextlib.contextmanager
def ones_among_the_sizes() -> Iterator[None]:
    """Let a size that is open be 1 too: torch would take for granted that it is 2 or more.

    What a model or an op asks of it (a branch on a length of 1) is a guard then. What decides nothing but how a result is laid
    out is not asked.
    """
    # torch installs `patch` on this module when it is imported, where mypy cannot see it.
    with torch.fx.experimental._config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        yield


def leave_open(tensor: torch.Tensor, dims: Iterable[int]) -> None:
    """Let dynamo keep dims of a tensor open when it next traces a call with this very tensor.

    Dynamo refuses the trace where the model fixes one of them. A size that is 1 now cannot stay open.
    """
    for dim in dims:
        torch._dynamo.mark_dynamic(tensor, dim)


def expression_of(size: Any) -> Expression:
    """Return what a size is in dynamo's symbols; a number for one that is fixed."""
    return size.node.expr if isinstance(size, torch.SymInt | torch.SymBool) else size


def symbol_of(size: Any) -> Expression | None:
    """Return the symbol that a size is, by itself; None where it is a number or computed from symbols."""
    found = expression_of(size)
    return found if getattr(found, "is_symbol", False) else None


def is_size(value: object) -> bool:
    """Whether a value is an open size, or computed from some."""
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


def layout_key(value: Any) -> tuple[Any, ...]:
    """Return what is equal for sizes, and for tensors of equal layouts, whether their sizes are open or not; it can be hashed."""
    if not isinstance(value, torch.Tensor):
        return (expression_of(value),)
    sizes = (*value.shape, *value.stride(), value.storage_offset())
    return (value.dim(), *map(expression_of, sizes), value.dtype, value.device)


def is_symbolic(value: object) -> bool:
    """Whether a value is a size, or a tensor with a size, that is no number."""
    if isinstance(value, torch.Tensor):
        return not all(isinstance(one, int) for one in (*value.shape, *value.stride(), value.storage_offset()))
    return is_size(value)


def at_sizes(expression: Expression, symbols: Symbols) -> Any:
    """Return the number or truth value of an expression.

    Args:
        expression: of sizes.
        symbols: all that occur in it.

    Raises:
        ValueError: a symbol has no size.
    """
    if isinstance(expression, bool | int | float):
        return expression
    value = expression.xreplace({symbol: sympy.Integer(size) for symbol, size in symbols.items()})
    if value.is_Boolean:
        if value.free_symbols:
            raise ValueError(f"{value} holds a symbol without a size")
        return bool(value)
    if not value.is_number:
        raise ValueError(f"{value} holds a symbol without a size")
    return int(value) if value.is_integer else float(value)


def computing(expression: Expression, symbols: Sequence[Any]) -> Callable[..., Any]:
    """Return a function of symbols' sizes that computes an expression; it remembers what it computed."""

    @functools.lru_cache(maxsize=4096)
    def size(*sizes: int) -> Any:
        return at_sizes(expression, dict(zip(symbols, sizes, strict=True)))

    def call(*sizes: int) -> Any:
        return size(*sizes)

    call.__name__ = call.__qualname__ = _COMPUTES
    return call


_COMPUTES = "size"


def is_computing(function: object) -> bool:
    """Whether a function is one of :func:`computing`'s."""
    return getattr(function, "__module__", "") == __name__ and getattr(function, "__qualname__", "") == _COMPUTES


def is_inequation(expression: Expression) -> bool:
    """Whether an expression says that two numbers differ."""
    return isinstance(expression, sympy.Ne)


def is_not_one(size: Any) -> Expression:
    """Return the expression that says that a size is not 1; True or False of a number."""
    return sympy.Ne(expression_of(size), 1) if isinstance(size, torch.SymInt) else size != 1


def symbols_in(expression: Expression) -> set[Any]:
    """Return the symbols of an expression."""
    return set() if isinstance(expression, bool | int | float) else set(expression.free_symbols)


def environment_of(values: Sequence[object]) -> Any | None:
    """Return dynamo's environment of symbols that some values belong to; None where all are fixed."""
    for value in values:
        sizes = (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,)
        for size in sizes:
            if isinstance(size, torch.SymInt):
                return size.node.shape_env
    return None


def range_of(environment: Any, symbol: Any) -> tuple[int, int]:
    """Return the least and the most that dynamo knows of a symbol; a bound that it does not know is -1."""
    bounds = environment.var_to_range[symbol]
    least, most = (int(bound) if isinstance(bound, sympy.Integer) else -1 for bound in (bounds.lower, bounds.upper))
    return least, most


def guards_of(environment: Any) -> list[Expression]:
    """Return what dynamo took for granted of the sizes while it traced, as expressions that must be true."""
    found = [guard.expr for guard in environment.guards]
    return list(dict.fromkeys(found))


def assumption_count(environment: Any) -> tuple[int, int]:
    """Return how many guards and how many replacements of symbols there are: either grows when a size is looked at."""
    return len(environment.guards), len(environment.replacements)


def why_fixed(error: Exception) -> str | None:
    """Return why a trace was refused where it is because the model fixes a size that was to stay open."""
    from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

    if not isinstance(error, ConstraintViolationError):
        return None
    lines = [line.strip(" -") for line in str(error).splitlines() if line.strip().startswith("-")]
    fixed = re.search(r"L\[(.+?)\]\.size\(\)\[(\d+)\].*constant \((\d+)\)", lines[0] if lines else "")
    if fixed is not None:
        tensor = fixed[1].replace("']['", ".").replace("'", "")
        return f"the model takes size {fixed[3]} of `{tensor}`, dim {fixed[2]}, for a constant"
    return lines[0] if lines else str(error).splitlines()[0]


# -- in plain data, and back -------------------------------------------------------------------------------------------------

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
