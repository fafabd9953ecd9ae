"""Every op of the kernel IR has a row in every language's printer table, and every reference of a kernel file knows it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fusion_advisor.codegen.common.cpp_reference import cpp_reference
from fusion_advisor.codegen.common.interface import Header, Tuning
from fusion_advisor.codegen.common.site import tensors_of
from fusion_advisor.codegen.cpp import op_rows as cpp
from fusion_advisor.codegen.cpp.scope import PLACED
from fusion_advisor.codegen.cuda import op_rows as cuda
from fusion_advisor.codegen.registry import BACKENDS, backend
from fusion_advisor.codegen.triton import op_rows as triton
from fusion_advisor.codegen.triton.reference import torch_reference
from fusion_advisor.ir.program import ARITHMETIC, COMPARES, LOGIC, OPS, REDUCTIONS
from tests.kernel_cases.programs import Build

TABLES = {
    "triton": triton.ROWS,
    "cuda": cuda.ROWS,
    "cpp": {**cpp.ROWS, **PLACED, **dict.fromkeys(REDUCTIONS)},  # C++ prints reductions in codegen.cpp.body
}
WITHOUT_ROW = {"cpp": cpp.UNPRINTED}
TWO_ARGUMENTS = {"add", "sub", "mul", "div", "maximum", "minimum", "pow", "remainder", *COMPARES}
OF_THE_PRINTERS = {"normal_cdf", "tanh_cdf"}
"""Put in by the GPU backends themselves: no Program that is rendered or checked has them."""


def test_every_backend_has_a_table():
    assert TABLES.keys() == {one.name for one in BACKENDS}


@pytest.mark.parametrize("language", TABLES)
def test_every_op_has_a_row_or_a_reason(language):
    reasons = WITHOUT_ROW.get(language, {})
    assert TABLES[language].keys() | reasons.keys() == OPS
    assert not TABLES[language].keys() & reasons.keys()
    assert all(reasons.values())


def program_of(op):
    """A small program in which an op is stored: of floats, or of booleans where it is logic."""
    b = Build((4, 8), is_reduced=op in REDUCTIONS)
    x, y = b.load("x"), b.load("y")
    if op in REDUCTIONS:
        b.store("out", b.add(op, x), strides=(1, 0))
        return b.program()
    places = {
        "load": lambda: x,
        "const": lambda: b.add("add", x, b.const(2.5)),
        "index": lambda: b.add("cast", b.add("index", dim=1, dtype="int64"), dtype="float32"),
        "size": lambda: b.add("div", x, b.add("size", dim=1)),
        "dropout": lambda: b.add("mul", x, b.dropout(0.25)),
        "where": lambda: b.add("where", b.add("lt", x, y), x, y),
        "cast": lambda: b.add("cast", b.add("cast", x, dtype="int64"), dtype="float32"),
    }
    if op in places:
        value = places[op]()
    elif op in ("extent", "quotient", "inside"):
        column = b.add("index", dim=1, dtype="int64")
        extent = b.add("extent", constant=8 if op == "inside" else 2, dtype="int64")
        part = column if op == "inside" else b.add("quotient", column, extent, dtype="int64")
        guard = b.add("inside", column, extent, dtype="bool") if op == "inside" else None
        b.values.append(replaced_load(b, part, guard))
        value = b.add("add", x, len(b.values) - 1)
    elif op in (*COMPARES, *LOGIC, "not", "isnan"):
        conditions = [b.add("lt", x, y), b.add("gt", x, b.const(0.5))]
        arguments = {"not": conditions[:1], "isnan": [x], **dict.fromkeys(LOGIC, conditions)}.get(op, [x, y])
        value = b.add("where", b.add(op, *arguments), x, y)
    else:
        value = b.add(op, *((x, y) if op in TWO_ARGUMENTS else (x,)))
    b.store("out", value)
    return b.program()


def replaced_load(b, part, guard):
    """A load at a position that the kernel computes."""
    number = b.load("table", (0, 0), guard=guard)
    return replace(b.values.pop(number), args=(part,), steps=(1,))


@pytest.mark.parametrize("op", sorted(OPS - OF_THE_PRINTERS))
def test_every_printer_knows_every_op(op):
    program = program_of(op)
    assert op in {value.op for value in program.values}
    header = Header(title="op", summary="one op", origin="a test")
    for one in BACKENDS:
        rendered = backend(one.name).render(program, header, tuning=Tuning(), fast_math=False)
        assert "out" in rendered.source, one.name
    tensors = tensors_of(program)
    assert torch_reference(program, tensors).lines
    assert cpp_reference(program, tensors).lines


def test_the_list_of_ops_is_what_the_arithmetic_is_made_of():
    assert len(ARITHMETIC) == len(set(ARITHMETIC))
    assert OF_THE_PRINTERS < OPS
