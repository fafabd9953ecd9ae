"""Symbolic sizes: tensors whose dims dynamo keeps open, and what their expressions and guards say."""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch

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


def at_example(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor without numbers that lies as a value does in the captured call, for choices that are right at any size.

    Dynamo notes nothing of the sizes that are asked for so.

    Args:
        value: a fake tensor; one of fixed sizes is returned as it is.
    """
    if not is_symbolic(value):
        return value
    shape, stride = ([*map(_number_of, sizes)] for sizes in (value.shape, value.stride()))
    return torch.empty_strided(shape, stride, dtype=value.dtype, device="meta")


def _number_of(size: Any) -> int:
    number: int = size.node.hint if isinstance(size, torch.SymInt) else size
    return number


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
    plain = _plain_value(expression, symbols)
    if plain is not None:
        return plain
    value = expression.xreplace({symbol: sympy.Integer(size) for symbol, size in symbols.items()})
    if value.is_Boolean:
        if value.free_symbols:
            raise ValueError(f"{value} holds a symbol without a size")
        return bool(value)
    if not value.is_number:
        raise ValueError(f"{value} holds a symbol without a size")
    return int(value) if value.is_integer else float(value)


def _plain_value(expression: Expression, symbols: Symbols) -> int | bool | None:
    """Return the value of what is made of symbols and integers by the usual operations, comparisons among them; None of all else.

    Nearly all sizes and guards are such, and sympy takes 60 to 300 µs for one. The first call at new sizes asks for about 40.
    """
    if expression.is_Symbol:
        return symbols.get(expression)
    if expression.is_Integer:
        return int(expression)
    function = _FUNCTIONS.get(type(expression).__name__)
    if not (function or expression.is_Add or expression.is_Mul or expression.is_Pow or expression.is_Relational):
        return None
    values = [_plain_value(one, symbols) for one in expression.args]
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    if function is not None:
        return function(known)
    if expression.is_Relational:
        compare = _COMPARISONS.get(expression.rel_op)
        return None if compare is None else compare(*known)
    if expression.is_Pow:
        base, exponent = known
        return int(base**exponent) if exponent >= 0 else None
    return sum(known) if expression.is_Add else math.prod(known)


_COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


def _of_two(call: Callable[[int, int], int]) -> Callable[[Sequence[int]], int | None]:
    """Leave what is divided by zero, or by less, to sympy."""
    return lambda values: call(*values) if len(values) == 2 and values[1] > 0 else None


_FUNCTIONS: Mapping[str, Callable[[Sequence[int]], int | bool | None]] = {
    "Min": min, "Max": max, "And": all, "Or": any, "Not": lambda values: not values[0],
    "FloorDiv": _of_two(operator.floordiv), "CeilDiv": _of_two(lambda size, by: -(-size // by)),
    "PythonMod": _of_two(operator.mod),
}  # fmt: skip
"""By the names of sympy's classes and of torch's."""


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


def written_out(expression: Expression, replaced: Mapping[Any, Any]) -> Expression:
    """Return an expression as a sum of products, so that equal ones are written alike.

    Args:
        expression: of sizes; a number is its own.
        replaced: expressions that are others.
    """
    if isinstance(expression, bool | int | float):
        return expression
    return _written_out(expression, tuple(replaced.items()))


@functools.lru_cache(maxsize=4096)
def _written_out(expression: Any, replaced: tuple[tuple[Any, Any], ...]) -> Expression:
    whole = expression.xreplace(dict(replaced)).replace(_is_division, _divided)
    found = sympy.expand(whole)
    return int(found) if found.is_Integer else found


def _is_division(expression: Any) -> bool:
    return type(expression).__name__ == "FloorDiv"


def _divided(expression: Any) -> Any:
    """Return what a size is divided by another one, where nothing is left; torch leaves (s * s) // s as it is."""
    found = quotient(*expression.args)
    return expression if found is None else sympy.sympify(found)


@functools.lru_cache(maxsize=4096)
def quotient(size: Expression, by: Expression) -> Expression | None:
    """Return what a size is times another one; None where it is no whole number of times for all sizes."""
    if isinstance(size, int) and isinstance(by, int):
        return size // by if by and size % by == 0 else None
    found = sympy.cancel(sympy.sympify(size) / sympy.sympify(by))
    top, bottom = sympy.fraction(sympy.together(found))
    if bottom != 1:
        return None
    found = sympy.expand(top)
    return int(found) if found.is_Integer else found


def is_at_least(expression: Expression, least: int) -> bool:
    """Whether an expression is a number or more at all sizes; False where that cannot be told."""
    return bool(sympy.sympify(expression - least).is_nonnegative)


def equalities_of(guards: Iterable[Expression]) -> dict[Any, Any]:
    """Return which computed sizes are others by what was taken for granted: Min(64, s) is s where the model has 64 positions."""
    pairs = [(guard.lhs, guard.rhs) for guard in guards if isinstance(guard, sympy.Eq)]
    whole = [(one, other) if other.is_symbol else (other, one) for one, other in pairs if one.is_symbol or other.is_symbol]
    return {one: other for one, other in whole if not one.is_symbol}


def rises(expression: Expression, symbols: Collection[Any]) -> bool:
    """Whether a size never shrinks where symbols grow; False where that cannot be told."""
    if isinstance(expression, int) or not symbols_in(expression) & set(symbols):
        return True
    parts = expression.args
    if not parts:
        return True
    is_first_alone = type(expression).__name__ in ("FloorDiv", "CeilDiv") or (expression.is_Pow and parts[1].is_nonnegative)
    if is_first_alone:
        return rises(parts[0], symbols) and not symbols_in(parts[1]) & set(symbols) and bool(parts[1].is_nonnegative)
    if expression.is_Mul and not all(part.is_nonnegative for part in parts):
        return False
    is_known = expression.is_Add or expression.is_Mul or type(expression).__name__ in ("Min", "Max")
    return is_known and all(rises(part, symbols) for part in parts)


def symbols_under(size: object) -> set[Any]:
    """Return the symbols that a size, or a number computed from sizes, depends on; none of anything else."""
    return set(size.node.expr.free_symbols) if isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool) else set()


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


def assumptions_of(environment: Any) -> frozenset[Any]:
    """Return what dynamo takes for granted of the sizes: guards, and symbols that it has replaced.

    Either grows when an op or a pass looks at a size. What is asked for once more is no further one.
    """
    return frozenset((*guards_of(environment), *environment.replacements))


def is_true_within(assumption: Expression, ranges: Mapping[Any, tuple[int, int]]) -> bool:
    """Whether a guard is known to be true of all sizes in some ranges. Of a symbol that dynamo replaced nothing is known.

    Args:
        assumption: one of :func:`assumptions_of`.
        ranges: the least and the largest size of each symbol.
    """
    from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

    if not getattr(assumption, "is_Relational", False) or not symbols_in(assumption) <= ranges.keys():
        return False
    return bound_sympy(assumption, {one: ValueRanges(*ends) for one, ends in ranges.items()}).lower is sympy.true


def why_fixed(error: Exception) -> str | None:
    """Return why a trace was refused where it is because the model fixes a size that was to stay open."""
    from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

    if not isinstance(error, ConstraintViolationError):
        return None
    lines = [line.strip(" -") for line in str(error).splitlines() if line.strip().startswith("-")]
    fixed = re.search(r"L(\[.+?)\.size\(\)\[(\d+)\].*constant \((\d+)\)", lines[0] if lines else "")
    if fixed is not None:
        tensor = re.sub(r"\['(\w+)'\]", r".\1", fixed[1]).removeprefix(".").removeprefix("kwargs.")
        return f"the model takes size {fixed[3]} of `{tensor}`, dim {fixed[2]}, for a constant"
    return lines[0] if lines else str(error).splitlines()[0]
