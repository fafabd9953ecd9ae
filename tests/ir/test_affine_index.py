"""Reshapes, strided slices and pieces inside a chain: right numbers, and loops cut or written out where that serves."""

from __future__ import annotations

import pytest
import torch

from fusion_advisor.ir.affine_index import CutLoop, Place, loop, reshaped
from fusion_advisor.ir.loop_nest import Nest
from fusion_advisor.lowering.rules.tables import CannotLower
from tests.kernel_cases.lowered import check, lower_function


def rand(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def rotate_pairs(x, cos, sin):
    rotated = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    return x * cos + rotated * sin


def rotate_half(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


def partial(x, cos, sin):
    turned, rest = x[..., :4], x[..., 4:]
    return torch.cat((rotate_half(turned, cos[..., :4], sin[..., :4]), rest), dim=-1)


FUNCTIONS = {
    "merge_heads": (lambda x: torch.tanh(x).transpose(1, 2).reshape(2, 5, 12) * 2, rand(2, 3, 5, 4)),
    "split_heads": (lambda x, b: torch.tanh(x + b).view(2, 5, 3, 4).transpose(1, 2) * 2, rand(2, 5, 12), rand(12)),
    "split_thrice": (lambda x: (torch.tanh(x).view(24) * 3).view(2, 2, 6) * 2, rand(4, 6)),
    "cut_and_merge": (lambda x: torch.tanh(x).reshape(8, 3).t().reshape(6, 4) * 2, rand(2, 4, 3)),
    "strided_slice": (lambda x: torch.tanh(x)[..., 1::2] * 2, rand(3, 7)),
    "strided_rows": (lambda x: torch.tanh(x)[::3] * 2, rand(7, 3)),
    "stack": (lambda x, y: torch.stack((torch.tanh(x), y * 2), dim=1), rand(3, 4), rand(3, 4)),
    "stack_last": (lambda x, y: torch.stack((torch.tanh(x), y * 2, x), dim=-1), rand(3, 4), rand(3, 4)),
    "rotate_pairs": (rotate_pairs, rand(2, 3, 5, 8), rand(2, 1, 5, 8), rand(2, 1, 5, 8)),
    "rotate_half": (rotate_half, rand(2, 3, 5, 8), rand(2, 1, 5, 8), rand(2, 1, 5, 8)),
    "rotate_one_pair": (rotate_pairs, rand(2, 3, 2), rand(3, 2), rand(3, 2)),
    "partial": (partial, rand(2, 3, 5, 7), rand(2, 1, 5, 7), rand(2, 1, 5, 7)),
    "thirds": (lambda x, y, z: torch.cat((x * 2, y + 1, torch.tanh(z)), 1), rand(2, 3), rand(2, 3), rand(2, 3)),
    "unlike_pieces": (lambda x, y: torch.cat((x * 2, y + 1), 1), rand(2, 3), rand(2, 4)),
    "norm_of_halves": (lambda x: rotate_half(x / x.pow(2).mean(-1, keepdim=True).sqrt(), x + 1, x + 2), rand(3, 8)),
    "norm_of_pairs": (lambda x: rotate_pairs(x / x.abs().amax(-1, keepdim=True), x + 1, x + 2), rand(3, 8)),
    "softmax_of_halves": (lambda x: rotate_half(torch.softmax(x, -1), x, x), rand(3, 2)),
    "groups": (lambda x: (x.view(2, 3, -1) - x.view(2, 3, -1).mean(-1, keepdim=True)).view(2, 6, 4) * 2, rand(2, 6, 4)),
    "swapped_output": (lambda x: (torch.tanh(x) * 2, torch.tanh(x).reshape(12) * 3), rand(3, 4)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_numbers_are_torchs(name):
    function, *inputs = FUNCTIONS[name]
    check(function, *inputs)


@pytest.mark.parametrize(("name", "columns"), [("rotate_half", 4), ("rotate_pairs", 20)])
def test_a_rotation_reads_every_element_once_and_has_no_guard(name, columns):
    function, *inputs = FUNCTIONS[name]
    program = lower_function(function, *inputs)[0].program
    loads = [value for value in program.values if value.op == "load"]
    assert program.dims[-1] == columns
    assert len(loads) == 6 and all(value.guard is None for value in loads)
    assert program.operands[0].element_count == inputs[0].numel()
    assert sorted(store.offset for store in program.stores) == ([0, 4] if name == "rotate_half" else [0, 1])


def test_a_reshape_that_no_cut_serves_is_refused():
    with pytest.raises(CannotLower) as caught:
        lower_function(lambda x: torch.tanh(x).t().reshape(2, 6) * x.reshape(2, 6), rand(3, 4))
    assert caught.value.code == "FA603"


def test_a_position_is_taken_apart_digit_by_digit():
    assert reshaped((loop(0), loop(1)), (6, 4), (24,), (6, 4)) == (Place(((0, 4), (1, 1))),)
    assert reshaped((Place(((0, 4), (1, 1))),), (24,), (6, 4), (6, 4)) == (loop(0), loop(1))
    with pytest.raises(CutLoop) as cut:
        reshaped((loop(0),), (24,), (6, 4), (24,))
    assert (cut.value.variable, cut.value.inner) == (0, 4)


def test_cutting_a_loop_renumbers_the_ones_after_it():
    nest = Nest.of((5, 24, 3)).cut(1, 4)
    assert nest.extents == (5, 6, 4, 3)
    assert nest.index() == (loop(0), Place(((1, 4), (2, 1))), loop(3))


def behind_a_token(x, bias, token):
    patches = (x + bias).flatten(2).transpose(1, 2)
    return torch.cat([token.expand(x.shape[0], -1, -1), patches], 1) * 2


PATCHES, TOKEN = rand(2, 6, 4, 3), rand(1, 1, 6)


@pytest.mark.parametrize(
    "x", [PATCHES, PATCHES.to(memory_format=torch.channels_last), rand(2, 6, 8, 3)[:, :, 4:], rand(2, 6, 4, 1), rand(2, 6, 1, 3)]
)
@pytest.mark.parametrize("bias", [rand(6, 1, 1), rand(1), PATCHES[:1, :1]])
def test_merged_dims_behind_a_token_are_read_by_their_strides(x, bias):
    if x.shape[2:] != PATCHES.shape[2:] and bias.dim() == 4:
        bias = x[:1, :1]
    check(behind_a_token, x, bias, TOKEN)


@pytest.mark.parametrize(
    ("x", "bias"),
    [
        (PATCHES, rand(6, 4, 1)),  # one of the two dims
        (PATCHES, rand(3)),
        (rand(2, 6, 4, 5)[..., :3], rand(6, 1, 1)),  # a gap behind each row
        (rand(2, 6, 3, 4).transpose(2, 3), rand(6, 1, 1)),
    ],
)
def test_merged_dims_that_do_not_lie_together_are_refused(x, bias):
    with pytest.raises(CannotLower, match="reshape"):
        lower_function(behind_a_token, x, bias, TOKEN)


def test_an_op_that_needs_the_place_itself_is_refused():
    def triangle(x, token):
        return torch.cat([token, torch.tril(x * 2).flatten(1)], 1) * 2

    with pytest.raises(CannotLower, match="reshape"):
        lower_function(triangle, rand(2, 4, 3), rand(2, 1))
