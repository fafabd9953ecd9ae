"""One table of what is known of ops and dtypes, and no second one."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import fusion_advisor
from fusion_advisor.capture.graph.op_classes import base_name, class_of
from fusion_advisor.chains.op_inputs import is_candidate
from fusion_advisor.lowering.rules.tables import LOWERABLE
from fusion_advisor.records import OpClass, OpNode, TensorMeta
from fusion_advisor.records.op_facts import (
    ITEM_BYTES,
    PLAIN_VIEWS,
    PRODUCTS,
    ROWS_OPERAND,
    item_bytes,
    overload_free,
    reads_by_number,
)


def test_elements_have_torchs_sizes():
    known = {str(one).removeprefix("torch."): one for one in vars(torch).values() if isinstance(one, torch.dtype)}
    assert {name: ITEM_BYTES[name] for name in ITEM_BYTES if name in known} == {
        name: known[name].itemsize for name in ITEM_BYTES if name in known
    }
    assert {"float64", "bfloat16", "complex64", "float8_e4m3fn", "bool", "int8", "uint8"} <= set(ITEM_BYTES)
    assert item_bytes("of tomorrow") == 1


@pytest.mark.parametrize("name", sorted(LOWERABLE))
def test_every_op_that_can_be_lowered_is_a_candidate(name):
    """An op with a rule and the class OTHER would never be asked for it. Views and copies join their readers."""
    meta = TensorMeta(shape=(4,), stride=(1,), dtype="float32", device="cpu")
    found = class_of(base_name(name))
    op = OpNode(index=0, region=0, target=f"aten.{name}.default", op_class=found, outputs=(meta,))
    assert is_candidate(op) or op.op_class in (OpClass.VIEW, OpClass.MEMORY), op.op_class


@pytest.mark.parametrize("name", [*PRODUCTS, *PLAIN_VIEWS, *ROWS_OPERAND])
def test_the_ops_of_the_table_are_torchs(name):
    assert getattr(torch.ops.aten, name)
    assert overload_free(f"aten.{name}.default") == overload_free(name) == name


def test_a_parameter_with_an_ops_name_reads_nothing_by_number():
    assert reads_by_number("aten.embedding.default") and reads_by_number("aten.index.Tensor")
    assert not reads_by_number("embedding.weight") and not reads_by_number("aten.add.Tensor")


def sizes_of_dtypes(tree):
    """Dict displays from names of dtypes to numbers."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict) and node.keys and all(isinstance(one, ast.Constant) for one in (*node.keys, *node.values)):
            sizes = {key.value: value.value for key, value in zip(node.keys, node.values, strict=True)}
            if sizes.get("float32") == 4 or sizes.get("bfloat16") == 2:
                yield node.lineno


def test_no_module_has_a_table_of_its_own():
    folder = Path(fusion_advisor.__file__).parent
    trees = {path.relative_to(folder).as_posix(): ast.parse(path.read_text()) for path in folder.rglob("*.py")}
    assert [path for path, tree in trees.items() if list(sizes_of_dtypes(tree))] == ["records/op_facts.py"]
    cut = [path for path, tree in trees.items() if "removeprefix('aten.')." in ast.unparse(tree)]
    assert cut == ["records/op_facts.py"]
