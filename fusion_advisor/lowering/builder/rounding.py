"""Which values of a chain are rounded to 16 bits before the chain's end, and where such a rounding changes nothing.

A kernel computes in fp32 and rounds once, at its stores. Three kinds of values are rounded earlier, to the dtype that eager holds
them in:

- the result of an explicit cast: the model's author asked for the narrower number;
- every 16-bit result that a jump is made of. ``ceil``, a comparison or a cast to an integer turns an error of half a unit into a
  whole step: in bfloat16 ``ceil(x * 1.5)`` of the unrounded product was 2.0 away from eager's. An fp16 value that overflows in
  eager is infinite for a jump too;
- in exact mode, the result of every op.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fusion_advisor.chains.op_inputs import inputs_of
from fusion_advisor.ir.program import ROUNDINGS, Program, Value, nests
from fusion_advisor.records import OpNode, Ref
from fusion_advisor.records.op_facts import overload_free

if TYPE_CHECKING:
    from fusion_advisor.lowering.builder.builder import Lowering

JUMPS = frozenset(
    ["ceil", "floor", "round", "trunc", "sign", "eq", "ne", "lt", "le", "gt", "ge", "threshold", "isnan", "isinf", "isfinite",
     "logical_and", "logical_or", "logical_not", "logical_xor", "remainder"]
)  # fmt: skip
"""Ops whose result jumps where an argument moves by no more than its own rounding. A cast to an integer or a boolean is one too.
``leaky_relu``, ``clamp``, ``abs`` and their like bend and do not jump."""
_CASTS = frozenset(["to", "_to_copy", "type_as"])
_WIDTH = {"float64": 3, "float32": 2, "float16": 1, "bfloat16": 1}
_MONOTONE = frozenset(["where", "neg", "abs", "maximum", "minimum"])
"""Ops that only choose among their arguments or change a sign: rounding before them and after them is the same."""
_WHOLE = frozenset(["floor", "ceil", "trunc", "round"])
"""A 16-bit float's neighbouring whole numbers are 16-bit floats themselves."""


def narrows(ops: Mapping[int, OpNode] | Sequence[OpNode], op: OpNode) -> bool:
    """Whether an op is asked by name for a float dtype with fewer numbers than its argument's: a cast, or ``dtype=``.

    float16 to bfloat16 loses digits and the other way loses range, so both narrow.
    """
    if not op.outputs or op.outputs[0].dtype not in ROUNDINGS:
        return False
    is_asked = overload_free(op.target) in _CASTS or any(name == "dtype" and value is not None for name, value in op.kwargs)
    is_asked = is_asked or any(isinstance(value, str) and value.startswith("dtype:") for value in op.args)
    source = op.args[0] if op.args else None
    if not is_asked or not isinstance(source, Ref) or len(ops[source.index].outputs) != 1:
        return False
    dtype = ops[source.index].outputs[0].dtype
    return dtype != op.outputs[0].dtype and _WIDTH.get(dtype, 0) >= _WIDTH[op.outputs[0].dtype]


def rounded_ops(
    ops: Mapping[int, OpNode] | Sequence[OpNode], members: Sequence[int], *, is_exact: bool = False
) -> frozenset[int]:
    """Return the members whose 16-bit results are rounded as soon as they are computed.

    Args:
        ops: the captured ops by index.
        members: indices of the chain's ops.
        is_exact: round the result of every op.
    """
    inside = set(members)
    if is_exact:
        return frozenset(inside)
    found = {index for index in members if narrows(ops, ops[index])}
    reached: set[int] = set()
    waiting = [source for index in members if _jumps(ops, ops[index]) for source in inputs_of(ops[index])]
    while waiting:
        index = waiting.pop()
        if index in inside and index not in reached:
            reached.add(index)
            waiting += inputs_of(ops[index])
    return frozenset(found | reached)


def _jumps(ops: Mapping[int, OpNode] | Sequence[OpNode], op: OpNode) -> bool:
    if overload_free(op.target) in JUMPS:
        return True
    source = op.args[0] if op.args else None
    if overload_free(op.target) not in _CASTS or not isinstance(source, Ref) or not op.outputs:
        return False
    given = ops[source.index].outputs
    return bool(given) and given[0].dtype in _WIDTH and op.outputs[0].dtype not in _WIDTH


def rounded_scalar(lowering: Lowering, op: OpNode, number: int) -> int:
    """In exact mode, the Python number of a 16-bit sum or difference as a CPU's eager ops see it: rounded to the sum's dtype.

    Products and quotients, and every op on a GPU, take the number in float32.
    """
    is_seen_rounded = lowering.is_exact and op.outputs[0].device == "cpu" and lowering.constant_of(number) is not None
    return rounded(lowering, number, op.outputs[0].dtype) if is_seen_rounded else number


def rounded(lowering: Lowering, number: int, dtype: str) -> int:
    """Append the rounding of a value to ``dtype``; the value itself where that is no 16-bit float or changes nothing."""
    value = lowering.values[number]
    if dtype not in ROUNDINGS or value.dtype != "float32" or _fits(lowering, number, dtype):
        return number
    if value.op == "const":
        return lowering.const(rounded_number(float(value.constant or 0.0), dtype), value.dtype)
    return lowering.emit(Value(op=ROUNDINGS[dtype], args=(number,), dtype=value.dtype))


def _fits(lowering: Lowering, number: int, dtype: str) -> bool:
    """Whether every number that a value can be is one of ``dtype``."""
    value = lowering.values[number]
    if value.op == "load":
        return lowering.meta(value.operand).dtype in (dtype, "bool")
    if value.op == "const":
        constant = float(value.constant or 0.0)
        return math.isnan(constant) or rounded_number(constant, dtype) == constant
    if value.op == "cast":
        return lowering.values[value.args[0]].dtype == "bool" or _fits(lowering, value.args[0], dtype)
    if value.op in _MONOTONE or value.op in _WHOLE or value.op in ("reduce_max", "reduce_min"):
        return all(_fits(lowering, arg, dtype) for arg in value.args[value.op == "where" :])
    return value.op in (ROUNDINGS[dtype], "sign")


def before_store(lowering: Lowering, number: int, dtype: str) -> int:
    """Return a value without the roundings to ``dtype`` that a store in that dtype repeats."""
    value = lowering.values[number]
    if dtype not in ROUNDINGS:
        return number
    if value.op == ROUNDINGS[dtype]:
        return before_store(lowering, value.args[0], dtype)
    if value.op not in _MONOTONE:
        return number
    first = int(value.op == "where")
    args = (*value.args[:first], *(before_store(lowering, arg, dtype) for arg in value.args[first:]))
    return number if args == value.args else lowering.make(value.op, *args, dtype=value.dtype)


def rounded_number(number: float, dtype: str) -> float:
    """Round a Python number to float16 or bfloat16, by way of float32 as torch does; ties go to even.

    Args:
        number: any float.
        dtype: ``float16`` or ``bfloat16``.
    """
    if not math.isfinite(number):
        return number
    try:
        (bits,) = struct.unpack("<I", struct.pack("<f", number))
        if dtype == "bfloat16":
            bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
            return float(struct.unpack("<f", struct.pack("<I", bits))[0])
        (wide,) = struct.unpack("<f", struct.pack("<f", number))
        return float(struct.unpack("<e", struct.pack("<e", wide))[0])
    except OverflowError:
        return math.copysign(math.inf, number)


_OWN_WAY = frozenset(
    ["exp", "exp2", "expm1", "log", "log1p", "sin", "cos", "tanh", "sigmoid", "erf", "erfc", "pow", "sqrt", "rsqrt"]
)
"""Functions that eager's libraries round otherwise than ours for some arguments; a CPU's square root (MKL's) is one of them."""


def why_bits_differ(program: Program) -> str:
    """Say which ops of an exact kernel may give other bits than eager's, for a kernel that was measured to."""
    ops = {value.op for part in nests(program) for value in part.program.values}
    causes = ["sums are reordered"] * ("reduce_sum" in ops)
    causes += [f"{', '.join(sorted(ops & _OWN_WAY))} of another library than eager's"] if ops & _OWN_WAY else []
    return "; ".join(causes) or "an op of eager's rounds at other places"
