"""The printer table of CUDA C++: one row for each op of the kernel IR."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fusion_advisor.codegen.common.printer import (
    ATOM,
    COMPARE,
    LOOSE,
    PRODUCT,
    ROUNDERS,
    SUM,
    UNARY,
    Row,
    Text,
    Unsupported,
    has_inverse,
)
from fusion_advisor.codegen.common.printer_rows import INFIX, SHARED, comparison, helper
from fusion_advisor.ir.causal_mask import order_of
from fusion_advisor.ir.integer_range import WORD, bits_of
from fusion_advisor.ir.program import Program, Value, divides_index

if TYPE_CHECKING:
    from fusion_advisor.codegen.cuda.ops import CudaWriter

COMPUTE = {"float32": "float", "float64": "double", "int64": "long long", "bool": "bool"}
MATH = ("exp2", "log", "log1p", "expm1", "sqrt", "rsqrt", "tanh", "erf", "sin", "cos", "pow", "floor", "ceil", "trunc")
"""Functions of CUDA's mathematics library that have the op's name."""
FAST = {"exp": "__expf", "log": "__logf", "sin": "__sinf", "cos": "__cosf", "tanh": "fast_tanh", "sqrt": "fast_sqrt"}
"""What stands in for them where approximations are allowed."""
UNSIGNED = "unsigned long long"
"""The type in which integers that may overflow are computed: torch's wrap around, and a signed overflow is undefined in C++."""
_WRAPPING = ("add", "sub", "mul", "neg", "abs")
WRAPPING_HELPERS = tuple(f"wrapping_{op}" for op in _WRAPPING)
HELPERS = {"maximum": "nan_max", "minimum": "nan_min", "sigmoid": "sigmoid", "remainder": "remainder_of", "sign": "sign_of"}


def may_wrap(program: Program) -> frozenset[int]:
    """Return the numbers of the integer values that may not fit 64 bits."""
    bits = bits_of(program.values, [operand.dtype for operand in program.operands])
    return frozenset(n for n, value in enumerate(program.values) if value.dtype == "int64" and bits[n] >= WORD)


def _is_short(writer: CudaWriter, value: Value) -> bool:
    """Whether a function need only be good to 16 bits."""
    return value.dtype == "float32" and writer.is_short


def _is_fast(writer: CudaWriter, value: Value) -> bool:
    return value.dtype == "float32" and writer.fast_math


def _suffixed(function: str, value: Value, args: Sequence[Text]) -> Text:
    """A call of a function whose float32 version ends in f."""
    return Text(f"{function}{'f' if value.dtype == 'float32' else ''}({', '.join(arg.code for arg in args)})")


def _math(function: str) -> Row:
    """Return the row of a function of the mathematics library."""

    def row(writer: CudaWriter, number: int, value: Value, args: Sequence[Text]) -> Text:
        if value.dtype == "int64":
            raise Unsupported(f"{value.op} of int64")
        if _is_fast(writer, value) and function in FAST:
            return helper(FAST[function])(writer, number, value, args)
        return _suffixed(function, value, args)

    return row


def _load(writer: CudaWriter, number: int, value: Value, args: Sequence[Text]) -> Text:
    return Text(SHARED["load"](writer, number, value, args).code, LOOSE)


def _causal_comparison(writer: CudaWriter, number: int, value: Value, args: Sequence[Text]) -> Text:
    """A comparison; of a causal mask's column with a number that the lanes share, not with one for each."""
    order = order_of(writer.plan.program, number)
    if order is not None and order.column == writer.plan.col_dim:
        return Text(f"lane <= {args[1].at(SUM)} - first", LOOSE)
    return comparison(COMPARE[value.op])(writer, number, value, args)


def _size(writer: CudaWriter, number: int, value: Value, _args: Sequence[Text]) -> Text:
    name = writer.plan.sizes[value.dim]
    return Text(name) if writer.is_only_compared(number) else Text(f"({COMPUTE[value.dtype]}){name}", UNARY)


def _cast(writer: CudaWriter, _number: int, value: Value, args: Sequence[Text]) -> Text:
    if writer.plan.program.values[value.args[0]].dtype == value.dtype:
        return args[0]
    if value.dtype == "bool":
        return Text(f"{args[0].at(SUM)} != 0", LOOSE)
    return Text(f"({COMPUTE[value.dtype]}){args[0].at(ATOM)}", UNARY)


def _quotient(writer: CudaWriter, number: int, value: Value, args: Sequence[Text]) -> Text:
    index = writer.plan.program.values[value.args[0]]
    is_col = index.op == "index" and index.dim == writer.plan.col_dim
    extent = args[1].at(ATOM)
    if is_col and writer.is_split:  # one division for a pack: it is no wider than a channel, and meets one border at most
        text = Text(f"first / {extent} + (first % {extent} + lane >= {extent})", SUM)
    else:
        text = Text(f"{'first' if is_col else args[0].at(SUM + 1)} / {extent}", PRODUCT)
    return text if writer.is_only_addressed(number) else Text(f"(long long)({text.code})", UNARY)


def _remainder(writer: CudaWriter, number: int, value: Value, args: Sequence[Text]) -> Text:
    if divides_index(writer.plan.program.values, value):
        return Text(f"(long long)({args[0].at(SUM + 1)} % {args[1].at(ATOM)})", UNARY)
    return helper(HELPERS["remainder"])(writer, number, value, args)


def _where(writer: CudaWriter, _number: int, value: Value, args: Sequence[Text]) -> Text:
    chosen = args[1].at(SUM)
    if value.dtype == "int64" and all(writer.plan.program.values[arg].op == "const" for arg in value.args[1:]):
        chosen = f"(long long){args[1].at(ATOM)}"  # of two literals C++ makes an int
    return Text(f"{args[0].at(ATOM)} ? {chosen} : {args[2].at(SUM)}", LOOSE)


def _div(writer: CudaWriter, number: int, value: Value, args: Sequence[Text]) -> Text:
    divisor = writer.plan.program.values[value.args[1]]
    if value.dtype == "float32" and writer.is_rough and has_inverse(divisor):
        return Text(f"{args[0].at(PRODUCT)} * (1.0f / {args[1].at(UNARY)})", PRODUCT)
    if _is_fast(writer, value):
        return Text(f"__fdividef({args[0].code}, {args[1].code})")
    if value.dtype == "float32" and divisor.op == "size":
        return helper("mean_of")(writer, number, value, args)
    if value.dtype == "float32" and writer.is_rough:
        return helper("quotient_16bit")(writer, number, value, args)
    return INFIX["div"](writer, number, value, args)


def _reciprocal(writer: CudaWriter, number: int, value: Value, args: Sequence[Text]) -> Text:
    one = "1.0f" if value.dtype == "float32" else "1.0"
    if value.dtype == "float32" and writer.is_rough and not writer.fast_math:
        return helper("quotient_16bit")(writer, number, value, [Text(one), *args])
    if _is_fast(writer, value):
        return Text(f"__fdividef({one}, {args[0].code})")
    return Text(f"{one} / {args[0].at(UNARY)}", UNARY - 1)


def _exp(writer: CudaWriter, number: int, value: Value, args: Sequence[Text]) -> Text:
    if not (value.dtype == "float32" and writer.is_half):
        return _math("exp")(writer, number, value, args)
    if not writer.is_below_maximum(value.args[0]):
        return Text(f"__expf({args[0].code})")
    return helper("exp_16bit")(writer, number, value, args)


def _erfc(writer: CudaWriter, _number: int, value: Value, args: Sequence[Text]) -> Text:
    if _is_short(writer, value):
        return Text(f"2.0f * {writer.normal_cdf(f'{args[0].at(PRODUCT)} * -1.4142135623730951f')}", PRODUCT)
    return _suffixed("erfc", value, args)


def _sqrt(writer: CudaWriter, number: int, value: Value, args: Sequence[Text]) -> Text:
    if value.dtype == "float32" and writer.is_rough:
        return helper(FAST["sqrt"])(writer, number, value, args)
    return _math("sqrt")(writer, number, value, args)


def _with_short(function: str) -> Row:
    """Return the row of a function of the mathematics library that is shorter where results are rounded to 16 bits."""

    def row(writer: CudaWriter, number: int, value: Value, args: Sequence[Text]) -> Text:
        is_short = _is_short(writer, value) and not (writer.fast_math and function in FAST)
        return (helper(f"{function}_16bit") if is_short else _math(function))(writer, number, value, args)

    return row


def _sigmoid(writer: CudaWriter, number: int, value: Value, args: Sequence[Text]) -> Text:
    return helper("sigmoid_16bit" if _is_short(writer, value) else HELPERS["sigmoid"])(writer, number, value, args)


def _larger_or_smaller(writer: CudaWriter, _number: int, value: Value, args: Sequence[Text]) -> Text:
    function = HELPERS[value.op]
    writer.helpers.add(function)
    # A literal is an int where it fits one: two types would leave the template's argument open.
    of_type = "<long long>" if value.dtype == "int64" else ""
    return Text(f"{function}{of_type}({args[0].code}, {args[1].code})")


def _abs(_writer: CudaWriter, _number: int, value: Value, args: Sequence[Text]) -> Text:
    if value.dtype == "int64":
        return Text(f"({args[0].at(SUM)} < 0 ? -{args[0].at(ATOM)} : {args[0].at(SUM)})")
    return _suffixed("fabs", value, args)


def _wrapping(op: str, row: Row) -> Row:
    """Return the row of an integer op that may overflow 64 bits: torch's wraps around, and C++ leaves a signed one undefined."""

    def wrapped(writer: CudaWriter, number: int, value: Value, args: Sequence[Text]) -> Text:
        if number in writer.may_wrap:
            return helper(f"wrapping_{op}", *(["wrapping_neg"] if op == "abs" else []))(writer, number, value, args)
        return row(writer, number, value, args)

    return wrapped


def _rounder(op: str) -> Row:
    needed = ("half", "from_float32", "from_float32_half") if op == "round_float16" else ()
    return helper(ROUNDERS[op], *needed)


ROWS: Mapping[str, Row] = {
    **SHARED,
    **dict.fromkeys(COMPARE, _causal_comparison),
    "load": _load,
    "size": _size,
    "cast": _cast,
    "quotient": _quotient,
    "where": _where,
    "div": _div,
    "reciprocal": _reciprocal,
    "exp": _exp,
    "erfc": _erfc,
    "sigmoid": _sigmoid,
    "maximum": _larger_or_smaller,
    "minimum": _larger_or_smaller,
    **{op: _wrapping(op, row) for op, row in {**SHARED, "abs": _abs}.items() if op in _WRAPPING},
    "not": lambda _writer, _number, value, args: Text(f"{'!' if value.dtype == 'bool' else '~'}{args[0].at(ATOM)}", UNARY),
    "round": lambda _writer, _number, value, args: _suffixed("rint", value, args),
    "normal_cdf": lambda writer, _number, _value, args: Text(writer.normal_cdf(args[0].code)),
    "tanh_cdf": helper("tanh_cdf_16bit"),
    "remainder": _remainder,
    "sign": helper(HELPERS["sign"]),
    **{op: _rounder(op) for op in ROUNDERS},
    **{op: _math(op) for op in MATH},
    **{op: _with_short(op) for op in ("tanh", "expm1", "log1p")},
    "sqrt": _sqrt,
}
"""How CUDA C++ prints each op."""
