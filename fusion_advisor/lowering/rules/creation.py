"""Tensors that are made, not read: constants, ``arange`` and the triangles that causal masks are cut from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusion_advisor.ir.affine_index import Index
from fusion_advisor.ir.dtypes import CannotLower, argument_of, compute_dtype
from fusion_advisor.lowering.builder.builder import Rule
from fusion_advisor.lowering.builder.causal_compare import compared_places
from fusion_advisor.records import OpNode

if TYPE_CHECKING:
    from fusion_advisor.lowering.builder.builder import Lowering


def _constant(fill: float | None) -> Rule:
    """A tensor of one number: ``fill``, or the op's own argument."""

    def rule(lowering: Lowering, op: OpNode, _where: Index) -> int:
        number = argument_of(op, 2 if "new_full" in op.target else 1, "fill_value") if fill is None else fill
        if not isinstance(number, int | float):
            raise CannotLower("FA601", f"{op.target} with a fill value that is no plain number has no lowering")
        return lowering.const(number, compute_dtype(op.outputs[0].dtype))

    return rule


def _arange(lowering: Lowering, op: OpNode, where: Index) -> int:
    numbers = [number for number in op.args if isinstance(number, int | float)]
    if op.outputs[0].dtype != "int64" or not all(isinstance(number, int) for number in numbers):
        raise CannotLower("FA601", f"{op.target} of {op.outputs[0].dtype} has no lowering")
    start, step = (numbers[0] if len(numbers) > 1 else 0), (numbers[2] if len(numbers) > 2 else 1)
    return lowering.place_value(where[0].scaled(int(step)).moved(int(start)))


def _triangle(name: str) -> Rule:
    def rule(lowering: Lowering, op: OpNode, where: Index) -> int:
        diagonal = argument_of(op, 1, "diagonal", 0)
        assert isinstance(diagonal, int)
        row, column = where[-2].moved(diagonal), where[-1]
        compare = "le" if name == "tril" else "ge"
        is_kept = compared_places(lowering, compare, column, row)
        if is_kept is None:
            sides = [lowering.place_value(place) for place in (column, row)]
            is_kept = lowering.make(compare, *sides, dtype="bool")
        element = lowering.argument(op, 0, where)
        dtype = lowering.values[element].dtype
        if dtype == "bool":
            return lowering.make("and", is_kept, element, dtype="bool")
        return lowering.make("where", is_kept, element, lowering.const(0, dtype), dtype=dtype)

    return rule


PLACES: dict[str, Rule] = {
    "arange": _arange, "tril": _triangle("tril"), "triu": _triangle("triu"),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), _constant(1)),
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), _constant(0)),
    **dict.fromkeys(("full", "full_like", "new_full"), _constant(None)),
}  # fmt: skip
"""Ops that make a tensor, or keep a triangle of one."""
