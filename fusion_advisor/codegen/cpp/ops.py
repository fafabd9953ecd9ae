"""C++ for one IR operation: expressions that know how tightly they bind, and which prelude functions they call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fusion_advisor.ir.program import Value

C_TYPES = {
    "float64": "double", "float32": "float", "float16": "uint16_t", "bfloat16": "uint16_t", "int64": "int64_t",
    "int32": "int32_t", "int16": "int16_t", "int8": "int8_t", "uint8": "uint8_t", "bool": "bool",
}  # fmt: skip
"""How a tensor's element is declared; the two half floats are converted by hand, so that loops over them vectorise."""

HALVES = {"float16": "fp16", "bfloat16": "bf16"}

# How tightly an expression binds, tightest first; a looser operand gets parentheses.
ATOM, UNARY, PRODUCT, SUM, COMPARE, TERNARY = 9, 8, 7, 6, 5, 1

_PRELUDE_CALLS = {
    "fa_from_bf16": ("fa_bits",),
    "fa_to_bf16": ("fa_bits",),
    "fa_from_fp16": ("fa_bits",),
    "fa_to_fp16": ("fa_bits",),
    "fa_round_bf16": ("fa_from_bf16", "fa_to_bf16"),
    "fa_round_fp16": ("fa_from_fp16", "fa_to_fp16"),
    "fa_expm1_core": ("fa_bits", "fa_fma"),
    "fa_scale": ("fa_expm1_core",),
    "fa_exp": ("fa_scale",),
    "fa_exp2": ("fa_scale",),
    "fa_expm1": ("fa_expm1_core",),
    "fa_tanh": ("fa_expm1_core",),
    "fa_sigmoid": ("fa_exp",),
    "fa_erf": ("fa_expm1_core",),
    "fa_erfc": ("fa_exp",),
    "fa_log": ("fa_bits", "fa_fma"),
    "fa_log1p": ("fa_log",),
    "fa_wrapping_abs": ("fa_wrapping_neg",),
}

_INFIX = {
    "add": ("+", SUM),
    "sub": ("-", SUM),
    "mul": ("*", PRODUCT),
    "div": ("/", PRODUCT),
    "eq": ("==", COMPARE),
    "ne": ("!=", COMPARE),
    "lt": ("<", COMPARE),
    "le": ("<=", COMPARE),
    "gt": (">", COMPARE),
    "ge": (">=", COMPARE),
}
COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
# `&` and `|` on bool rather than `&&` and `||`: without a branch the loop vectorises.
_WRAPPING = frozenset({"add", "sub", "mul", "neg", "abs"})
_BITWISE = {"and": "&", "or": "|", "xor": "^"}
_STD = {"sqrt": "sqrt", "sin": "sin", "cos": "cos", "floor": "floor", "ceil": "ceil", "trunc": "trunc", "round": "rint"}
_OWN_FOR_FLOAT = frozenset({"exp", "exp2", "expm1", "log", "log1p", "tanh", "erf"})
_OWN = {"maximum": "fa_max", "minimum": "fa_min", "remainder": "fa_remainder", "sign": "fa_sign", "sigmoid": "fa_sigmoid",
        "round_bfloat16": "fa_round_bf16", "round_float16": "fa_round_fp16"}  # fmt: skip

COST = {
    **dict.fromkeys(("exp", "exp2", "expm1", "log", "log1p", "tanh", "sigmoid", "erf", "erfc"), 12),
    **dict.fromkeys(("sin", "cos", "pow", "remainder", "dropout"), 40),
    **dict.fromkeys(("div", "sqrt", "rsqrt", "reciprocal", "round_float16"), 4),
    "quotient": 12,
    **dict.fromkeys(("const", "size", "index", "extent"), 0),
}
"""What an op costs next to an addition, roughly; it decides what is recomputed and when threads pay."""


@dataclass(frozen=True, slots=True)
class Expr:
    """C++ text and how tightly it binds."""

    text: str
    rank: int = ATOM

    def at(self, rank: int) -> str:
        """The text as an operand of something that binds at ``rank``."""
        return self.text if self.rank >= rank else f"({self.text})"


class Prelude:
    """The prelude functions that a kernel calls, with what those call."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def call(self, name: str, *args: Expr) -> Expr:
        """Call a prelude function, which is then printed above the kernel."""
        self.need(name)
        return Expr(f"{name}({', '.join(a.text for a in args)})")

    def need(self, name: str) -> None:
        """Have a function printed, and those it calls."""
        self.names.add(name)
        for callee in _PRELUDE_CALLS.get(name, ()):
            self.need(callee)


def computed_in(dtype: str) -> str:
    """The dtype in which values of ``dtype`` are held: a half float is held as float32."""
    return "float32" if dtype in HALVES else dtype


def literal(constant: float | int | bool | None, dtype: str) -> Expr:
    """Print a constant as a literal of its type."""
    if constant is None:
        raise ValueError("a const value without a constant")
    held = computed_in(dtype)
    if held == "bool":
        return Expr("true" if constant else "false")
    if held not in ("float32", "float64"):
        number = int(constant)
        if number == -(2**63):
            return Expr("INT64_MIN")
        return Expr(str(number) if held != "int64" else f"int64_t{{{number}}}")
    number_f = float(constant)
    limit = 3.4028235677973366e38 if held == "float32" else math.inf  # from here on a float32 rounds to Inf
    if math.isnan(number_f):
        return Expr("NAN")
    if abs(number_f) >= limit:
        return Expr("-INFINITY", UNARY) if number_f < 0 else Expr("INFINITY")
    text = repr(number_f) + ("f" if held == "float32" else "")
    return Expr(text, UNARY if text.startswith("-") else ATOM)


def convert(expr: Expr, source: str, target: str, prelude: Prelude) -> Expr:
    """Convert between storage dtypes (loads and stores) and compute dtypes."""
    if source in HALVES:
        expr, source = prelude.call(f"fa_from_{HALVES[source]}", expr), "float32"
    if source == target:
        return expr
    if target in HALVES:
        return prelude.call(f"fa_to_{HALVES[target]}", convert(expr, source, "float32", prelude))
    if target == "bool":
        return Expr(f"{expr.at(SUM)} != 0", COMPARE)
    if source in ("float32", "float64") and target not in ("float32", "float64"):
        whole = prelude.call("fa_to_int64", expr)  # a cast of what int64 cannot hold is undefined
        return convert(whole, "int64", target, prelude)
    return Expr(f"static_cast<{C_TYPES[target]}>({expr.text})")


def operation(
    value: Value,
    args: Sequence[Expr],
    dtypes: Sequence[str],
    constants: Sequence[Value],
    prelude: Prelude,
    *,
    may_wrap: bool = False,
) -> Expr:
    """Print an arithmetic, comparison or logic op, or a cast.

    Args:
        value: the op.
        args: its printed arguments.
        dtypes: the dtypes that they are held in.
        constants: the argument values themselves; a constant exponent picks a cheaper power.
        prelude: takes note of the functions called.
        may_wrap: whether the result is an integer that may not fit 64 bits: a signed overflow is undefined in C++.
    """
    op, held = value.op, computed_in(value.dtype)
    if op == "cast":
        if value.dtype in HALVES:
            half = convert(args[0], dtypes[0], value.dtype, prelude)
            return convert(half, value.dtype, "float32", prelude)
        return convert(args[0], dtypes[0], held, prelude)
    if op == "where":
        chosen = [convert(a, d, held, prelude) for a, d in zip(args[1:], dtypes[1:], strict=True)]
        return Expr(f"{args[0].at(COMPARE)} ? {chosen[0].at(TERNARY + 1)} : {chosen[1].at(TERNARY + 1)}", TERNARY)
    if op == "quotient":
        return Expr(f"{args[0].at(PRODUCT)} / {args[1].at(ATOM)}", PRODUCT)
    if op == "isnan":
        return Expr(f"std::isnan({args[0].text})") if dtypes[0] in ("float32", "float64") else Expr("false")
    if op == "not":
        return Expr(f"{'!' if held == 'bool' else '~'}{args[0].at(UNARY)}", UNARY)
    if op not in COMPARISONS:
        args = [convert(a, d, held, prelude) for a, d in zip(args, dtypes, strict=True)]
    if may_wrap and op in _WRAPPING:
        return prelude.call(f"fa_wrapping_{op}", *args)
    if op in _INFIX:
        sign, rank = _INFIX[op]
        # The right operand keeps its parentheses at equal rank: floating point does not associate.
        return Expr(f"{args[0].at(rank)} {sign} {args[1].at(rank + 1)}", rank)
    if op in _BITWISE:
        return Expr(f"{args[0].at(UNARY)} {_BITWISE[op]} {args[1].at(UNARY)}", TERNARY + 1)
    if op == "neg":
        return Expr(f"-{args[0].at(ATOM)}", UNARY)
    if op == "pow":
        return _power(held, args, constants[1], prelude)
    one = literal(1, held).text
    if op == "rsqrt":
        return Expr(f"{one} / std::sqrt({args[0].text})", PRODUCT)
    if op == "reciprocal":
        return Expr(f"{one} / {args[0].at(PRODUCT + 1)}", PRODUCT)
    if op == "abs":
        return Expr(f"std::{'fabs' if held in ('float32', 'float64') else 'abs'}({args[0].text})")
    if op in ("floor", "ceil", "trunc", "round") and held not in ("float32", "float64"):
        return args[0]
    if op in ("maximum", "minimum") and constants[1].op == "const":
        args = args[::-1]  # of two zeros eager's vectorised relu and clamp take the element's, and the helpers take the second
    if op in _OWN:
        return prelude.call(_OWN[op], *args)
    if op in _OWN_FOR_FLOAT and held == "float32":
        return prelude.call(f"fa_{op}", *args)
    if op == "erfc":
        if held == "float32" and value.constant:  # 1 + erf: erfc's own digits would make GELU 1.7 times as slow
            return Expr(f"{one} - {prelude.call('fa_erf', *args).text}", SUM)
        if held == "float32":
            return prelude.call("fa_erfc", *args)
        return Expr(f"std::erfc({args[0].text})")
    if op in _STD or op in _OWN_FOR_FLOAT:
        return Expr(f"std::{_STD.get(op, op)}({args[0].text})")
    raise ValueError(f"the C++ backend has no word for the op {op!r}")


def _power(held: str, args: Sequence[Expr], exponent: Value, prelude: Prelude) -> Expr:
    base = args[0]
    fixed = exponent.constant if exponent.op == "const" else None
    if fixed in (2, 3) and not isinstance(fixed, bool):
        if held in ("float32", "float64"):
            return prelude.call("fa_square" if fixed == 2 else "fa_cube", base)
        square = prelude.call("fa_wrapping_mul", base, base)
        return square if fixed == 2 else prelude.call("fa_wrapping_mul", square, base)
    if held not in ("float32", "float64"):
        return prelude.call("fa_ipow", *args)
    one = literal(1, held).text
    if fixed == 0.5:
        return Expr(f"std::sqrt({base.text})")
    if fixed == -0.5:
        return Expr(f"{one} / std::sqrt({base.text})", PRODUCT)
    if fixed == -1:
        return Expr(f"{one} / {base.at(PRODUCT + 1)}", PRODUCT)
    return Expr(f"std::pow({base.text}, {args[1].text})")
