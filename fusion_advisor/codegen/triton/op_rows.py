"""The printer table of Triton: one row for each op of the kernel IR."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fusion_advisor.codegen.common.printer import ATOM, LOOSE, PRODUCT, ROUNDERS, SUM, UNARY, Row, Text, Unsupported, has_inverse
from fusion_advisor.codegen.common.printer_rows import INFIX, SHARED, call_of, helper
from fusion_advisor.ir.program import Value, divides_index

if TYPE_CHECKING:
    from fusion_advisor.codegen.triton.ops import TritonWriter


def _is_precise(writer: TritonWriter, value: Value) -> bool:
    """Whether a division or a root must be rounded to nearest: ``tl``'s operators are approximate in float32.

    They are 2 units in the last place off at most, which no result of 16 bits shows, unless something jumps there.
    """
    return value.dtype == "float32" and not writer.fast_math and not writer.is_rough


def _size(writer: TritonWriter, number: int, value: Value, _args: Sequence[Text]) -> Text:
    name = writer.plan.sizes[value.dim]
    return Text(name) if writer.is_only_compared(number) else Text(f"tl.cast({name}, tl.{value.dtype})")


def _cast(writer: TritonWriter, _number: int, value: Value, args: Sequence[Text]) -> Text:
    if writer.plan.program.values[value.args[0]].dtype == value.dtype:
        return args[0]
    if value.dtype == "bool":
        return Text(f"{args[0].at(SUM)} != 0", LOOSE)
    return Text(f"{args[0].at(ATOM)}.to(tl.{value.dtype})")


def _quotient(writer: TritonWriter, _number: int, _value: Value, args: Sequence[Text]) -> Text:
    if writer.parts:
        return Text(f"tl.cast((start if WHOLE else {args[0].code}) // {args[1].at(ATOM)}, tl.int64)")
    return Text(f"({args[0].at(SUM + 1)} // {args[1].at(ATOM)}).to(tl.int64)")


def _remainder(writer: TritonWriter, number: int, value: Value, args: Sequence[Text]) -> Text:
    if divides_index(writer.plan.program.values, value):
        return Text(f"({args[0].at(SUM + 1)} % {args[1].at(ATOM)}).to(tl.int64)")
    return helper("remainder")(writer, number, value, args)


def _and(writer: TritonWriter, number: int, value: Value, args: Sequence[Text]) -> Text:
    if value.dtype == "bool" and writer.is_block(value.args[0]) != writer.is_block(value.args[1]):
        # Not `one & other`: Triton's interpreter makes a bad mask of a number and a block.
        one, block = args if writer.is_block(value.args[1]) else args[::-1]
        return Text(f"tl.where({one.code}, {block.code}, False)")
    return SHARED["and"](writer, number, value, args)


def _larger_or_smaller(_writer: TritonWriter, _number: int, value: Value, args: Sequence[Text]) -> Text:
    return Text(f"tl.{value.op}({args[0].code}, {args[1].code}, propagate_nan=tl.PropagateNan.ALL)")


def _where(writer: TritonWriter, _number: int, value: Value, args: Sequence[Text]) -> Text:
    choices = [arg.code for arg in args[1:]]
    if all(writer.plan.program.values[arg].op == "const" for arg in value.args[1:]):
        choices[0] = writer.typed(value.args[1])
    return Text(f"tl.where({', '.join([args[0].code, *choices])})")


def _is_count(writer: TritonWriter, number: int) -> bool:
    """Whether a value is the number of a row's elements: its columns, or some for each column."""
    values = writer.plan.program.values
    value = values[number]
    return value.op == "size" or (value.op == "mul" and {values[arg].op for arg in value.args} == {"const", "size"})


def _div(writer: TritonWriter, number: int, value: Value, args: Sequence[Text]) -> Text:
    if value.dtype == "float32" and writer.is_rough and has_inverse(writer.plan.program.values[value.args[1]]):
        return Text(f"{args[0].at(PRODUCT)} * (1.0 / {args[1].at(UNARY)})", PRODUCT)
    is_mean = value.dtype == "float32" and _is_count(writer, value.args[1])
    if is_mean and not (writer.fast_math or writer.plan.program.is_exact):
        return helper("mean_of")(writer, number, value, args)
    if _is_precise(writer, value):
        return Text(f"tl.div_rn({args[0].code}, {args[1].code})")
    return INFIX["div"](writer, number, value, args)


def _neg(_writer: TritonWriter, _number: int, value: Value, args: Sequence[Text]) -> Text:
    if value.dtype.startswith("float"):  # triton 3.6 computes -x as 0 - x, which is +0 where x is +0
        return Text(f"{args[0].at(PRODUCT)} * -1.0", PRODUCT)
    return Text(f"-{args[0].at(ATOM)}", UNARY)


def _reciprocal(writer: TritonWriter, _number: int, value: Value, args: Sequence[Text]) -> Text:
    precise = f"tl.div_rn(1.0, {args[0].code})"
    return Text(precise if _is_precise(writer, value) else f"1.0 / {args[0].at(UNARY)}", UNARY - 1)


def _sqrt(writer: TritonWriter, _number: int, value: Value, args: Sequence[Text]) -> Text:
    return Text(f"tl.sqrt{'_rn' if _is_precise(writer, value) else ''}({args[0].code})")


def _exp(writer: TritonWriter, number: int, value: Value, args: Sequence[Text]) -> Text:
    if writer.is_half and value.dtype == "float32" and writer.is_below_maximum(value.args[0]):
        return helper("exp_16bit")(writer, number, value, args)
    row = helper("exp") if _is_precise(writer, value) and not writer.is_half else call_of("tl.exp")
    return row(writer, number, value, args)


def _erfc(writer: TritonWriter, number: int, value: Value, args: Sequence[Text]) -> Text:
    if value.dtype != "float32":
        if value.constant:  # 1 + erf, as eager's GELU computes it
            return Text(f"1.0 - tl.erf({args[0].code})", SUM)
        return helper("erfc")(writer, number, value, args)
    if writer.is_short:
        return Text(f"2.0 * {writer.normal_cdf(f'{args[0].at(PRODUCT)} * -1.4142135623730951')}", PRODUCT)
    return helper("erfc")(writer, number, value, args)


def _of_reals(function: str) -> Row:
    """Return the row of a helper that takes no integers."""

    def row(writer: TritonWriter, number: int, value: Value, args: Sequence[Text]) -> Text:
        if value.dtype == "int64":
            raise Unsupported(f"{value.op} of int64")
        return helper(function)(writer, number, value, args)

    return row


def _with_short(function: str) -> Row:
    """Return the row of a helper that takes no integers, and that is shorter where results are rounded to 16 bits."""

    def row(writer: TritonWriter, number: int, value: Value, args: Sequence[Text]) -> Text:
        is_short = writer.is_short and value.dtype == "float32"
        return (helper(f"{function}_16bit") if is_short else _of_reals(function))(writer, number, value, args)

    return row


def _pow(writer: TritonWriter, number: int, value: Value, args: Sequence[Text]) -> Text:
    if value.dtype == "float64":  # tl.exp2 of a product that is rounded: 1e-14 off at 1e10
        raise Unsupported("pow of float64")
    return _of_reals("pow")(writer, number, value, args)


ROWS: Mapping[str, Row] = {
    **SHARED,
    "size": _size,
    "cast": _cast,
    "quotient": _quotient,
    "div": _div,
    "neg": _neg,
    "reciprocal": _reciprocal,
    "sqrt": _sqrt,
    "exp": _exp,
    "erfc": _erfc,
    "maximum": _larger_or_smaller,
    "minimum": _larger_or_smaller,
    "where": _where,
    "not": lambda _writer, _number, _value, args: Text(f"~{args[0].at(ATOM)}", UNARY),
    "normal_cdf": lambda writer, _number, _value, args: Text(writer.normal_cdf(args[0].code)),
    "tanh_cdf": helper("tanh_cdf_16bit"),
    **{op: helper(function) for op, function in ROUNDERS.items()},
    **{op: call_of(f"tl.{op}") for op in ("abs", "log", "exp2", "rsqrt", "erf", "sin", "cos", "floor", "ceil")},
    **{op: _of_reals(op) for op in ("round", "trunc")},
    **{op: _with_short(op) for op in ("sigmoid", "tanh", "expm1", "log1p")},
    "pow": _pow,
    "remainder": _remainder,
    "and": _and,
    "sign": helper("sign"),
}
"""How Triton prints each op."""
