"""How the ops of the kernel IR are written in CUDA C++.

Columns are handled in packs of ``VEC`` neighbours. A value that varies over columns is computed per lane of a pack,
inside the lane loop; a load along contiguous columns is one pack (a 16-byte access where it is aligned and complete),
any other load is read per lane.
"""

from __future__ import annotations

import math

from fusion_advisor.library.expressions import ATOM, LOOSE, SUM, UNARY, Text, Unsupported, Writer
from fusion_advisor.library.program import Value
from fusion_advisor.library.schedule import Access, Schedule

SCALARS = {
    "float64": "double", "float32": "float", "float16": "half_bits", "bfloat16": "bfloat16_bits", "int64": "long long",
    "int32": "int", "int16": "short", "int8": "signed char", "uint8": "unsigned char", "bool": "bool",
}  # fmt: skip
COMPUTE = {"float32": "float", "float64": "double", "int64": "long long", "bool": "bool"}
_MATH = {"exp", "exp2", "log", "log1p", "expm1", "sqrt", "rsqrt", "tanh", "erf", "sin", "cos", "pow", "floor", "ceil", "trunc"}
_FAST = {"exp": "__expf", "log": "__logf", "sin": "__sinf", "cos": "__cosf", "tanh": "fast_tanh", "sqrt": "fast_sqrt"}
_HELPERS = {"maximum": "nan_max", "minimum": "nan_min", "sigmoid": "sigmoid", "remainder": "remainder_of", "sign": "sign_of"}


class CudaWriter(Writer):
    """Prints values as CUDA C++.

    Attributes:
        packs: the loads that are read as packs, with the name of the pack.
    """

    helper_names = frozenset({*_MATH, *_HELPERS.values(), *_FAST.values(), "Pack", "wide", "narrow", "lanes_before", "load_pack",
                              "store_pack", "row_reduce", "lane", "lanes", "first", "p", "index_t", "fabs", "rint", "fmod",
                              "VEC", "PACKS", "THREADS", "ROWS", "half_bits", "bfloat16_bits", "signbit"})  # fmt: skip

    def __init__(self, plan: Schedule, *, fast_math: bool) -> None:
        self.packs: dict[int, str] = {}
        super().__init__(plan, fast_math=fast_math)

    def literal(self, value: Value) -> str:
        """A C++ literal."""
        constant = value.constant
        if value.dtype == "bool":
            return "true" if constant else "false"
        if value.dtype == "int64":
            whole = int(constant or 0)
            return str(whole) if abs(whole) < 2**31 else f"{whole}LL"
        number, suffix = float(constant or 0.0), "f" if value.dtype == "float32" else ""
        if value.dtype == "float32" and math.isfinite(number) and abs(number) > 3.4028235677973366e38:
            number = math.copysign(math.inf, number)  # what rounding it to float32 gives
        if math.isfinite(number):
            return f"{number!r}{suffix}"
        name = ("NAN_VALUE" if math.isnan(number) else "INF_VALUE") + suffix.upper()
        self.helpers.add(name)
        return f"-{name}" if number < 0 else name

    def load(self, number: int, value: Value, access: Access) -> str:
        """A lane of a pack, or an element read by itself."""
        if self._is_pack(value, access):
            self.packs[number] = self.fresh(f"{self._nouns[number]}_pack")
            return self.widened(f"{self.packs[number]}[lane]", access.operand.dtype, value.dtype)
        code = self.widened(f"{self.base(access)}[{self.element(access)}]", access.operand.dtype, value.dtype)
        checks = []
        if self.plan.has_col(number) and access.strides[-1] != "0":
            checks.append("(lanes >> lane & 1)")
        if value.guard is not None:
            checks.append(self.text(value.guard).at(ATOM))
        zero = {"float32": "0.0f", "float64": "0.0", "int64": "0LL", "bool": "false"}[value.dtype]
        return f"{' && '.join(checks)} ? {code} : {zero}" if checks else code

    def _is_pack(self, value: Value, access: Access) -> bool:
        """Whether a load is contiguous and its guard, if any, needs nothing that is loaded."""
        if access.strides[-1] != "1":
            return False
        waiting = [] if value.guard is None else [value.guard]
        while waiting:
            guard = self.plan.program.values[waiting.pop()]
            if guard.op == "load" or guard.op.startswith("reduce_"):
                return False
            waiting += guard.args
        return True

    @staticmethod
    def widened(code: str, dtype: str, compute: str) -> str:
        """An element as a number to compute with."""
        if dtype in ("float16", "bfloat16"):
            wide = f"wide({code})"
            return wide if compute == "float32" else f"({COMPUTE[compute]}){wide}"
        if dtype == compute:
            return code
        return f"{code} != 0" if compute == "bool" else f"({COMPUTE[compute]}){code}"

    @staticmethod
    def narrowed(code: str, compute: str, dtype: str) -> str:
        """A number as an element: rounded to nearest even."""
        if dtype in ("float16", "bfloat16"):
            return f"narrow<{SCALARS[dtype]}>({code})"
        if dtype == compute:
            return code
        return f"{Text(code, LOOSE).at(ATOM)} != 0" if dtype == "bool" else f"({SCALARS[dtype]})({code})"

    def reduction(self, number: int, value: Value) -> str:  # noqa: ARG002
        """Empty: the skeleton accumulates reductions."""
        return ""

    def widen(self, name: str) -> str:
        """An index as int64."""
        return f"(long long){name}"

    def _expression(self, number: int, value: Value) -> Text:
        text = super()._expression(number, value)
        if value.op == "load":
            return Text(text.code, LOOSE)
        return text

    def call(self, value: Value, args: list[Text]) -> Text:
        """A function, a cast or a choice; empty for what is an infix operator."""
        op, code = value.op, ", ".join(a.code for a in args)
        is_float32, is_int = value.dtype == "float32", value.dtype == "int64"
        suffix = "f" if is_float32 else ""
        if op == "size":
            return Text(f"({COMPUTE[value.dtype]}){self.plan.sizes[value.dim]}", UNARY)
        if op == "cast":
            source = self.plan.program.values[value.args[0]]
            if source.dtype == value.dtype:
                return args[0]
            return (
                Text(f"{args[0].at(SUM)} != 0", LOOSE)
                if value.dtype == "bool"
                else Text(f"({COMPUTE[value.dtype]}){args[0].at(ATOM)}", UNARY)
            )
        if op == "where":
            return Text(f"{args[0].at(ATOM)} ? {args[1].at(SUM)} : {args[2].at(SUM)}", LOOSE)
        if op == "not":
            return Text(f"{'!' if value.dtype == 'bool' else '~'}{args[0].at(ATOM)}", UNARY)
        if op == "isnan":
            return Text(f"{args[0].at(SUM)} != {args[0].at(SUM)}", LOOSE)
        if op == "div" and is_float32 and self.fast_math:
            return Text(f"__fdividef({code})")
        if op == "reciprocal":
            one = "1.0f" if is_float32 else "1.0"
            return (
                Text(f"__fdividef({one}, {code})")
                if is_float32 and self.fast_math
                else Text(f"{one} / {args[0].at(UNARY)}", UNARY - 1)
            )
        if op in _HELPERS:
            self.helpers.add(_HELPERS[op])
            return Text(f"{_HELPERS[op]}({code})")
        if op == "abs":
            return (
                Text(f"({args[0].at(SUM)} < 0 ? -{args[0].at(ATOM)} : {args[0].at(SUM)})")
                if is_int
                else Text(f"fabs{suffix}({code})")
            )
        if op == "round":
            return Text(f"rint{suffix}({code})")
        if op in _MATH:
            if is_int:
                raise Unsupported(f"{op} of int64")
            if is_float32 and self.fast_math and op in _FAST:
                self.helpers.add(_FAST[op])
                return Text(f"{_FAST[op]}({code})")
            return Text(f"{op}{suffix}({code})")
        return Text("")
