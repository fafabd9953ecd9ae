"""Values are copied into another nest once each."""

from __future__ import annotations

from fusion_advisor.codegen.split.parts import Copier
from fusion_advisor.ir.program import Operand, Program, Value


def test_zeros_of_both_signs_are_two_values():
    program = Program(dims=(4,), operands=(Operand(name="x", dtype="float32"),), values=(), stores=())
    copier = Copier(program, (4,), lambda _copier, _number: None)
    zeros = [Value(op="const", constant=constant) for constant in (0.0, -0.0, 0.0)]
    assert [copier.emit(zero) for zero in zeros] == [0, 1, 0]
