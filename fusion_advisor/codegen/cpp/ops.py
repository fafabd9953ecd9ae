"""C++ expressions that know how tightly they bind, and which prelude functions they call."""

from __future__ import annotations

import math
from dataclasses import dataclass

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

REALS = ("float32", "float64")
WRAPPING = frozenset({"add", "sub", "mul", "neg", "abs"})
"""Ops whose integer results may not fit 64 bits: a signed overflow is undefined in C++, so helpers compute them unsigned."""

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
    """The dtype in which values of ``dtype`` are computed: float32 for half floats."""
    return "float32" if dtype in HALVES else dtype


def literal(constant: float | int | bool | None, dtype: str) -> Expr:
    """Print a constant as a literal of its type."""
    if constant is None:
        raise ValueError("a const value without a constant")
    compute_dtype = computed_in(dtype)
    if compute_dtype == "bool":
        return Expr("true" if constant else "false")
    if compute_dtype not in ("float32", "float64"):
        number = int(constant)
        if number == -(2**63):
            return Expr("INT64_MIN")
        return Expr(str(number) if compute_dtype != "int64" else f"int64_t{{{number}}}")
    number_f = float(constant)
    limit = 3.4028235677973366e38 if compute_dtype == "float32" else math.inf  # from here on a float32 rounds to Inf
    if math.isnan(number_f):
        return Expr("NAN")
    if abs(number_f) >= limit:
        return Expr("-INFINITY", UNARY) if number_f < 0 else Expr("INFINITY")
    text = repr(number_f) + ("f" if compute_dtype == "float32" else "")
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
