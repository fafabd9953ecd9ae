"""From ops to a Program: addresses, the loop nest, folding, names, and what the outside sees."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from fusion_advisor.ir.program import nests
from fusion_advisor.lowering.lower import lower
from fusion_advisor.lowering.rules.tables import CannotLower
from tests.kernel_cases.lowered import check, lower_function, records


def program(function, *inputs, **kind):
    return lower_function(function, *inputs, **kind)[0].program


def loads(program):
    return [value for value in program.values if value.op == "load"]


def test_contiguous_dims_collapse_to_one():
    found = program(lambda x: torch.tanh(x) * 2, torch.randn(2, 3, 4))
    assert found.dims == (24,)
    assert [value.strides for value in loads(found)] == [(1,)]
    assert found.stores[0].strides == (1,)


def test_a_bias_keeps_rows_and_columns_apart_and_nothing_else():
    found = program(lambda x, b: torch.tanh(x + b), torch.randn(2, 3, 4), torch.randn(4))
    assert found.dims == (6, 4)
    assert {value.strides for value in loads(found)} == {(4, 1), (0, 1)}


def test_dims_of_one_vanish():
    assert program(lambda x, b: torch.tanh(x + b), torch.randn(1, 3, 1, 4), torch.randn(4)).dims == (3, 4)
    assert program(lambda x: torch.tanh(x) * 2, torch.randn(1, 1)).dims == (1,)


def test_a_slice_before_the_chain_is_an_offset_into_its_owner():
    x = torch.randn(4, 8)
    ops = records(lambda x: torch.tanh(x[:, 4:]) * 2, x)
    members = [op.index for op in ops if op.target.startswith(("aten.tanh", "aten.mul"))]
    lowered = lower(ops, members, members[-1:])
    assert [ops[index].target for index in lowered.inputs] == ["x0"]
    (load,) = loads(lowered.program)
    assert (load.strides, load.offset) == ((8, 1), 4)


def test_two_slices_of_one_tensor_are_one_operand():
    x = torch.randn(4, 8)
    ops = records(lambda x: torch.tanh(x[:, 4:]) * x[:, :4], x)
    members = [op.index for op in ops if op.target.startswith(("aten.tanh", "aten.mul"))]
    found = lower(ops, members, members[-1:]).program
    assert [operand.name for operand in found.operands] == ["x", "out"]
    assert sorted(value.offset for value in loads(found)) == [0, 4]


def test_the_loop_nest_follows_the_outputs_memory():
    found = program(lambda x, y: x.transpose(0, 1) + y.transpose(0, 1), torch.randn(5, 6), torch.randn(5, 6))
    assert found.dims == (30,)


def test_a_reduction_keeps_its_columns_last_whatever_the_outputs_layout():
    found = program(lambda x: torch.softmax(x, -1), torch.randn(3, 4, 5).transpose(0, 1))
    assert found.is_reduced
    assert found.dims[-1] == 5
    check(lambda x: torch.softmax(x * 2, -1), torch.randn(3, 4, 5, dtype=torch.float64).transpose(0, 1), rtol=1e-9)


def test_only_what_is_needed_is_computed():
    ops = records(lambda x: (torch.tanh(x) * 2, torch.exp(x) + 1), torch.randn(3))
    members = [op.index for op in ops if op.role == "op"]
    mul = next(op.index for op in ops if op.target.startswith("aten.mul"))
    assert "exp" not in {value.op for value in lower(ops, members, [mul]).program.values}


def test_equal_values_are_computed_once():
    found = program(lambda x: torch.tanh(x) + torch.tanh(x) * torch.tanh(x), torch.randn(3))
    assert [value.op for value in found.values].count("tanh") == 1
    assert len(loads(found)) == 1


def test_moved_bytes_count_what_is_touched():
    found = program(lambda x, b: torch.tanh(x.half() + b), torch.randn(6, 4), torch.randn(4).half())
    assert found.moved_bytes == 24 * 4 + 4 * 2 + 24 * 2


@pytest.mark.parametrize(
    ("function", "forbidden"),
    [
        (lambda x: torch.tanh(x) * 1.0 + -0.0, {"mul", "add"}),
        (lambda x: (torch.tanh(x) - 0) / 1, {"sub", "div"}),
        (lambda x: torch.exp(x) * (2.0 * 1.5), set()),
    ],
)
def test_identities_vanish(function, forbidden):
    found = check(function, torch.randn(5, dtype=torch.float64))
    assert not forbidden & {value.op for value in found.values}


def test_a_sum_with_zero_stays_as_it_makes_a_zero_positive():
    found = check(lambda x: torch.tanh(x) + 0.0, torch.randn(5, dtype=torch.float64))
    assert "add" in {value.op for value in found.values}


def test_gelus_constants_fold_without_moving_a_rounding():
    found = check(lambda x: 0.5 * x * (1 + torch.tanh(x * 0.75)), torch.randn(50, dtype=torch.float64))
    assert [value.op for value in found.values].count("sigmoid") == 1
    assert "tanh" not in {value.op for value in found.values}
    # ½·x·2·σ(2·0.75·x): both halves meet and go, and 2·0.75 is exact.
    assert sorted(value.constant for value in found.values if value.op == "const") == [1.5]


def test_constants_that_are_no_power_of_two_keep_their_order():
    found = program(lambda x: (x * 0.1) * 0.3, torch.randn(5))
    assert [value.op for value in found.values].count("mul") == 2


def test_parameters_keep_their_name_and_nothing_else_of_the_model_does():
    kind = {
        "names": ("input; rm -rf", "layers.0.norm.weight", "layers.0.norm.bias", "layers.0.evil"),
        "roles": ("input", "parameter", "parameter", "parameter"),
    }
    found = program(
        lambda x, w, b, e: functional.layer_norm(x, (4,), w, b) * e, torch.randn(3, 4), torch.randn(4), torch.randn(4),
        torch.randn(4), **kind,
    )  # fmt: skip
    assert sorted(operand.name for operand in found.operands) == ["bias", "out", "weight", "x", "x2"]


def test_several_outputs_are_numbered_in_order():
    lowered, ops = lower_function(lambda x, y: (x + y, torch.tanh(x + y)), torch.randn(3, 4), torch.randn(3, 4))
    assert [ops[index].target for index in lowered.outputs] == ["aten.add.Tensor", "aten.tanh.default"]
    assert [operand.name for operand in lowered.program.operands] == ["x", "x2", "out1", "out2"]
    assert [operand.is_output for operand in lowered.program.operands] == [False, False, True, True]


def test_a_row_result_beside_a_full_one():
    found = check(lambda x: (x.sum(-1), x - x.sum(-1, keepdim=True)), torch.randn(3, 4, dtype=torch.float64))
    strides = {operand.name: store.strides for operand, store in zip(found.operands[1:], found.stores, strict=True)}
    assert strides == {"out1": (1, 0), "out2": (4, 1)}


def test_float64_is_computed_in_float64():
    assert {value.dtype for value in program(lambda x: torch.tanh(x) * 2, torch.randn(3).double()).values} == {"float64"}


def test_a_value_that_would_be_computed_again_and_again_is_refused():
    with pytest.raises(CannotLower, match="would be computed once for each") as caught:
        lower_function(lambda x, y: (torch.tanh(x), torch.tanh(x) + y), torch.randn(4), torch.randn(3, 4))
    assert caught.value.code == "FA603"


def test_more_dims_than_a_kernel_has_are_refused():
    x = torch.randn(2, 2, 2, 2, 2, 2)
    with pytest.raises(CannotLower, match="do not collapse"):
        lower_function(lambda x, y: torch.tanh(x) + y, x, x.permute(5, 4, 3, 2, 1, 0))


def test_two_lowerings_of_equal_code_are_equal():
    inputs = (torch.randn(3, 4), torch.randn(4))
    assert program(lambda x, w: functional.rms_norm(x, (4,), w, 1e-6), *inputs) == program(
        lambda x, w: functional.rms_norm(x, (4,), w, 1e-6), *inputs
    )


def test_outputs_of_fewer_heads_get_a_nest_of_their_own_in_the_launch():
    q, k, table = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 3, 8), torch.randn(2, 1, 3, 8)
    found = check(lambda q, k, table: (q * table, k * table + 1), q, k, table)
    assert [part.program.dims for part in nests(found)] == [(2, 4, 24), (2, 2, 24)]
    assert [operand.name for operand in found.operands] == ["x", "x2", "x3", "out1", "out2"]
    assert [part.operands for part in nests(found)] == [(0, 1, 3), (2, 1, 4)]
    assert found.moved_bytes == 4 * (2 * q.numel() + 2 * k.numel() + table.numel())  # the table once


def test_what_two_nests_compute_each_computes_for_itself():
    found = check(lambda x: ((y := x * 2), y[:, :1] + 1), torch.randn(2, 4, 3, 8))
    assert [len(part.program.stores) for part in nests(found)] == [1, 1]


def test_a_row_s_sum_does_not_share_a_launch_with_what_has_none():
    with pytest.raises(CannotLower, match="of different kinds"):
        lower_function(lambda q, k: (q.softmax(-1), k * 2), torch.randn(2, 4, 3, 8), torch.randn(2, 2, 3, 8))


@pytest.mark.parametrize(
    ("function", "is_divided"),
    [
        (lambda x: torch.softmax(x, -1), False),
        (lambda x: torch.softmax(x.masked_fill(x > 1, float("-inf")), -1), False),
        (lambda x: x.exp() / x.exp().sum(-1, keepdim=True), True),
        (lambda x: (x - x.amax(-1, keepdim=True)).exp() / (x + 1).exp().sum(-1, keepdim=True), True),
        (lambda x: torch.softmax(x.double(), -1), True),
    ],
)
def test_only_softmaxs_own_sum_is_divided_by_through_its_reciprocal(function, is_divided):
    """Any other sum may be so small that its reciprocal is infinite."""
    ops = [value.op for value in program(function, torch.randn(4, 8)).values]
    assert ("div" in ops, "reciprocal" in ops) == (is_divided, not is_divided)


@pytest.mark.parametrize("function", [lambda x: x | True, lambda x: x & False])
def test_a_chain_that_reads_nothing_is_refused(function):
    """Its kernel had no operand to say on which device it runs: ``apply`` ended in an IndexError."""
    with pytest.raises(CannotLower, match="reads no element of a tensor"):
        lower_function(function, torch.tensor([True, False]))
