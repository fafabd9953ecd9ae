"""Names of operands: given in order, inherited from a Program that computes the same, numbered where they repeat."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fusion_advisor.ir.operand_names import named_like, names_in, unique, with_names
from fusion_advisor.ir.program import Operand, Part, Program, Store, Value, nests


def product(names, slices=((0, 0), (1, 0)), op="mul"):
    """``x * y`` over two loads (operand, offset); ``names`` are of the inputs, then of the output."""
    *inputs, output = names
    operands = [Operand(name=name, dtype="float32", element_count=8) for name in inputs]
    operands.append(Operand(name=output, dtype="float32", is_output=True, element_count=8))
    loads = [Value(op="load", operand=operand, strides=(1,), offset=offset) for operand, offset in slices]
    values = (*loads, Value(op=op, args=(0, 1)))
    return Program(
        dims=(8,), operands=tuple(operands), values=values, stores=(Store(operand=len(inputs), value=2, strides=(1,)),)
    )


def siblings(first, second, shared):
    """Two nests in one launch; ``shared`` gives the launch's operand for each operand of the second."""
    extra = tuple(o for at, o in zip(shared, second.operands, strict=True) if at >= len(first.operands))
    return replace(first, operands=(*first.operands, *extra), siblings=(Part(program=second, operands=shared),))


def test_two_tensors_that_became_slices_of_one_give_it_both_names():
    model = product(("gate", "up", "out"))
    merged = product(("x", "out1"), slices=((0, 0), (0, 8)))
    assert names_in(named_like(merged, model))[0] == ("gate_up", "out")


def test_one_tensor_that_became_two_keeps_its_name_and_a_number():
    assert names_in(named_like(product(("a", "b", "c")), product(("x", "out"), slices=((0, 0), (0, 8)))))[0] == ("x", "x2", "out")


def test_other_values_keep_their_own_names():
    other = product(("a", "b", "c"), op="add")
    assert named_like(other, product(("gate", "up", "out"))) == other


def test_every_nest_has_the_launchs_names():
    model = siblings(product(("q", "cos", "q_out")), product(("k", "cos", "k_out")), (3, 1, 4))
    merged = siblings(product(("x", "x2", "out1")), product(("x", "x2", "out2")), (0, 1, 3))
    named = named_like(merged, model)
    assert names_in(named)[0] == ("q_k", "cos", "q_out", "k_out")
    assert [[o.name for o in part.program.operands] for part in nests(named)] == [
        ["q_k", "cos", "q_out"],
        ["q_k", "cos", "k_out"],
    ]


def test_constants_are_named_by_value_and_kept_where_nothing_is_said():
    program = replace(product(("x", "y", "out")), values=(*product(("x", "y", "out")).values, Value(op="const", constant=1e-5)))
    named = with_names(program, ["a", "b", "c"], {3: "eps"})
    assert names_in(named) == (("a", "b", "c"), ((3, "eps"),))
    assert names_in(with_names(named, ["d", "e", "f"]))[1] == ((3, "eps"),)
    assert names_in(with_names(named, ["d", "e", "f"], {}))[1] == ()
    with pytest.raises(ValueError, match="zip"):
        with_names(program, ["a", "b"])


def test_names_are_numbered_where_they_repeat():
    assert unique(["x", "x2", "x", "x2", "w1", "x"]) == ["x", "x2", "x3", "x4", "w1", "x5"]
