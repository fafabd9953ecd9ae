"""GELU in a kernel with 16-bit results, recognised in the arithmetic that ``lower`` and models write it in.

``x * 0.5 * erfc(-x / sqrt(2))`` becomes ``x * normal_cdf(x)``, and ``x * sigmoid(k * (x + c * x**3))`` becomes
``x * tanh_cdf(x)``. GELU's gradient has both functions without the factor x. They are one short helper each, good to what 16 bits
can tell (``templates/*/helpers*``); the arithmetic written out takes half as many instructions again, and issue slots, not
memory, were what such kernels waited for.
"""

from __future__ import annotations

import math
from dataclasses import replace

from fusion_advisor.codegen.common.printer_rows import jumps_after_function
from fusion_advisor.ir.program import HALF, Program, Value, result_dtypes

_INNER, _CUBIC = math.sqrt(8 / math.pi), 0.044715
_EXACT = 1e-6
"""Models write the constants with seven digits or more."""


def with_cdfs(program: Program) -> Program:
    """The same Program with GELU's two functions as values of their own; what only their arithmetic used is left unused.

    Args:
        program: numbers of its values stay what they are.
    """
    if program.siblings or program.is_exact or not result_dtypes(program) <= HALF or jumps_after_function(program):
        return program
    values = list(program.values)
    stored = [number for store in program.stores for number in store.needs]
    users = [sum(number in value.args for value in values) + stored.count(number) for number in range(len(values))]
    for number, value in enumerate(program.values):
        if value.op != "mul" or value.dtype != "float32":
            continue
        scale, factors = _factors(program.values, number, users, is_whole=True)
        cdfs = [n for n in factors if program.values[n].op in ("erfc", "sigmoid") and users[n] == 1]
        if len(cdfs) != 1 or len(factors) > 2:
            continue
        cdf, others = cdfs[0], [factor for factor in factors if factor != cdfs[0]]
        found = _of_erfc(program.values, cdf) if program.values[cdf].op == "erfc" else _of_sigmoid(program.values, cdf)
        own = [(op, variable) for op, variable, times in found if _is_own(program.values, others, variable, scale * times)]
        if own and others:
            values[cdf] = replace(values[cdf], op=own[0][0], args=(own[0][1],))
            values[number] = replace(value, args=(own[0][1], cdf))
        elif own:  # in the gradient the function stands alone
            values[number] = replace(value, op=own[0][0], args=(own[0][1],))
    return replace(program, values=tuple(_without_product(program.values, number, v) for number, v in enumerate(values)))


def _without_product(values: tuple[Value, ...], number: int, now: Value) -> Value:
    """A sigmoid of GELU's cubic that stands in no product with its variable, as the function."""
    found = _of_sigmoid(values, number) if now.op == "sigmoid" and now.dtype == "float32" else []
    return replace(now, op=found[0][0], args=(found[0][1],)) if found else now


def _is_own(values: tuple[Value, ...], others: list[int], variable: int, scale: float) -> bool:
    """Whether a product's other factors and its constant are the function's own variable, or neither is there."""
    own_scale, own = _scaled(values, variable) if others else (1.0, -1)
    return others in ([], [own]) and math.isclose(scale, own_scale, rel_tol=_EXACT)


def _of_erfc(values: tuple[Value, ...], number: int) -> list[tuple[str, int, float]]:
    """Of ``erfc(-x / sqrt(2))``, which is twice the distribution function at x: the function, x, and how often it is taken."""
    factor, variable = 1.0, values[number].args[0]
    while step := _split(values, variable):
        variable, times = step
        factor *= times
        if math.isclose(factor, -math.sqrt(0.5), rel_tol=_EXACT):
            return [("normal_cdf", variable, 2.0)]
    return []


def _of_sigmoid(values: tuple[Value, ...], number: int) -> list[tuple[str, int, float]]:
    """The same of a sigmoid, for every value that its argument is GELU's cubic of."""
    found = []
    for variable in sorted(_ancestors(values, number)):
        cubic = _polynomial(values, values[number].args[0], variable)
        if cubic is None or set(cubic) != {1, 3} or not math.isclose(cubic[1], _INNER, rel_tol=_EXACT):
            continue
        if math.isclose(cubic[3], _INNER * _CUBIC, rel_tol=_EXACT):
            found.append(("tanh_cdf", variable, 1.0))
    return found


def _split(values: tuple[Value, ...], number: int) -> tuple[int, float] | None:
    """The value that this one is a constant times, and the constant."""
    value = values[number]
    if value.op == "neg":
        return value.args[0], -1.0
    for kept, other in (value.args, value.args[::-1]) if value.op == "mul" else (value.args,) if value.op == "div" else ():
        if values[other].op == "const" and (constant := float(values[other].constant or 0.0)):
            return kept, constant if value.op == "mul" else 1 / constant
    return None


def _scaled(values: tuple[Value, ...], number: int) -> tuple[float, int]:
    """A value as a constant times another one."""
    step = _split(values, number)
    if step is None:
        return 1.0, number
    inner, rest = _scaled(values, step[0])
    return step[1] * inner, rest


def _factors(values: tuple[Value, ...], number: int, users: list[int], *, is_whole: bool = False) -> tuple[float, list[int]]:
    """A value as a constant times others; a product that something else needs too is one of those, unless it is the whole."""
    step, value = _split(values, number), values[number]
    if step is not None:
        scale, found = _factors(values, step[0], users)
        return scale * step[1], found
    if value.op == "mul" and (is_whole or users[number] == 1):
        (left, ours), (right, theirs) = (_factors(values, arg, users) for arg in value.args)
        return left * right, ours + theirs
    return 1.0, [number]


def _ancestors(values: tuple[Value, ...], number: int) -> set[int]:
    found, waiting = set[int](), list(values[number].args)
    while waiting:
        arg = waiting.pop()
        if arg not in found and values[arg].op != "const":
            found.add(arg)
            waiting += values[arg].args
    return found


def _polynomial(values: tuple[Value, ...], number: int, variable: int) -> dict[int, float] | None:
    """Coefficients by power of a value that is made of one other by sums and products alone; None where it is not."""
    value = values[number]
    if number == variable:
        return {1: 1.0}
    if value.op == "const":
        return {0: float(value.constant or 0.0)}
    if value.op not in ("add", "mul") or number < variable:
        return None
    left, right = (_polynomial(values, arg, variable) for arg in value.args)
    if left is None or right is None or max(left) + max(right) > 6:
        return None
    total: dict[int, float] = {}
    if value.op == "add":
        for power in left.keys() | right.keys():
            total[power] = left.get(power, 0.0) + right.get(power, 0.0)
    else:
        for a, one in left.items():
            for b, other in right.items():
                total[a + b] = total.get(a + b, 0.0) + one * other
    return {power: factor for power, factor in total.items() if factor} or {0: 0.0}
