"""Pads, rolls and repeats, against torch in fp64; nothing is read outside a tensor."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from fusion_advisor.ir.dtypes import CannotLower
from tests.kernel_cases.lowered import check, lower_function
from tests.lowering.rules.test_tables import rand

PADS = {
    "both sides": ((1, 2), 0.0), "two dims": ((0, 1, 0, 1), 0.0), "a number": ((1, 1, 2, 0), 2.5),
    "cut off": ((-1, 2, -2, -1), 0.0),
    "none": ((0, 0), 0.0), "of the first dim": ((0, 0, 0, 0, 1, 1), -1.0),
}  # fmt: skip


@pytest.mark.parametrize("name", PADS)
def test_pads(name):
    amounts, value = PADS[name]
    check(lambda x: functional.pad(torch.relu(x) + 3, amounts, value=value) * 2, rand(3, 5, 6))


def test_a_pad_of_integers_and_of_what_was_padded():
    check(lambda x: functional.pad(x * 2, (1, 1), value=7) + 1, torch.arange(12).reshape(3, 4))
    check(lambda x: functional.pad(functional.pad(x, (1, 0), value=1.0) * 2, (0, 2)) + 1, rand(2, 4))


def test_channels_are_read_once_for_all_rows_of_a_padded_image():
    images, scale = rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last), rand(3, 1, 1, seed=1)
    program = check(lambda x, s: functional.pad(torch.relu(x * s), (0, 1, 0, 1)) * 1.5, images, scale)
    guards = {program.operands[v.operand].element_count: v.guard for v in program.values if v.op == "load"}
    assert guards[3] is None
    assert all(guard is not None for count, guard in guards.items() if count != 3)


def test_what_is_outside_its_own_tensor_keeps_its_guard():
    """A column of the pad's own dim is past the end of what it would read."""
    program = check(lambda x, s: functional.pad(x * s, (0, 3)) + 1, rand(2, 5), rand(5, seed=1))
    assert all(value.guard is not None for value in program.values if value.op == "load")


@pytest.mark.parametrize("shifts, dims", [((1,), (0,)), ((-2, 3), (1, 2)), ((7,), (1,)), ((0,), (2,)), ((2, 2), (0, 2))])
def test_rolls(shifts, dims):
    check(lambda x: torch.roll(x * 2, shifts, dims) + 1, rand(3, 4, 5))


def test_a_roll_of_rows_is_read_by_a_norm():
    check(lambda x: functional.layer_norm(torch.roll(x, (1, -1), (0, 1)) + 1, (6,)), rand(3, 4, 6), rtol=1e-10)


@pytest.mark.parametrize("counts", [(2, 1, 1), (1, 3, 1), (1, 1, 2), (2, 3, 4), (1, 1, 1), (5, 1, 2, 1), (2, 3, 1, 1, 1)])
@pytest.mark.parametrize("shape", [(3, 4, 5), (3, 1, 5), (1, 4, 1)])
def test_repeats(counts, shape):
    check(lambda x: (x * 2).repeat(counts) + 1, rand(*shape))


def test_copies_along_few_dims_are_a_loop_of_their_own():
    """No remainder is computed; of a sixth dim one is, because a kernel has five loops at most."""
    program = check(lambda x: x.repeat(7, 1, 2) + 1, rand(3, 4, 5))
    assert program.dims == (7, 12, 2, 5)
    assert all(value.op != "remainder" for value in program.values)
    program = check(lambda x: x.repeat(2, 2, 2) + 1, rand(3, 4, 5))
    assert [value.op for value in program.values].count("remainder") == 1


def test_a_repeat_of_what_lies_in_another_order():
    check(lambda x: (x.transpose(0, 2) * 2).repeat(2, 1, 3) + 1, rand(3, 4, 5))
    images = rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    check(lambda x: (x * 2).repeat(1, 2, 1, 2) + 1, images)


def test_a_repeat_is_read_by_what_does_not_begin_where_a_copy_does():
    program = check(lambda x: (x * 2).repeat(3, 1)[1:8] + 1, rand(3, 6))
    assert any(value.op == "remainder" for value in program.values)
    check(lambda x: torch.roll(x.repeat(1, 2) * 2, 5, 1) + 1, rand(3, 6))
    check(lambda x: functional.pad(x.repeat(2, 2) * 2, (1, 2, 1, 0)) + 1, rand(3, 6))
    check(lambda x: x.repeat(4, 1)[3:6] + 1, rand(3, 6))  # one copy: no remainder


def test_a_repeat_is_read_by_a_norm_and_reads_one():
    check(lambda x: functional.layer_norm(x.repeat(2, 1, 1) + 1, (6,)), rand(3, 4, 6), rtol=1e-10)
    check(lambda x: functional.layer_norm(x.repeat(1, 1, 2) + 1, (12,)), rand(3, 4, 6), rtol=1e-10)
    check(lambda x: functional.layer_norm(x, (6,)).repeat(2, 3, 1) + 1, rand(3, 4, 6), rtol=1e-10)
    with pytest.raises(CannotLower, match="not the chain's loop nest"):
        lower_function(lambda x: functional.layer_norm(x, (6,)).repeat(1, 1, 2) + 1, rand(3, 4, 6))


def test_a_repeat_of_nothing():
    check(lambda x: (x * 2).repeat(0, 1) + 1, rand(3, 6))
    check(lambda x: (x * 2).repeat(2, 1) + 1, rand(0, 6))


def test_a_norm_of_padded_rows_reads_no_row_that_is_not_there():
    program = check(lambda x: functional.pad(functional.layer_norm(x, (6,)), (0, 0, 1, 2)) + 1, rand(3, 6), rtol=1e-10)
    assert all(value.guard is not None for value in program.values if value.op == "load")
    check(lambda x: functional.pad(torch.softmax(x * 2, -1), (0, 0, 0, 1, 2, 0), value=7.0), rand(2, 3, 6), rtol=1e-10)


def test_a_norm_is_not_computed_for_columns_that_are_not_there():
    with pytest.raises(CannotLower, match="not the chain's loop nest"):
        lower_function(lambda x: functional.pad(functional.layer_norm(x, (6,)), (0, 2)) + 1, rand(3, 6))
    with pytest.raises(CannotLower, match="columns that are not there"):
        lower_function(lambda x: functional.pad(functional.layer_norm(x, (6,)), (-2, 2)) + 1, rand(3, 6))
    check(lambda x: functional.layer_norm(functional.pad(x, (0, 0, 0, 2), value=0.5), (6,)) + 1, rand(3, 6), rtol=1e-10)


SLICES = {
    "first half": (1, 0, 3, 1), "last half": (1, 3, 6, 1), "middle": (0, 1, 3, 1), "to the end": (-1, 2, 2**63 - 1, 1),
    "from the end": (2, -4, 5, 1), "all": (0, 0, 4, 1),
}  # fmt: skip
_aten = torch.ops.aten


@pytest.mark.parametrize("name", SLICES)
def test_the_gradient_of_a_slice_is_zero_outside_it(name):
    dim, start, end, step = SLICES[name]
    shape = (4, 6, 5)
    gradient = rand(*_aten.slice(torch.zeros(shape), dim, start, end, step).shape)
    check(lambda g: _aten.slice_backward(g * 2, list(shape), dim, start, end, step) + 1, gradient)


@pytest.mark.parametrize("dim, index", [(0, 0), (1, 2), (1, -1), (2, 4)])
def test_the_gradient_of_one_place_is_zero_elsewhere(dim, index):
    shape = (4, 6, 5)
    gradient = rand(*torch.zeros(shape).select(dim, index).shape)
    check(lambda g: _aten.select_backward(g * 2, list(shape), dim, index) + 1, gradient)


def test_the_gradient_of_rotated_halves_is_one_kernel():
    """A rotary embedding's backward pass: each half of the gradient goes to the other half, one of them negated."""

    def rotated(g, cos, sin):
        turned = g * sin
        first, second = turned[..., :4], turned[..., 4:]
        swapped = _aten.slice_backward(-first, [2, 3, 8], 2, 4, 8, 1) + _aten.slice_backward(second, [2, 3, 8], 2, 0, 4, 1)
        return swapped + g * cos

    program = check(rotated, rand(2, 3, 8), rand(3, 8, seed=1), rand(3, 8, seed=2))
    assert sum(operand.element_count for operand in program.operands if operand.is_output) == 48

    def by_autograd(x, cos, sin):
        return (x * cos + torch.cat((-x[..., 4:], x[..., :4]), -1) * sin,)

    x, gradient = rand(2, 3, 8, seed=3), rand(2, 3, 8)
    _, pull = torch.func.vjp(lambda x: by_autograd(x, rand(3, 8, seed=1), rand(3, 8, seed=2))[0], x)
    torch.testing.assert_close(rotated(gradient, rand(3, 8, seed=1), rand(3, 8, seed=2)), pull(gradient)[0])


def test_the_gradient_of_a_norms_slice():
    def sliced(g, y):
        scores = _aten._softmax_backward_data(g, y, -1, torch.float64)
        return _aten.slice_backward(scores, [5, 6], 0, 1, 4, 1)

    check(sliced, rand(3, 6), torch.softmax(rand(3, 6, seed=1), -1), rtol=1e-10)


def test_what_has_no_lowering_is_refused():
    with pytest.raises(CannotLower, match="step of 2"):
        lower_function(lambda g: _aten.slice_backward(g * 2, [6, 4], 0, 0, 6, 2) + 1, rand(3, 4))
    with pytest.raises(CannotLower, match="reflect"):
        lower_function(lambda x: functional.pad(x, (1, 1), mode="reflect") + 1, rand(3, 6))
    with pytest.raises(CannotLower, match="one row"):
        lower_function(lambda x: torch.roll(x, 1) + 1, rand(3, 6))
