"""How many bits an integer value of a kernel may take: the sums and products that fit 64 bits need no care about overflow."""

from __future__ import annotations

from collections.abc import Sequence

from fusion_advisor.ir.program import Value

WORD = 64
"""More than 63 bits of magnitude: the result may wrap around, as torch's integers do."""
_OF_DTYPE = {"bool": 1, "uint8": 8, "int8": 8, "int16": 16, "int32": 32}
_OF_PLACE = 48
"""No memory has more elements than an address has bits."""
_AS_WIDE_AS_WIDEST = frozenset({"maximum", "minimum", "neg", "abs", "and", "or", "xor", "not", "reduce_max", "reduce_min"})


def bits_of(values: Sequence[Value], operand_dtypes: Sequence[str]) -> tuple[int, ...]:
    """Return for each value an upper bound for the bits of its magnitude: ``WORD`` where it is not known to be below 64.

    Args:
        values: of a program; those that are no integers get a number of no meaning.
        operand_dtypes: the dtypes that its operands have in memory.
    """
    found: list[int] = []
    for value in values:
        args = [found[number] for number in value.args]
        found.append(min(_bits(value, args, values, operand_dtypes), WORD))
    return tuple(found)


def _bits(value: Value, args: list[int], values: Sequence[Value], operand_dtypes: Sequence[str]) -> int:
    if value.dtype == "bool":
        return 1
    if value.op == "const":
        return int(value.constant or 0).bit_length() if value.dtype == "int64" else WORD
    if value.op in ("index", "size", "extent", "quotient"):
        return _OF_PLACE
    if value.op == "load":
        return _OF_DTYPE.get(operand_dtypes[value.operand], WORD)
    if value.op == "cast":
        return 1 if values[value.args[0]].dtype == "bool" else WORD
    if value.op in ("add", "sub"):
        return max(args) + 1
    if value.op == "mul":
        return sum(args)
    if value.op == "where":
        return max(args[1:])
    if value.op == "remainder":
        return args[1]
    if value.op == "sign":
        return 1
    if value.op == "reduce_sum":
        return args[0] + _OF_PLACE
    return max(args) if value.op in _AS_WIDE_AS_WIDEST else WORD
